"""Logprobs in the shapes of OpenAI's chat and completion, and of vLLM's ``prompt_logprobs``."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.token_texts import TokenTexts
from promptmill.core.jobs import Choice, TokenLogprob

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt before an echoed completion. ``token_ids`` and ``scores`` are both empty when a run ended
    without scores; the first score is None."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    scores: tuple[TokenLogprob | None, ...] = ()


def chat_logprobs(choice: Choice, texts: TokenTexts, top: int, *, stops: bool) -> Json | None:
    """``top``: alternatives per token. ``stops``: the text may have been cut at a stop text."""
    if choice.logprobs is None:
        return None
    kept = kept_tokens(choice, texts, stops=stops)
    content = [
        {
            **_entry(token_id, score.logprob, texts),
            "top_logprobs": [_entry(other, logprob, texts) for other, logprob in score.top[:top]],
        }
        for token_id, score in zip(choice.token_ids[:kept], choice.logprobs[:kept], strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(choice: Choice, texts: TokenTexts, top: int, echo: Echo, *, stops: bool) -> Json | None:
    """``text_offset`` counts characters of the choice's text, the echoed prompt included. An entry of
    ``top_logprobs`` always has the token itself, so it may have one more than ``top``."""
    if choice.logprobs is None:
        return None
    kept = kept_tokens(choice, texts, stops=stops)
    ids, scores = choice.token_ids[:kept], choice.logprobs[:kept]
    own = (len(echo.text) + min(at, len(choice.text)) for at in texts.offsets(ids, special=False)[:-1])
    pairs = list(zip((*echo.token_ids, *ids), (*echo.scores, *scores), strict=True))
    return {
        "tokens": [texts.name(token_id) for token_id, _ in pairs],
        "token_logprobs": [None if score is None else score.logprob for _, score in pairs],
        "top_logprobs": [None if score is None else _by_name(token_id, score, texts, top) for token_id, score in pairs],
        "text_offset": [*_prompt_offsets(echo, texts), *own],
    }


def prompt_logprobs(scores: Sequence[TokenLogprob | None], token_ids: Sequence[int], texts: TokenTexts, top: int) -> list[Json | None]:
    """Per token of the prompt: itself and its alternatives by id; null for the first."""

    def shown(token_id: int, score: TokenLogprob) -> Json:
        found = {token_id: score.logprob, **dict(score.top[:top])}
        return {str(other): {"logprob": logprob, "decoded_token": texts.name(other)} for other, logprob in found.items()}

    return [None if score is None else shown(token_id, score) for token_id, score in zip(token_ids, scores, strict=True)]


def kept_tokens(choice: Choice, texts: TokenTexts, *, stops: bool) -> int:
    """How many tokens begin before the place where a stop text cut the text: all, if none did."""
    if not stops or choice.finish_reason != "stop":
        return len(choice.token_ids)
    *starts, length = texts.offsets(choice.token_ids, special=False)
    return bisect_left(starts, len(choice.text)) if length > len(choice.text) else len(starts)


def _entry(token_id: int, logprob: float, texts: TokenTexts) -> Json:
    raw = texts.raw(token_id)
    return {"token": texts.name(token_id), "logprob": logprob, "bytes": None if raw is None else list(raw)}


def _by_name(token_id: int, score: TokenLogprob, texts: TokenTexts, top: int) -> dict[str, float]:
    """A dictionary with one entry per token, also where two of them look the same."""
    found = {token_id: score.logprob, **dict(score.top[:top])}
    names = texts.names(found)
    return {names[other]: logprob for other, logprob in found.items()}


def _prompt_offsets(echo: Echo, texts: TokenTexts) -> list[int]:
    """A token that the tokenizer put before the text, or a space before its first word, is not in the text."""
    *starts, length = texts.offsets(echo.token_ids, special=True)
    surplus = max(0, length - len(echo.text))
    return [min(max(0, start - surplus), len(echo.text)) for start in starts]
