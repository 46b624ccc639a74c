"""A09: logprobs, echo and several choices in the shapes of OpenAI and vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from api.logprobs import kept_tokens
from api.schemas import Job
from api.token_texts import TokenTexts
from promptmill.core.jobs import Choice, Finish, FinishReason, Outcome, Status, TokenLogprob, Usage
from tests.support.api import SPECIAL, Twins, make_model_folder, make_twins

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def api(tmp_path: Path) -> Twins:
    return make_twins(tmp_path)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(make_model_folder(tmp_path / "model") / "tokenizer.json"))


@pytest.fixture
def texts(tokenizer: Tokenizer) -> TokenTexts:
    return TokenTexts(tokenizer)


def ids(api: Twins, text: str) -> tuple[int, ...]:
    return tuple(api.services.models["tiny-instruct"].encode_prompt(text))


def scores(token_ids: tuple[int, ...], *others: int) -> tuple[TokenLogprob, ...]:
    """Token i has -0.5 * (i + 1); it is the likeliest at its place, ``others`` follow."""
    return tuple(
        TokenLogprob(-0.5 * (at + 1), ((token, -0.5 * (at + 1)), *((other, -9.0 - i) for i, other in enumerate(others))))
        for at, token in enumerate(token_ids)
    )


def result(api: Twins, body: dict[str, Any], *choices: Choice, prompt: tuple[TokenLogprob | None, ...] | None = None) -> dict[str, Any]:
    """The answer of a job that ended with these choices; checked against the documented schema."""
    job_id = api.submit(body).json["id"]
    (claim,) = api.store.claim_many([job_id], "w", "n")
    assert claim is not None
    count = sum(len(choice.token_ids) for choice in choices)
    outcome = Outcome(choices, Usage(len(claim.spec.prompt_ids), count), prompt)
    assert api.store.finish_many([Finish(job_id, claim.attempt, "w", Status.SUCCEEDED, outcome)]) == [True]
    answer = api.client.get(f"/v1/jobs/{job_id}")
    json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    Job.model_validate(answer.json, strict=True)
    shown: dict[str, Any] = answer.json["result"]
    return shown


def test_a09_chat_logprobs(api: Twins) -> None:
    token_ids = ids(api, "ab")
    choice = Choice(0, "ab", token_ids, "length", scores(token_ids, 3))
    shown = result(api, {**CHAT, "logprobs": True, "top_logprobs": 1}, choice)["choices"][0]["logprobs"]
    assert shown == {
        "content": [
            {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]},
            {"token": "b", "logprob": -1.0, "bytes": [98], "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}]},
        ],
        "refusal": None,
    }


def test_a09_chat_logprobs_alone_have_no_alternatives(api: Twins) -> None:
    token_ids = ids(api, "a")
    shown = result(api, {**CHAT, "logprobs": True}, Choice(0, "a", token_ids, "length", (TokenLogprob(-0.5),)))
    assert shown["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_without_logprobs_the_place_of_them_is_null(api: Twins) -> None:
    for body in (CHAT, {"prompt": "hi"}):
        shown = result(api, body, Choice(0, "a", ids(api, "a"), "stop"))
        assert shown["choices"][0]["logprobs"] is None
        assert "prompt_logprobs" not in shown and "prompt_logprobs" not in shown["choices"][0]


def test_a09_completion_logprobs(api: Twins) -> None:
    token_ids, (other,) = ids(api, "ab"), ids(api, "z")
    shown = result(api, {"prompt": "hi", "logprobs": 2}, Choice(0, "ab", token_ids, "length", scores(token_ids, other)))
    assert shown["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"a": -0.5, "z": -9.0}, {"b": -1.0, "z": -9.0}],
        "text_offset": [0, 1],
    }


def test_a09_zero_alternatives_mean_the_token_alone_and_an_unlikely_token_is_in_its_own_list(api: Twins) -> None:
    token_ids, (other,) = ids(api, "a"), ids(api, "z")
    unlikely = Choice(0, "a", token_ids, "length", (TokenLogprob(-9999.0, ((other, -0.1),)),))
    one = result(api, {"prompt": "hi", "logprobs": 1}, unlikely)["choices"][0]["logprobs"]
    assert one["top_logprobs"] == [{"a": -9999.0, "z": -0.1}]
    zero = result(api, {"prompt": "hi", "logprobs": 0}, Choice(0, "a", token_ids, "length", (TokenLogprob(-0.5),)))
    assert zero["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]


def test_a09_parts_of_a_character_have_their_bytes_and_names_of_their_own(api: Twins) -> None:
    emoji = ids(api, "😀")
    assert len(emoji) == 4
    choice = Choice(0, "😀!", (*emoji, *ids(api, "!")), "length", scores((*emoji, *ids(api, "!")), *ids(api, "é")))
    text = result(api, {"prompt": "hi", "logprobs": 3}, choice)["choices"][0]["logprobs"]
    assert text["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "!"]
    assert text["text_offset"] == [0, 0, 0, 0, 1]
    assert [len(top) for top in text["top_logprobs"]] == [3, 3, 3, 3, 3], "entries of one display overwrite each other"
    chat = result(api, {**CHAT, "logprobs": True}, choice)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in chat for byte in entry["bytes"]).decode() == "😀!"


@pytest.mark.parametrize(("stop", "kept"), [("cd", 2), ("c", 2), ("b", 1), ("a", 0), ("d", 3)])
def test_a09_logprobs_end_where_a_stop_text_cut_the_answer(api: Twins, stop: str, kept: int) -> None:
    token_ids = ids(api, "abcd")
    choice = Choice(0, "abcd"[: "abcd".index(stop)], token_ids, "stop", scores(token_ids))
    body = {"logprobs": 0, "stop": [stop]}
    assert len(result(api, {"prompt": "hi", **body}, choice)["choices"][0]["logprobs"]["tokens"]) == kept
    chat = result(api, {**CHAT, "logprobs": True, "stop": [stop]}, choice)
    assert len(chat["choices"][0]["logprobs"]["content"]) == kept
    assert chat["usage"]["completion_tokens"] == 4, "usage counts what was generated"


def test_a09_the_end_token_has_its_logprob_too(api: Twins) -> None:
    end = ids(api, SPECIAL[2])
    assert len(end) == 1
    token_ids = (*ids(api, "ab"), *end)
    shown = result(api, {"prompt": "hi", "logprobs": 0, "stop": "zz"}, Choice(0, "ab", token_ids, "stop", scores(token_ids)))
    assert shown["choices"][0]["logprobs"]["tokens"] == ["a", "b", SPECIAL[2]]
    assert shown["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]


# -- echo and the prompt ------------------------------------------------------------------------------


@pytest.mark.parametrize("as_ids", [False, True])
def test_a09_echo_puts_the_prompt_before_text_and_logprobs(api: Twins, as_ids: bool) -> None:
    prompt, token_ids = ids(api, "hé"), ids(api, "ok")
    body = {"prompt": list(prompt) if as_ids else "hé", "echo": True, "logprobs": 1}
    choices = [Choice(index, "ok", token_ids, "length", scores(token_ids)) for index in (0, 1)]
    shown = result(api, {**body, "n": 2}, *choices, prompt=(None, *scores(prompt[1:])))
    assert [choice["text"] for choice in shown["choices"]] == ["héok", "héok"]
    for choice in shown["choices"]:
        lists = choice["logprobs"]
        assert lists["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "o", "k"]
        assert lists["token_logprobs"] == [None, -0.5, -1.0, -0.5, -1.0]
        assert lists["top_logprobs"][0] is None and None not in lists["top_logprobs"][1:]
        assert lists["text_offset"] == [0, 1, 1, 2, 3]
        greedy = [top is None or max(top.values()) == own for own, top in zip(lists["token_logprobs"], lists["top_logprobs"], strict=True)]
        assert all(greedy), "a token and its top entry must be the same float"
    assert "prompt_logprobs" not in shown["choices"][0]


def test_a01_scoring_answers_with_the_prompt_alone(api: Twins) -> None:
    prompt = ids(api, "hi")
    body = {"prompt": "hi", "echo": True, "logprobs": 0, "max_tokens": 0}
    shown = result(api, body, Choice(0, "", (), "length", ()), prompt=(None, *scores(prompt[1:])))
    assert (shown["choices"][0]["text"], shown["choices"][0]["finish_reason"]) == ("hi", "length")
    assert shown["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert (shown["usage"]["prompt_tokens"], shown["usage"]["completion_tokens"]) == (2, 0)


def test_echo_without_logprobs_is_text_alone(api: Twins) -> None:
    shown = result(api, {"prompt": "hi", "echo": True}, Choice(0, "ok", ids(api, "ok"), "length"))
    assert (shown["choices"][0]["text"], shown["choices"][0]["logprobs"]) == ("hiok", None)


@pytest.mark.parametrize("scored", [None, (None,)])
def test_a_run_that_ended_before_its_prompt_was_scored_has_the_logprobs_of_its_answer(api: Twins, scored: Any) -> None:
    token_ids = ids(api, "o")
    body = {"prompt": "hi", "echo": True, "logprobs": 0, "prompt_logprobs": 0}
    shown = result(api, body, Choice(0, "o", token_ids, "cancelled", scores(token_ids)), prompt=scored)["choices"][0]
    assert (shown["logprobs"]["text_offset"], "prompt_logprobs" in shown) == ([2], False)


def test_prompt_logprobs_are_by_id_and_once_for_all_choices(api: Twins) -> None:
    prompt, (other,) = ids(api, "hi"), ids(api, "z")
    expected = [
        None,
        {str(prompt[1]): {"logprob": -0.5, "decoded_token": "i"}, str(other): {"logprob": -9.0, "decoded_token": "z"}},
    ]
    given = (None, *scores(prompt[1:], other))
    choices = [Choice(index, "a", ids(api, "a"), "length") for index in (0, 1)]
    text = result(api, {"prompt": "hi", "prompt_logprobs": 2, "n": 2}, *choices, prompt=given)
    assert [choice.get("prompt_logprobs") for choice in text["choices"]] == [expected, None]
    tokens = len(api.store.get(api.submit(CHAT).json["id"]).spec.prompt_ids)  # type: ignore[union-attr]
    chat = result(api, {**CHAT, "prompt_logprobs": 1}, choices[0], prompt=(None, *scores(ids(api, "x" * (tokens - 1)))))
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] == tokens


def test_echo_and_prompt_logprobs_have_as_many_alternatives_as_each_asked_for(api: Twins) -> None:
    prompt, others = ids(api, "hi"), ids(api, "xyz")
    body = {"prompt": "hi", "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    shown = result(api, body, Choice(0, "", (), "length", ()), prompt=(None, *scores(prompt[1:], *others)))["choices"][0]
    assert len(shown["logprobs"]["top_logprobs"][1]) == 1
    assert len(shown["prompt_logprobs"][1]) == 3


# -- choices ------------------------------------------------------------------------------------------


def test_a12_choices_have_their_index_and_usage_counts_all_of_them(api: Twins) -> None:
    choices = [Choice(index, text, ids(api, text), "length") for index, text in enumerate(("one", "two", "x"))]
    shown = result(api, {**CHAT, "n": 3}, *choices)
    assert [(choice["index"], choice["message"]["content"]) for choice in shown["choices"]] == [(0, "one"), (1, "two"), (2, "x")]
    assert shown["usage"]["completion_tokens"] == 7


def test_a_cache_hit_has_the_logprobs_of_its_first_run(api: Twins) -> None:
    body = {"prompt": "hi", "logprobs": 1, "temperature": 0, "max_tokens": 2}
    spec = api.store.get(api.submit(body).json["id"]).spec  # type: ignore[union-attr]
    token_ids = ids(api, "ab")
    outcome = Outcome((Choice(0, "ab", token_ids, "length", scores(token_ids)),), Usage(2, 2))
    api.cache.put("default", spec.cache_key("0123456789abcdef"), outcome)
    hit = api.submit(body).json
    assert hit["cache"] == "hit"
    assert hit["result"]["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert api.submit({**body, "logprobs": 2}).json["cache"] == "miss"


def test_the_list_of_jobs_leaves_logprobs_out(api: Twins) -> None:
    token_ids = ids(api, "ab")
    body = {"prompt": "hi", "logprobs": 1, "prompt_logprobs": 1, "echo": True}
    result(api, body, Choice(0, "ab", token_ids, "length", scores(token_ids)), prompt=(None, *scores(token_ids[1:])))
    shown = api.client.get("/v1/jobs").json["data"][0]["result"]["choices"][0]
    assert (shown["text"], shown["logprobs"], "prompt_logprobs" in shown) == ("hiab", None, False)


# -- texts of tokens ----------------------------------------------------------------------------------


def test_tokens_of_a_sentencepiece_vocabulary() -> None:
    vocabulary = {"<unk>": 0, "<0xF0>": 1, "<0x41>": 2, "▁Hi": 3, "A": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    texts = TokenTexts(tokenizer)
    assert [texts.raw(token) for token in (1, 2, 3, 5, 6)] == [b"\xf0", b"A", b" Hi", b" ", b"<s>"]
    assert texts.names([2, 4, 2, 99]) == {2: "A", 4: "token_id:4", 99: "token_id:99"}
    assert texts.offsets([6, 3, 4], special=False) == [0, 0, 3, 4]
    assert texts.offsets([6, 3, 4], special=True) == [0, 3, 6, 7]


@given(st.text(max_size=12), st.data())
def test_the_bytes_of_tokens_make_the_text_and_a_cut_keeps_what_begins_before_it(text: str, data: st.DataObject) -> None:
    texts = TokenTexts(TINY_TOKENIZER)
    token_ids = tuple(TINY_TOKENIZER.encode(text).ids)
    assert b"".join(texts.raw(token) or b"" for token in token_ids).decode() == text
    *starts, length = texts.offsets(token_ids, special=False)
    assert length == len(text) and starts == sorted(starts)
    cut = data.draw(st.integers(0, len(text)))
    reason: FinishReason = "stop"
    kept = kept_tokens(Choice(0, text[:cut], token_ids, reason), texts, stops=True)
    assert all(start < cut for start in starts[:kept])
    assert kept == len(token_ids) if cut == len(text) else starts[kept] >= cut


def _tiny() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TINY_TOKENIZER = _tiny()
