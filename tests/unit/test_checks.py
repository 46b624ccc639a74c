import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batching.checks import check_request
from batching.grammar import GrammarCompiler
from promptmill.core.engine import Capabilities, GenRequest
from promptmill.core.errors import Rejected
from promptmill.core.jobs import Beam, Grammar, Priority, SamplingParams
from promptmill.core.limits import MAX_BIASES, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_STOPS, MAX_WIDTH
from promptmill.core.models import ModelCard
from tests.support.engine import tiny_tokenizer

VOCAB = tiny_tokenizer().get_vocab_size()
CARD = ModelCard("tiny", "0123456789abcdef", "test", 128, VOCAB, (0,), 1, "<|start|>", "<|end|>", 0)
NAN, INF = math.nan, math.inf
ALL = Capabilities()
BEAM: dict[str, Any] = {"temperature": 0.0, "beam": Beam(4)}


@pytest.fixture(scope="module")
def grammars():
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, (0,))
    yield compiler
    compiler.close()


def request(*, prompt: Any = (10, 11, 12), generated: Any = (), max_tokens: Any = 8, **sampling: Any) -> GenRequest:
    return GenRequest("r", "tiny", prompt, SamplingParams(max_tokens, **sampling), Priority.STANDARD, 0.0, generated=generated)


