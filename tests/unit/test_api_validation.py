"""A01-A07, A11: what cannot run is refused with the field's name before it is a job. More of the sampling
fields: test_api_sampling.py, test_api_constraints.py."""

from pathlib import Path
from typing import Any

import pytest

from promptmill.core.jobs import Priority
from tests.support.api import CHATML, CONTEXT, SPECIAL, TINY, Twins, make_model_folder, make_twins, refused, stored

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def api(tmp_path: Path) -> Twins:
    return make_twins(tmp_path)


# -- A01 max_tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -5, 1.5, "10", True, [1]])
def test_a01_a_bad_max_tokens_is_refused(api: Twins, name: str, value: Any):
    error = refused(api, {"prompt": "hi", name: value}, name)
    assert "-5" not in error["message"]


def test_a01_max_tokens_defaults(api: Twins):
    assert stored(api, {"prompt": "hi", "max_tokens": None}).spec.sampling.max_tokens == 16
    job = stored(api, {"messages": [USER]})
    assert job.spec.sampling.max_tokens == CONTEXT - len(job.spec.prompt_ids)


@pytest.mark.parametrize("value", [65535, 2**31, 10**300])
def test_a01_a02_a_huge_max_tokens_is_clamped_to_the_room(api: Twins, value: int):
    assert stored(api, {"prompt": "a" * (CONTEXT - 10), "max_tokens": value}).spec.sampling.max_tokens == 10


def test_max_tokens_is_clamped_to_the_server_cap(tmp_path: Path):
    api = make_twins(tmp_path, max_tokens_cap=5)
    assert stored(api, {"prompt": "hi"}).spec.sampling.max_tokens == 5
    assert stored(api, {"messages": [USER]}).spec.sampling.max_tokens == 5


def test_a05_max_completion_tokens_wins(api: Twins):
    assert stored(api, {"prompt": "hi", "max_tokens": 3, "max_completion_tokens": 7}).spec.sampling.max_tokens == 7


# -- A02 context ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a02_a_prompt_that_leaves_no_room_is_refused(api: Twins, length: int, as_ids: bool):
    error = refused(api, {"prompt": [5] * length if as_ids else "a" * length}, "prompt", "context_length_exceeded")
    assert str(CONTEXT) in error["message"]
    assert str(length) in error["message"]
    assert "aaa" not in error["message"]


def test_a02_a_prompt_that_leaves_one_token_is_taken(api: Twins):
    assert stored(api, {"prompt": "a" * (CONTEXT - 1), "max_tokens": 1}).spec.sampling.max_tokens == 1


def test_a02_messages_that_leave_no_room_are_refused(api: Twins):
    refused(api, {"messages": [{"role": "user", "content": "a" * CONTEXT}]}, "messages", "context_length_exceeded")


def test_a02_what_can_never_fit_is_refused_without_tokenising(api: Twins):
    refused(api, {"prompt": "a" * 900_000}, "prompt", "context_length_exceeded")
    refused(api, {"messages": [{"role": "assistant"}] * 5000}, "messages", "context_length_exceeded")


# -- A03 messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, USER, {"role": "wizard", "content": "x"}], "messages[2].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls"),
    ],
)
def test_a03_odd_messages_are_refused_by_their_path(api: Twins, messages: Any, param: str):
    refused(api, {"messages": messages}, param)


def test_a03_exactly_one_of_prompt_and_messages(api: Twins):
    refused(api, {}, "prompt")
    refused(api, {"prompt": None, "messages": None}, "prompt")
    refused(api, {"prompt": "hi", "messages": [USER]}, "messages")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "x"}],
        [USER, {"role": "assistant", "content": ""}, USER],
        [USER, {"role": "assistant", "content": None}, USER],
        [USER, {"role": "assistant"}, USER],
        [USER, {"role": "assistant", "content": "so"}],
        [USER, USER],
        [{"role": "user", "content": "hi", "name": "bob", "extra": {"a": 1}, "tool_calls": None}],
        [{"role": "assistant", "content": "x", "tool_calls": []}, USER],
    ],
)
def test_a03_messages_that_the_template_allows_are_taken(api: Twins, messages: Any):
    assert stored(api, {"messages": messages}).spec.shape == "messages"


