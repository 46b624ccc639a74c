"""A01, A06, A07, A09, A12: the sampling fields of a job, alone and against each other."""

from pathlib import Path
from typing import Any

import pytest

from api.sampling import BY_HAND, MAX_LOGPROBS, Limits, Prompt, sampling_params
from api.schemas import JobRequest
from promptmill.core.errors import BadRequest
from promptmill.core.jobs import Beam, SamplingParams
from tests.support.api import CONTEXT, Twins, make_twins, refused, stored

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BEAM = {"use_beam_search": True, "beam_width": 4, "temperature": 0}
VOCABULARY = 259


@pytest.fixture
def api(tmp_path: Path) -> Twins:
    return make_twins(tmp_path)


def sampling(api: Twins, fields: dict[str, Any], prompt: dict[str, Any] | None = None) -> SamplingParams:
    params = stored(api, {**(prompt or {"prompt": "hi"}), **fields}).spec.sampling
    assert isinstance(params, SamplingParams)
    return params


def test_every_sampling_field_reaches_the_engine(api: Twins) -> None:
    fields = {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": -2,
        "frequency_penalty": 2, "logit_bias": {"7": -100, "5": 1.5, "6": 0}, "seed": 11, "stop": ["x"], "stop_token_ids": [9, 3, 9],
        "ignore_eos": True, "min_tokens": 4, "n": 3, "best_of": 3, "logprobs": 2, "prompt_logprobs": 1,
    }  # fmt: skip
    assert sampling(api, fields) == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, repetition_penalty=1.1, presence_penalty=-2.0,
        frequency_penalty=2.0, logit_bias=((5, 1.5), (7, -100.0)), seed=11, stop=("x",), stop_token_ids=(3, 9), ignore_eos=True,
        min_tokens=4, n=3, logprobs=2, prompt_logprobs=1,
    )  # fmt: skip


def test_what_asks_for_nothing_has_the_cache_key_of_nothing(api: Twins) -> None:
    neutral = {
        "min_p": 0, "repetition_penalty": 1, "presence_penalty": -0.0, "frequency_penalty": 0, "logit_bias": {"5": 0}, "stop_token_ids": [],
        "ignore_eos": False, "min_tokens": 0, "n": 1, "logprobs": False, "echo": False, "use_beam_search": False, "temperature": -0.0,
    }  # fmt: skip
    plain, asked = (stored(api, {"prompt": "hi", "temperature": 0, **fields}).spec for fields in ({}, neutral))
    assert asked.cache_key("r") == plain.cache_key("r")


# -- A01 max_tokens ---------------------------------------------------------------------------------


def test_a01_zero_tokens_with_echo_only_score_the_prompt(api: Twins) -> None:
    params = sampling(api, {"max_tokens": 0, "echo": True, "logprobs": 3})
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (0, 3, 3)
    assert sampling(api, {"max_tokens": 0, "echo": True}).prompt_logprobs == 0, "an engine takes no run without any output"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "hi", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "hi", "max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"prompt": "hi", "max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({**CHAT, "max_tokens": 0}, "max_tokens"),
        ({"prompt": "hi", "max_tokens": 0, "echo": True, **BEAM}, "max_tokens"),
        ({"prompt": "hi", "max_tokens": 0, "echo": True, "n": 2}, "n"),
    ],
)
def test_a01_zero_tokens_without_echo_are_refused(api: Twins, body: dict[str, Any], param: str) -> None:
    refused(api, body, param)


def test_min_tokens_are_held_against_the_clamped_max_tokens(api: Twins) -> None:
    room = {"prompt": "a" * (CONTEXT - 10), "max_tokens": 50}
    error = refused(api, {**room, "min_tokens": 11}, "min_tokens")
    assert "10" in error["message"]
    assert stored(api, {**room, "min_tokens": 10}).spec.sampling.min_tokens == 10


# -- A06, A07 ranges --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", "0"), ("min_p", True),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 10.1), ("repetition_penalty", "1"),
        ("presence_penalty", 2.5), ("presence_penalty", -2.1), ("presence_penalty", False),
        ("frequency_penalty", 2.1), ("frequency_penalty", "0"), ("frequency_penalty", 10**400),
        ("min_tokens", -1), ("min_tokens", 1.0), ("min_tokens", True), ("ignore_eos", 1), ("ignore_eos", "true"), ("echo", 1),
        ("length_penalty", 11), ("length_penalty", "1"), ("early_stopping", "never"), ("use_beam_search", 1), ("beam_width", 33),
        ("beam_width", 1), ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", True), ("top_logprobs", "3"),
    ],
)  # fmt: skip
def test_a07_sampling_numbers_out_of_range_or_of_a_wrong_type_are_refused(api: Twins, name: str, value: Any) -> None:
    refused(api, {"prompt": "hi", name: value}, name)


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty"])
def test_a07_sampling_numbers_must_be_finite(api: Twins, name: str) -> None:
    for literal in (b"NaN", b"Infinity", b"1e400"):
        answer = api.post_raw(b'{"prompt": "hi", "%b": %b}' % (name.encode(), literal))
        assert (answer.status_code, answer.json["error"]["param"]) == (400, name)