def refused(grammars, caps: Capabilities = ALL, **fields: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        check_request(request(**fields), CARD, caps, grammars)
    return caught.value


GOOD: list[dict[str, Any]] = [
    {},
    {"prompt": (0, VOCAB - 1), "max_tokens": 126},
    {"max_tokens": 0, "prompt_logprobs": 0},
    {"temperature": 0, "top_p": 1, "min_p": 1, "repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2.0},
    {"temperature": 1e6, "top_p": 1e-9, "top_k": 10**6, "seed": -(2**63)},
    {"seed": 2**63 - 1, "ignore_eos": True, "min_tokens": 8},
    {"logit_bias": tuple((token % VOCAB, 100.0) for token in range(MAX_BIASES))},
    {"stop": ("x" * MAX_STOP_CHARS,) * MAX_STOPS, "stop_token_ids": (0,) * MAX_STOP_IDS},
    {"n": MAX_WIDTH, "logprobs": 20, "prompt_logprobs": 20},
    {**BEAM, "n": 4},
    {"temperature": 0.0, "beam": Beam(MAX_WIDTH, -1.5, True), "prompt_logprobs": 3},
    {"generated": ((1, 2), ()), "n": 3},
    {"generated": ((1,) * 8,)},
    {**BEAM, "generated": ((),)},
    {"grammar": Grammar("json_object")},
    {"grammar": Grammar("choice", '["a", "b"]'), "n": 2},
]


@pytest.mark.parametrize("fields", GOOD, ids=range(len(GOOD)))
def test_what_can_run_passes(grammars, fields) -> None:
    check_request(request(**fields), CARD, ALL, grammars)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ()}),
    ("prompt", {"prompt": (VOCAB,)}),
    ("prompt", {"prompt": (-1,)}),
    ("prompt", {"prompt": (True,)}),
    ("prompt", {"prompt": (1.0,)}),
    ("prompt", {"prompt": (NAN,)}),
    ("prompt", {"prompt": (np.int64(3),)}),
    ("prompt", {"prompt": ("a",)}),
    ("prompt", {"prompt": "abc"}),
    ("prompt", {"prompt": None}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 8.0}),
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 126}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("max_tokens", {"prompt": (1,) * 128}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 0, "prompt_logprobs": 1, "n": 2}),
    ("max_tokens", {"max_tokens": 0, "prompt_logprobs": 1, **BEAM}),
    *(("temperature", {"temperature": value}) for value in (-0.1, NAN, INF, -INF, "1", None, True, 10**400, [1.0])),
    *(("top_p", {"top_p": value}) for value in (0, 0.0, -0.5, 1.01, NAN, INF, "1", None, False)),
    *(("min_p", {"min_p": value}) for value in (-0.1, 1.5, NAN, "0")),
    *(("repetition_penalty", {"repetition_penalty": value}) for value in (0, -1.0, NAN, INF, None)),
    *(("presence_penalty", {"presence_penalty": value}) for value in (-2.1, 2.1, NAN, INF, "0")),
    *(("frequency_penalty", {"frequency_penalty": value}) for value in (-2.1, 2.1, NAN, -INF, None)),
    *(("top_k", {"top_k": value}) for value in (-1, 1.5, NAN, True, None, 2**31)),
    *(("seed", {"seed": value}) for value in (2**63, -(2**63) - 1, 1.0, NAN, True, "1")),
    *(("ignore_eos", {"ignore_eos": value}) for value in (1, None, "yes")),
    ("logit_bias", {"logit_bias": ((VOCAB, 1.0),)}),
    ("logit_bias", {"logit_bias": ((-1, 1.0),)}),
    ("logit_bias", {"logit_bias": ((True, 1.0),)}),
    ("logit_bias", {"logit_bias": ((1, NAN),)}),
    ("logit_bias", {"logit_bias": ((1, -INF),)}),
    ("logit_bias", {"logit_bias": ((1, 100.5),)}),
    ("logit_bias", {"logit_bias": ((1, "1"),)}),
    ("logit_bias", {"logit_bias": ((1,),)}),
    ("logit_bias", {"logit_bias": (1, 2)}),
    ("logit_bias", {"logit_bias": {1: 2.0}}),
    ("logit_bias", {"logit_bias": ((1, 1.0),) * (MAX_BIASES + 1)}),
    ("stop", {"stop": ("",)}),
    ("stop", {"stop": ("a",) * (MAX_STOPS + 1)}),
    ("stop", {"stop": ("a",) * 10_000}),
    ("stop", {"stop": ("x" * (MAX_STOP_CHARS + 1),)}),
    ("stop", {"stop": (b"a",)}),
    ("stop", {"stop": "abc"}),
    ("stop", {"stop": None}),
    ("stop_token_ids", {"stop_token_ids": (VOCAB,)}),
    ("stop_token_ids", {"stop_token_ids": (1.0,)}),
    ("stop_token_ids", {"stop_token_ids": (1,) * (MAX_STOP_IDS + 1)}),
    ("stop_token_ids", {"stop_token_ids": 5}),
    *(("min_tokens", {"min_tokens": value}) for value in (-1, 9, 1.0, True, None)),
    *(("n", {"n": value}) for value in (0, -1, MAX_WIDTH + 1, 1.0, True, None, "2")),
    *(("logprobs", {"logprobs": value}) for value in (-1, 21, 1.0, True, "5")),
    *(("prompt_logprobs", {"prompt_logprobs": value}) for value in (-1, 21, 1.0, True)),
    *(("beam_width", {**BEAM, "beam": Beam(value)}) for value in (1, 0, MAX_WIDTH + 1, 2.0, True, None)),  # type: ignore[arg-type]
    *(("length_penalty", {**BEAM, "beam": Beam(4, value)}) for value in (NAN, INF, "1", None, 1e300)),  # type: ignore[arg-type]
    ("early_stopping", {**BEAM, "beam": Beam(4, 1.0, "never")}),  # type: ignore[arg-type]
    ("use_beam_search", {**BEAM, "beam": True}),
    ("temperature", {**BEAM, "temperature": 0.5}),
    ("n", {**BEAM, "n": 5}),
    ("logprobs", {**BEAM, "logprobs": 0}),
    ("stop", {**BEAM, "stop": ("a",)}),
    ("generated", {**BEAM, "generated": ((1,),)}),
    ("generated", {"generated": ((1,), (2,))}),
    ("generated", {"generated": ((VOCAB,),)}),
    ("generated", {"generated": ((1,) * 9,)}),
    ("generated", {"generated": (5,)}),
    ("generated", {"generated": None}),
    ("response_format", {"grammar": Grammar("json_schema", '{"not": {}}')}),
    ("response_format", {"grammar": Grammar("json_schema", json.dumps({"multipleOf": 1009}))}),
    ("structured_outputs", {"grammar": Grammar("regex", "(")}),
    ("structured_outputs", {"grammar": Grammar("choice", "[]")}),
    ("structured_outputs", {"grammar": Grammar("ebnf", 'start: start "a"')}),
    ("structured_outputs", {"grammar": Grammar("regex", None)}),  # type: ignore[arg-type]
    ("structured_outputs", {"grammar": Grammar(["regex"], "a")}),  # type: ignore[arg-type]
    ("structured_outputs", {"grammar": "regex"}),
]


