"""The checks at an engine's door: what no step could run is refused before the loop sees it.

Requests come from a queue, so nothing is taken on trust, not even the types: NaN compares false with
every bound, and True is an int.
"""

import math
from collections.abc import Sequence
from typing import Any

from batching.grammar import GrammarBackend, GrammarError
from batching.runner import BLOCK_TOKENS, Runner, blocks_for
from promptmill.core.engine import Capabilities, GenRequest
from promptmill.core.errors import Rejected
from promptmill.core.jobs import Beam, Grammar, SamplingParams
from promptmill.core.limits import MAX_BIAS, MAX_BIASES, MAX_LENGTH_PENALTY, MAX_PENALTY, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_STOPS, MAX_WIDTH
from promptmill.core.models import ModelCard

MAX_TOP_K = 2**31 - 1

_NOT_SUPPORTED = "not_supported_by_engine"


def check_request(request: GenRequest, card: ModelCard, caps: Capabilities, grammars: GrammarBackend | None) -> None:
    """Raises Rejected, whose ``param`` is the API's name of the field at fault. ``grammars`` None: the engine
    has no grammars, whatever ``caps`` says."""
    sampling = request.sampling
    if not isinstance(sampling, SamplingParams):
        raise Rejected("the sampling parameters are none", param="sampling")
    _check_lengths(request, card)
    _check_numbers(sampling)
    _check_ids_and_strings(sampling, card.vocab_size)
    _check_counts(sampling)
    _check_beam(sampling)
    _check_generated(request, card.vocab_size)
    _check_capabilities(sampling, caps, grammars is not None)
    _check_grammar(sampling.grammar, grammars)


def check_size(request: GenRequest, runner: Runner, *, shares: bool) -> None:
    """Raises Rejected for what would not fit the engine even alone. ``shares``: rows of one prompt share its whole
    blocks, through a loss of their cache too; without a prefix cache only until then."""
    sampling, prompt = request.sampling, len(request.prompt_ids)
    if sampling.width > runner.rows:
        raise Rejected(f"this engine runs at most {runner.rows} choices or beams of a request", param="n")
    shared = prompt // BLOCK_TOKENS if shares else 0
    own = blocks_for(prompt + sampling.max_tokens) - shared
    if shared + sampling.width * own > runner.blocks:
        raise Rejected("prompt and max_tokens need more KV cache than this engine has", param="max_tokens")


def _check_lengths(request: GenRequest, card: ModelCard) -> None:
    prompt, sampling = request.prompt_ids, request.sampling
    _ids("prompt", prompt, card.vocab_size)
    if not prompt:
        raise Rejected("the prompt is empty", param="prompt")
    _int("max_tokens", sampling.max_tokens, 0)
    if sampling.prompt_logprobs is not None:
        _int("prompt_logprobs", sampling.prompt_logprobs, 0)
    if sampling.max_tokens == 0 and (sampling.prompt_logprobs is None or sampling.n != 1 or sampling.beam is not None):
        raise Rejected("max_tokens is 0: only to score a prompt (prompt_logprobs), with one choice", param="max_tokens")
    if len(prompt) + sampling.max_tokens > card.context_length:
        message = f"{len(prompt)} prompt tokens and {sampling.max_tokens} new ones exceed the context of {card.context_length}"
        raise Rejected(message, param="max_tokens", code="context_length_exceeded")