def test_a07_edges_of_the_sampling_numbers_are_taken(api: Twins) -> None:
    for fields in (
        {"min_p": 1},
        {"repetition_penalty": 10},
        {"repetition_penalty": 0.01},
        {"presence_penalty": 2},
        {"frequency_penalty": -2},
    ):
        assert api.submit({"prompt": "hi", **fields}).status_code == 202


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ([], "logit_bias"), ("5", "logit_bias"), ({"a": 1}, "logit_bias"), ({"-1": 1}, "logit_bias"), ({"05": 1}, "logit_bias"),
        ({"٣": 1}, "logit_bias"), ({"": 1}, "logit_bias"), ({str(VOCABULARY): 1}, "logit_bias"), ({"9" * 5000: 1}, "logit_bias"),
        ({"5": 100.5}, "logit_bias.5"), ({"5": -101}, "logit_bias.5"), ({"5": True}, "logit_bias.5"), ({"5": "1"}, "logit_bias.5"),
        ({"5": None}, "logit_bias.5"), ({"5": 10**400}, "logit_bias.5"), ({str(i): 1 for i in range(1025)}, "logit_bias"),
    ],
)  # fmt: skip
def test_a07_a_bad_logit_bias_is_refused(api: Twins, bias: Any, param: str) -> None:
    refused(api, {"prompt": "hi", "logit_bias": bias}, param)


@pytest.mark.parametrize(
    ("ids", "param"),
    [
        (5, "stop_token_ids"), ({"a": 1}, "stop_token_ids"), (["x"], "stop_token_ids[0]"), ([1, True], "stop_token_ids[1]"),
        ([1, -1], "stop_token_ids[1]"), ([VOCABULARY], "stop_token_ids[0]"), ([1.0], "stop_token_ids[0]"), ([2] * 65, "stop_token_ids"),
    ],
)  # fmt: skip
def test_a06_bad_stop_token_ids_are_refused_by_their_index(api: Twins, ids: Any, param: str) -> None:
    refused(api, {"prompt": "hi", "stop_token_ids": ids}, param)


# -- A09 logprobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False}, None),
        ({}, None),
    ],
)
def test_a09_logprobs_of_a_chat(api: Twins, fields: dict[str, Any], logprobs: int | None) -> None:
    assert sampling(api, fields, CHAT).logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 5}, "logprobs"), ({"logprobs": "true"}, "logprobs"), ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 0}, "top_logprobs"), ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"), ({"echo": True}, "echo"),
    ],
)  # fmt: skip
def test_a09_bad_logprobs_of_a_chat_are_refused(api: Twins, fields: dict[str, Any], param: str) -> None:
    refused(api, {**CHAT, **fields}, param)


@pytest.mark.parametrize("logprobs", [0, 5, 20])
def test_a09_logprobs_of_a_prompt(api: Twins, logprobs: int) -> None:
    assert sampling(api, {"logprobs": logprobs}).logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"), ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": 1.0}, "logprobs"),
        ({"logprobs": "5"}, "logprobs"), ({"logprobs": 3, "top_logprobs": 3}, "top_logprobs"),
    ],
)  # fmt: skip
def test_a09_bad_logprobs_of_a_prompt_are_refused(api: Twins, fields: dict[str, Any], param: str) -> None:
    refused(api, {"prompt": "hi", **fields}, param)