@pytest.mark.parametrize(("param", "fields"), BAD, ids=[f"{param}-{index}" for index, (param, _) in enumerate(BAD)])
def test_what_no_step_could_run_is_refused_by_the_name_of_the_field(grammars, param, fields) -> None:
    error = refused(grammars, **fields)
    assert error.param == param
    assert error.message


def test_a_text_that_does_not_fit_the_context_has_openais_code(grammars) -> None:
    assert refused(grammars, prompt=(1,) * 121).code == "context_length_exceeded"


def test_a_bad_grammar_says_why(grammars) -> None:
    error = refused(grammars, grammar=Grammar("json_schema", '{"not": {}}'))
    assert (error.code, error.message) == ("invalid_grammar", 'unsupported keywords: ["not"]')


LACKING = [
    ({"top_logprobs": None}, "logprobs", {"logprobs": 0}),
    ({"top_logprobs": None}, None, {"prompt_logprobs": 0}),
    ({"prompt_logprobs": False}, "prompt_logprobs", {"prompt_logprobs": 0}),
    ({"seed": False}, "seed", {"seed": 1}),
    ({"seed": False}, None, {"seed": 1, "temperature": 0.0}),
    ({"logit_bias": False}, "logit_bias", {"logit_bias": ((1, 1.0),)}),
    ({"min_p": False}, "min_p", {"min_p": 0.1}),
    ({"penalties": False}, "repetition_penalty", {"repetition_penalty": 1.1}),
    ({"penalties": False}, "presence_penalty", {"presence_penalty": 0.1}),
    ({"penalties": False}, "frequency_penalty", {"frequency_penalty": -0.1}),
    ({"grammar": False}, "response_format", {"grammar": Grammar("json_object")}),
    ({"grammar": False}, "structured_outputs", {"grammar": Grammar("regex", "a")}),
    ({"stop": False}, "stop", {"stop": ("a",)}),
    ({"n": False}, "n", {"n": 2}),
    ({"beam": False}, "use_beam_search", BEAM),
]


@pytest.mark.parametrize(("lack", "param", "fields"), LACKING, ids=range(len(LACKING)))
def test_what_an_engine_lacks_is_refused_by_name_only_when_it_is_asked_for(grammars, lack, param, fields) -> None:
    caps = replace(ALL, **lack)
    check_request(request(), CARD, caps, grammars)
    if param is None:
        check_request(request(**fields), CARD, caps, grammars)
    else:
        error = refused(grammars, caps, **fields)
        assert (error.param, error.code) == (param, "not_supported_by_engine")


def test_fewer_alternatives_than_asked_for_are_a_matter_of_the_engine(grammars) -> None:
    caps = replace(ALL, top_logprobs=5)
    check_request(request(logprobs=5), CARD, caps, grammars)
    assert refused(grammars, caps, logprobs=6).param == "logprobs"
    assert "at most 5" in refused(grammars, caps, prompt_logprobs=6).message


def test_an_engine_without_a_compiler_has_no_grammars() -> None:
    assert refused(None, grammar=Grammar("json_object")).code == "not_supported_by_engine"


def test_sampling_of_another_kind_is_refused(grammars) -> None:
    with pytest.raises(Rejected):
        check_request(replace(request(), sampling={"max_tokens": 3}), CARD, ALL, grammars)  # type: ignore[arg-type]