def test_a03_developer_is_system(api: Twins):
    ids = [stored(api, {"messages": [{"role": role, "content": "x"}]}).spec.prompt_ids for role in ("developer", "system")]
    assert ids[0] == ids[1]


def test_a03_text_parts_are_joined(api: Twins):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert (
        stored(api, {"messages": [{"role": "user", "content": parts}]}).spec.prompt_ids == stored(api, {"messages": [USER]}).spec.prompt_ids
    )


def test_a03_a_template_that_raises_gives_its_own_words(tmp_path: Path):
    template = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}" + CHATML
    make_model_folder(tmp_path / TINY, template=template)
    from api.tokenizing import ServedModel
    from promptmill.core.errors import BadRequest

    model = ServedModel.load(tmp_path / TINY)
    assert model.encode_chat([("user", "hi")])
    with pytest.raises(BadRequest, match="one message only") as error:
        model.encode_chat([("user", "hi"), ("user", "hi")])
    assert error.value.param == "messages"


# -- A05 null, unknown, unbuilt ---------------------------------------------------------------------


def test_a05_unknown_and_neutral_fields_are_taken(api: Twins):
    neutral = {
        "user": "u", "metadata": {}, "store": False, "service_tier": "auto", "frobnicate": 1, "n": 1, "best_of": 1, "echo": False,
        "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0, "logit_bias": {},
        "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "tools": [], "tool_choice": "none", "stream": False,
        "response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": 1,
        "early_stopping": False, "cancel_on_disconnect": False, "suffix": "",
    }  # fmt: skip
    assert api.submit({"prompt": "hi", **neutral}).status_code == 202


def test_a05_null_is_absent_for_every_field(api: Twins):
    from api.schemas import JobRequest
    from api.unbuilt import NEUTRAL

    nulls = dict.fromkeys([*JobRequest.model_fields, *NEUTRAL, "guided_json", "anything"])
    assert api.submit({**nulls, "prompt": "hi"}).status_code == 202


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2), ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("response_format", {"type": "json_object"}),
        ("guided_json", {}), ("guided_anything_new", "x"), ("structured_outputs", {"regex": "a"}), ("grammar", "root ::= 'a'"),
        ("stream", True), ("stream_options", {}), ("include_stop_str_in_output", True), ("bad_words", ["x"]), ("typical_p", 0.5),
        ("webhook", {"url": "http://a/"}), ("deadline", 4e9), ("ttl", 5), ("cancel_on_disconnect", True),
        ("suffix", "x"), ("batch_id", "batch_1"),
    ],
)  # fmt: skip
def test_a05_a_field_that_is_not_built_is_refused(api: Twins, name: str, value: Any):
    refused(api, {"prompt": "hi", name: value}, name, "unsupported_parameter")


# -- A06 stop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["", ["x", ""], [1, 2], ["x"] * 33, 5, {"a": 1}, True, [None], "x" * 2000])
def test_a06_a_bad_stop_is_refused(api: Twins, stop: Any):
    refused(api, {"prompt": "hi", "stop": stop}, "stop")


@pytest.mark.parametrize(
    ("stop", "kept"),
    [(None, ()), ([], ()), ("\n", ("\n",)), (["a", "b", "c", "d", "e"], ("a", "b", "c", "d", "e")), (["x"] * 32, ("x",) * 32)],
)
def test_a06_good_stops_are_kept(api: Twins, stop: Any, kept: tuple[str, ...]):
    assert stored(api, {"prompt": "hi", "stop": stop}).spec.sampling.stop == kept