def _check_numbers(sampling: SamplingParams) -> None:
    _float("temperature", sampling.temperature, 0)
    _float("top_p", sampling.top_p, 0, 1)
    _float("min_p", sampling.min_p, 0, 1)
    _float("repetition_penalty", sampling.repetition_penalty, 0)
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            raise Rejected(f"{name} must be greater than 0", param=name)
    _float("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _float("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _int("top_k", sampling.top_k, 0, MAX_TOP_K)
    if sampling.seed is not None:
        _int("seed", sampling.seed, -(2**63), 2**63 - 1)
    if type(sampling.ignore_eos) is not bool:
        raise Rejected("ignore_eos must be true or false", param="ignore_eos")


def _check_ids_and_strings(sampling: SamplingParams, vocab_size: int) -> None:
    biases = _items("logit_bias", sampling.logit_bias, MAX_BIASES)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in biases):
        raise Rejected("logit_bias must hold pairs of a token id and a number", param="logit_bias")
    _ids("logit_bias", [token for token, _ in biases], vocab_size)
    for _, bias in biases:
        _float("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    _ids("stop_token_ids", _items("stop_token_ids", sampling.stop_token_ids, MAX_STOP_IDS), vocab_size)
    for stop in _items("stop", sampling.stop, MAX_STOPS):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise Rejected(f"a stop must be a string of 1 to {MAX_STOP_CHARS} characters", param="stop")


def _check_counts(sampling: SamplingParams) -> None:
    _int("min_tokens", sampling.min_tokens, 0)
    if sampling.min_tokens > sampling.max_tokens:
        raise Rejected("min_tokens must not exceed max_tokens", param="min_tokens")
    _int("n", sampling.n, 1, MAX_WIDTH)
    if sampling.logprobs is not None:
        _int("logprobs", sampling.logprobs, 0)


def _check_beam(sampling: SamplingParams) -> None:
    beam = sampling.beam
    if beam is None:
        return
    if not isinstance(beam, Beam):
        raise Rejected("use_beam_search is not a beam search", param="use_beam_search")
    _int("beam_width", beam.width, 2, MAX_WIDTH)
    _float("length_penalty", beam.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if type(beam.early_stopping) is not bool:
        raise Rejected("early_stopping must be true or false", param="early_stopping")
    if not sampling.greedy:
        raise Rejected("beam search needs temperature 0", param="temperature")
    if sampling.n > beam.width:
        raise Rejected("n must not exceed beam_width", param="n")
    if sampling.logprobs is not None:
        raise Rejected("beam search gives no logprobs", param="logprobs")
    if sampling.stop:
        raise Rejected("beam search knows no stop strings", param="stop")


def _check_generated(request: GenRequest, vocab_size: int) -> None:
    generated, sampling = request.generated, request.sampling
    _items("generated", generated, sampling.n)
    for ids in generated:
        _ids("generated", _items("generated", ids, sampling.max_tokens), vocab_size)
    if sampling.beam is not None and any(generated):
        raise Rejected("a beam search cannot go on, it starts again", param="generated")


def _check_capabilities(sampling: SamplingParams, caps: Capabilities, has_grammars: bool) -> None:
    penalised = {
        "repetition_penalty": sampling.repetition_penalty != 1,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
    }
    wanted = {
        "prompt_logprobs": (sampling.prompt_logprobs is not None, caps.prompt_logprobs),
        "logprobs": (sampling.logprobs is not None, caps.top_logprobs is not None),
        "seed": (sampling.seed is not None and not sampling.greedy, caps.seed),
        "logit_bias": (bool(sampling.logit_bias), caps.logit_bias),
        "min_p": (sampling.min_p > 0, caps.min_p),
        "stop": (bool(sampling.stop), caps.stop),
        "n": (sampling.n > 1, caps.n or sampling.beam is not None),
        "use_beam_search": (sampling.beam is not None, caps.beam),
        **{name: (used, caps.penalties) for name, used in penalised.items()},
    }
    if sampling.grammar is not None:
        wanted[_grammar_field(sampling.grammar)] = (True, caps.grammar and has_grammars)
    for name, (used, able) in wanted.items():
        if used and not able:
            raise Rejected(f"this engine does not support {name}", param=name, code=_NOT_SUPPORTED)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and count > (caps.top_logprobs or 0):
            raise Rejected(f"{name} must be at most {caps.top_logprobs or 0}", param=name)


def _check_grammar(grammar: Grammar | None, grammars: GrammarBackend | None) -> None:
    if grammar is None or grammars is None:
        return
    if not isinstance(grammar, Grammar) or not isinstance(grammar.text, str):
        raise Rejected("the grammar is none", param=_grammar_field(grammar))
    try:
        grammars.check(grammar)
    except GrammarError as error:
        raise Rejected(error.message, param=_grammar_field(grammar), code="invalid_grammar") from None


def _grammar_field(grammar: Any) -> str:
    kind = getattr(grammar, "kind", None)
    return "response_format" if kind in ("json_object", "json_schema") else "structured_outputs"


def _int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f">= {low}" if high is None else f"from {low} to {high}"
        raise Rejected(f"{name} must be an integer {bounds}", param=name)


def _float(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """An integer will do, unless it is too large for a float."""
    if type(value) not in (int, float) or not low <= value <= high or (type(value) is float and not math.isfinite(value)):
        raise Rejected(f"{name} must be a finite number {f'>= {low}' if high == math.inf else f'from {low} to {high}'}", param=name)
    if abs(value) > 1e308:
        raise Rejected(f"{name} is too large", param=name)


def _items(name: str, value: Any, most: int) -> Sequence[Any]:
    if not isinstance(value, tuple):
        raise Rejected(f"{name} must be a list", param=name)
    if len(value) > most:
        raise Rejected(f"{name} has {len(value)} entries, at most {most} are allowed", param=name)
    return value


def _ids(name: str, values: Any, vocab_size: int) -> None:
    if not isinstance(values, tuple | list) or not all(type(token) is int and 0 <= token < vocab_size for token in values):
        raise Rejected(f"{name} holds token ids outside 0..{vocab_size - 1}", param=name)
