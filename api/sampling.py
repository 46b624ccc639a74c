"""The fields of a request that say how tokens are drawn, checked against each other and the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.schemas import JobRequest
from promptmill.core.errors import BadRequest, Unsupported
from promptmill.core.jobs import Beam, Grammar, SamplingParams
from promptmill.core.limits import MAX_BIAS, MAX_BIASES, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_STOPS, MAX_TOP_LOGPROBS, MAX_WIDTH

PROMPT_MAX_TOKENS = 16  # OpenAI's default of a completion
MAX_LOGPROBS = 500_000  # of a job; about 15 MB of its result
MAX_ID_DIGITS = 10
BY_HAND = ("stop", "stop_token_ids", "logit_bias", "logprobs")  # one field of several types, or an error with a place in it


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_tokens``: larger ones are clamped. ``job_tokens``: the most that all choices or beams of a job may
    have together. ``rows``: the most choices or beams that an engine runs."""

    max_tokens: int
    job_tokens: int
    rows: int = MAX_WIDTH


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the sampling fields must fit. ``room``: tokens that the context leaves, at least 1."""

    chat: bool
    tokens: int
    room: int
    vocab_size: int


def sampling_params(fields: Mapping[str, Any], sent: JobRequest, prompt: Prompt, limits: Limits, grammar: Grammar | None) -> SamplingParams:
    """``fields``: as sent, without nulls; ``sent``: the same, without those of BY_HAND. Raises BadRequest or
    Unsupported with the field at fault."""
    n = _choices(sent, limits)
    logprobs = _logprobs(fields, sent, prompt.chat)
    echo = _echo(sent, prompt.chat)
    stop = _stop(fields.get("stop", []))
    beam = _beam(sent, n, stop, logprobs, limits)
    max_tokens = _max_tokens(sent, prompt, limits, beam.width if beam else n, scoring=echo and beam is None)
    if max_tokens == 0 and n > 1:
        raise BadRequest("without new tokens there is one choice only", param="n")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if sent.temperature is None else abs(sent.temperature),
        top_p=1.0 if sent.top_p is None else sent.top_p,
        top_k=_top_k(sent.top_k, prompt.vocab_size),
        min_p=_plain(sent.min_p),
        repetition_penalty=1.0 if sent.repetition_penalty is None else sent.repetition_penalty,
        presence_penalty=_plain(sent.presence_penalty),
        frequency_penalty=_plain(sent.frequency_penalty),
        logit_bias=_logit_bias(fields.get("logit_bias", {}), prompt.vocab_size),
        seed=sent.seed,
        stop=stop,
        stop_token_ids=_stop_ids(fields.get("stop_token_ids", []), prompt.vocab_size),
        ignore_eos=bool(sent.ignore_eos),
        min_tokens=_min_tokens(sent, max_tokens),
        n=n,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(sent, logprobs if echo else None, max_tokens),
        beam=beam,
        grammar=grammar,
    )
    _bound_logprobs(sampling, prompt, echo)
    return sampling


def _choices(sent: JobRequest, limits: Limits) -> int:
    n = 1 if sent.n is None else sent.n
    if n > limits.rows:
        raise BadRequest(f"this server runs at most {limits.rows} choices of a job", param="n")
    if sent.best_of is not None and sent.best_of < n:
        raise BadRequest("best_of must not be less than n", param="best_of")
    if sent.best_of is not None and sent.best_of > n:
        raise Unsupported("best_of is not supported by this version, other than n", param="best_of")
    return n


def _max_tokens(sent: JobRequest, prompt: Prompt, limits: Limits, width: int, *, scoring: bool) -> int:
    """Clamped to the context and the cap; a number that was not asked for also to the limit of a job."""
    most = min(prompt.room, limits.max_tokens)
    name = "max_tokens" if sent.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(sent, name)
    if asked is None:
        default = most if prompt.chat else min(PROMPT_MAX_TOKENS, most)
        return max(1, min(default, limits.job_tokens // width))
    if asked == 0 and not scoring:
        raise BadRequest(f"{name} must be at least 1; 0 goes with a prompt and echo, and only scores it", param=name)
    tokens = min(asked, most)
    if width * tokens > limits.job_tokens:
        many = f"{width} times {tokens} tokens" if width > 1 else f"{tokens} tokens"
        raise BadRequest(f"{many} are more than the {limits.job_tokens} that a job may have; ask for less", param=name)
    return tokens


def _min_tokens(sent: JobRequest, max_tokens: int) -> int:
    least = sent.min_tokens or 0
    if least > max_tokens:
        raise BadRequest(f"min_tokens must not exceed max_tokens, which is {max_tokens} here", param="min_tokens")
    return least


def _logprobs(fields: Mapping[str, Any], sent: JobRequest, chat: bool) -> int | None:
    """How many alternatives per token; None = no logprobs. Chats and prompts spell it differently."""
    value = fields.get("logprobs", False)
    if not chat:
        if sent.top_logprobs is not None:
            raise BadRequest("top_logprobs goes with messages; with a prompt logprobs is the number", param="top_logprobs")
        if value is False:
            return None
        if type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS:
            raise BadRequest(f"with a prompt logprobs must be an integer in 0..{MAX_TOP_LOGPROBS}", param="logprobs")
        return value
    if not isinstance(value, bool):
        raise BadRequest("with messages logprobs must be true or false; top_logprobs is the number", param="logprobs")
    if sent.top_logprobs is not None and not value:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return (sent.top_logprobs or 0) if value else None


def _prompt_logprobs(sent: JobRequest, echoed: int | None, max_tokens: int) -> int | None:
    """``echoed``: logprobs that stand before those of the answer. Without an answer the prompt is always scored."""
    asked = [number for number in (sent.prompt_logprobs, echoed) if number is not None]
    return max(asked, default=None if max_tokens else 0)


def _echo(sent: JobRequest, chat: bool) -> bool:
    if sent.echo and chat:
        raise BadRequest("echo goes with a prompt", param="echo")
    return bool(sent.echo)


def _bound_logprobs(sampling: SamplingParams, prompt: Prompt, echo: bool) -> None:
    """Keeps a small request from a result of hundreds of megabytes."""
    output = 0 if sampling.logprobs is None else sampling.total_tokens * (sampling.logprobs + 1)
    copies = sampling.n if echo and sampling.logprobs is not None else 1
    before = 0 if sampling.prompt_logprobs is None else prompt.tokens * (sampling.prompt_logprobs + 1) * copies
    if output + before > MAX_LOGPROBS:
        own = "top_logprobs" if prompt.chat else "logprobs"
        param = own if output else "prompt_logprobs"
        raise BadRequest(
            f"this asks for up to {output + before} logprobs; a job may have {MAX_LOGPROBS}: fewer alternatives, tokens or choices",
            param=param,
        )


def _beam(sent: JobRequest, n: int, stop: tuple[str, ...], logprobs: int | None, limits: Limits) -> Beam | None:
    if not sent.use_beam_search:
        for name, neutral in (("beam_width", None), ("length_penalty", 1), ("early_stopping", False)):
            if getattr(sent, name) not in (None, neutral):
                raise BadRequest(f"{name} goes with use_beam_search", param=name)
        return None
    width = n if sent.beam_width is None else sent.beam_width
    if width < 2:
        raise BadRequest("a beam search needs a beam_width of at least 2; n stands for it when it is not given", param="beam_width")
    if width > limits.rows:
        raise BadRequest(f"this server runs at most {limits.rows} beams of a job", param="beam_width")
    if n > width:
        raise BadRequest("n must not exceed beam_width", param="n")
    if sent.temperature is None or abs(sent.temperature) >= 1e-5:
        raise BadRequest("a beam search needs temperature 0", param="temperature")
    if stop:
        raise BadRequest("a beam search takes no stop texts; stop_token_ids work", param="stop")
    if logprobs is not None:
        raise BadRequest("a beam search gives no logprobs", param="logprobs")
    return Beam(width, 1.0 if sent.length_penalty is None else _plain(sent.length_penalty), bool(sent.early_stopping))


def _stop(stop: Any) -> tuple[str, ...]:
    members: Sequence[Any] = [stop] if isinstance(stop, str) else stop
    if not isinstance(members, list):
        raise BadRequest("stop must be a text or a list of texts", param="stop")
    if len(members) > MAX_STOPS:
        raise BadRequest(f"stop takes at most {MAX_STOPS} texts", param="stop")
    for member in members:
        if not isinstance(member, str) or not 1 <= len(member) <= MAX_STOP_CHARS:
            raise BadRequest(f"each member of stop must be a text of 1..{MAX_STOP_CHARS} characters", param="stop")
    return tuple(members)


def _stop_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Sorted and without repeats: their order means nothing."""
    if not isinstance(ids, list) or len(ids) > MAX_STOP_IDS:
        raise BadRequest(f"stop_token_ids must be a list of at most {MAX_STOP_IDS} token ids", param="stop_token_ids")
    for at, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadRequest(f"a token id must be an integer in 0..{vocab_size - 1}", param=f"stop_token_ids[{at}]")
    return tuple(sorted(set(ids)))


def _logit_bias(biases: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """By id; a bias of 0 asks for nothing."""
    if not isinstance(biases, dict) or len(biases) > MAX_BIASES:
        raise BadRequest(f"logit_bias must be an object of at most {MAX_BIASES} token ids and numbers", param="logit_bias")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS else -1
        if not 0 <= token < vocab_size or str(token) != key:
            raise BadRequest(f"a key of logit_bias must be a token id in 0..{vocab_size - 1}", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise BadRequest(f"a bias must be a number in -{MAX_BIAS}..{MAX_BIAS}", param=f"logit_bias.{token}")
        if bias:
            found[token] = float(bias)
    return tuple(sorted(found.items()))


def _top_k(top_k: int | None, vocab_size: int) -> int:
    """0 = off; so are -1 and all that excludes no token."""
    return 0 if top_k is None or top_k < 1 or top_k >= vocab_size else top_k


def _plain(value: float | None) -> float:
    """0 where nothing was sent, and no -0.0: equal requests have equal cache keys."""
    return (value or 0.0) + 0.0