# -- A07 numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1), ("temperature", -0.1), ("temperature", "0.5"), ("temperature", True), ("temperature", 10**400),
        ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_p", "1"), ("top_k", -2), ("top_k", 1.0), ("top_k", True),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5), ("seed", "1"), ("seed", True),
        ("model", 3), ("cache", True), ("cache", "maybe"), ("service_tier", "scale"), ("metadata", []), ("metadata", {"a": 1}),
        ("metadata", {str(i): "x" for i in range(17)}), ("metadata", {"k" * 65: "x"}), ("metadata", {"k": "v" * 513}),
        ("priority", "urgent"), ("priority", 1), ("priority", False), ("priority", ["bulk"]), ("priority", 0.0),
    ],
)  # fmt: skip
def test_a07_values_out_of_range_or_of_a_wrong_type_are_refused(api: Twins, name: str, value: Any):
    refused(api, {"prompt": "hi", name: value}, name)


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e400"])
def test_a07_numbers_that_are_not_finite_are_refused_by_name(api: Twins, literal: bytes):
    answer = api.post_raw(b'{"prompt": "hi", "temperature": ' + literal + b"}")
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == "temperature"


def test_a07_edges_are_taken(api: Twins):
    for fields in (
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 2},
        {"top_p": 1},
        {"top_k": 5},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
    ):
        assert api.submit({"prompt": "hi", **fields}).status_code == 202
    assert stored(api, {"prompt": "hi", "temperature": 0}).spec.sampling.greedy


@pytest.mark.parametrize("top_k", [None, 0, -1, 10**9])
def test_a_top_k_that_excludes_nothing_is_off(api: Twins, top_k: int | None):
    assert stored(api, {"prompt": "hi", "top_k": top_k}).spec.sampling.top_k == 0


# -- A11 prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"), ([[]], "prompt"), (["a", "b"], "prompt"), (["a", [1]], "prompt"), ([[1, 2], [3]], "prompt"),
        (["x"] * 2000, "prompt"),
        ([1, "a"], "prompt[1]"), ([-1], "prompt[0]"), ([1, 259], "prompt[1]"), ([1.5], "prompt[0]"), ([1, True], "prompt[1]"),
        (7, "prompt"), (True, "prompt"), ({}, "prompt"), ([1, None], "prompt[1]"),
    ],
)  # fmt: skip
def test_a11_bad_prompts_are_refused_by_their_index(api: Twins, prompt: Any, param: str):
    refused(api, {"prompt": prompt}, param)


def test_a11_token_ids_are_taken_as_they_are(api: Twins):
    assert stored(api, {"prompt": [1, 2, 258]}).spec.prompt_ids == (1, 2, 258)


@pytest.mark.parametrize(("bos", "eos", "token"), [(True, True, SPECIAL[1]), (False, True, SPECIAL[2])])
def test_a11_an_empty_prompt_is_the_token_that_begins_a_text(tmp_path: Path, bos: bool, eos: bool, token: str):
    from tokenizers import Tokenizer

    from api.tokenizing import ServedModel

    folder = make_model_folder(tmp_path / TINY, bos=bos, eos=eos)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ServedModel.load(folder).encode_prompt("") == (tokenizer.token_to_id(token),)


def test_a11_an_empty_prompt_without_such_a_token_is_refused(tmp_path: Path):
    from api.tokenizing import ServedModel
    from promptmill.core.errors import BadRequest

    with pytest.raises(BadRequest) as error:
        ServedModel.load(make_model_folder(tmp_path / TINY, bos=False, eos=False)).encode_prompt("")
    assert error.value.param == "prompt"


# -- model, priority --------------------------------------------------------------------------------


def test_an_unknown_model_is_404(api: Twins):
    refused(api, {"prompt": "hi", "model": "gpt-x"}, "model", "model_not_found", status=404)


def test_the_model_may_be_left_out_only_while_one_is_served(tmp_path: Path):
    api = make_twins(tmp_path, names=("one", "two"))
    refused(api, {"prompt": "hi"}, "model")
    assert stored(api, {"prompt": "hi", "model": "two"}).model == "two"


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, "standard"),
        ({"priority": None}, "standard"),
        ({"priority": 0}, "standard"),
        ({"priority": "bulk"}, "bulk"),
        ({"service_tier": "priority"}, "interactive"),
        ({"service_tier": "flex"}, "bulk"),
        ({"service_tier": "default"}, "standard"),
        ({"service_tier": "flex", "priority": "interactive"}, "interactive"),
    ],
)
def test_priority_and_service_tier(api: Twins, fields: dict[str, Any], priority: str):
    assert stored(api, {"prompt": "hi", **fields}).priority is Priority(priority)