def test_a09_echo_asks_the_engine_for_as_many_of_the_prompt(api: Twins) -> None:
    assert sampling(api, {"echo": True}).prompt_logprobs is None
    assert sampling(api, {"echo": True, "logprobs": 5}).prompt_logprobs == 5
    assert sampling(api, {"echo": True, "logprobs": 5, "prompt_logprobs": 7}).prompt_logprobs == 7
    assert sampling(api, {"logprobs": 5}).prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "prompt", "param"),
    [
        ({"n": 32, "max_tokens": 2048, "logprobs": 20}, Prompt(False, 10, 8000, 50_000), "logprobs"),
        ({"n": 32, "logprobs": True, "top_logprobs": 20}, Prompt(True, 10, 8000, 50_000), "top_logprobs"),
        ({"prompt_logprobs": 20}, Prompt(False, 100_000, 8000, 50_000), "prompt_logprobs"),
        ({"n": 32, "max_tokens": 1, "logprobs": 20, "echo": True}, Prompt(False, 8000, 100, 50_000), "logprobs"),
    ],
)
def test_a09_a_result_of_too_many_logprobs_is_refused(fields: dict[str, Any], prompt: Prompt, param: str) -> None:
    limits = Limits(max_tokens=2048, job_tokens=100_000)
    sent = JobRequest.model_validate({name: value for name, value in fields.items() if name not in BY_HAND})
    with pytest.raises(BadRequest, match=str(MAX_LOGPROBS)) as error:
        sampling_params(fields, sent, prompt, limits, None)
    assert error.value.param == param
    fewer = {**fields, "n": 2, **({"prompt_logprobs": 2} if "prompt_logprobs" in fields else {})}
    assert sampling_params(fewer, sent.model_copy(update=fewer), prompt, limits, None).n == 2


# -- A12 n and beams --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1, 33, 129, 100_000, 1.0, True, "2"])
def test_a12_a_bad_n_is_refused(api: Twins, n: Any) -> None:
    refused(api, {"prompt": "hi", "n": n}, "n")


def test_a12_best_of_is_n_or_refused(api: Twins) -> None:
    refused(api, {"prompt": "hi", "n": 2, "best_of": 1}, "best_of", "invalid_request")
    refused(api, {"prompt": "hi", "n": 2, "best_of": 3}, "best_of", "unsupported_parameter")
    assert sampling(api, {"n": 2, "best_of": 2}).n == 2


def test_a12_greedy_choices_may_be_many(api: Twins) -> None:
    params = sampling(api, {"n": 32, "temperature": 0})
    assert (params.n, params.greedy, params.total_tokens) == (32, True, 32 * 16)


def test_a12_the_tokens_of_all_choices_are_bounded_after_the_clamp(tmp_path: Path) -> None:
    api = make_twins(tmp_path, max_tokens_cap=20, job_tokens_cap=50)
    assert sampling(api, {"n": 2, "max_tokens": 10**6}).max_tokens == 20
    error = refused_again(api, {"prompt": "hi", "n": 3, "max_tokens": 10**6})
    assert "50" in error["message"]
    refused_again(api, {"prompt": "hi", **BEAM, "max_tokens": 20})
    assert sampling(api, {"n": 5}, CHAT).max_tokens == 10, "a number that was not asked for is fitted"


def refused_again(api: Twins, body: dict[str, Any]) -> dict[str, Any]:
    answer = api.submit(body)
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "max_tokens")
    error: dict[str, Any] = answer.json["error"]
    return error


def test_a12_no_more_choices_than_the_engine_has_rows(tmp_path: Path) -> None:
    api = make_twins(tmp_path, engine_rows=3)
    refused(api, {"prompt": "hi", "n": 4}, "n")
    refused(api, {"prompt": "hi", **BEAM}, "beam_width")
    assert sampling(api, {"n": 3}).n == 3


@pytest.mark.parametrize(
    ("fields", "beam"),
    [
        (BEAM, Beam(4)),
        ({**BEAM, "length_penalty": 0.5, "early_stopping": True, "n": 4}, Beam(4, 0.5, True)),
        ({"use_beam_search": True, "n": 3, "best_of": 3, "temperature": 0}, Beam(3)),
    ],
)
def test_a_beam_search(api: Twins, fields: dict[str, Any], beam: Beam) -> None:
    assert sampling(api, fields).beam == beam


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "temperature": 0}, "beam_width"), ({**BEAM, "n": 5}, "n"), ({**BEAM, "temperature": 0.5}, "temperature"),
        ({**BEAM, "temperature": None}, "temperature"), ({**BEAM, "stop": "x"}, "stop"), ({**BEAM, "logprobs": 0}, "logprobs"),
        ({"beam_width": 4}, "beam_width"), ({"length_penalty": 0.5}, "length_penalty"), ({"early_stopping": True}, "early_stopping"),
    ],
)  # fmt: skip
def test_a_beam_search_that_cannot_be_is_refused(api: Twins, fields: dict[str, Any], param: str) -> None:
    refused(api, {"prompt": "hi", **fields}, param)
