"""Stream events: what the token log holds and what viewers see. The same JSON on SSE and WebSocket.

An event's id is ``<attempt>-<seq>`` with ``seq = 256 * tokens + k``: ``tokens`` counts the tokens
of the job published up to and including this event (all choices), ``k`` is 0 for token events,
1.. for the state events after them and 255 for the terminal event. So an id names a position even
when the log is gone, and the terminal id of a job can be computed from its row.

The log of a job is *whole* if the first token event since its last ``reset`` has pos 0 and each
following pos is the previous pos + its number of tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from promptmill.core.errors import BadCursor
from promptmill.core.jobs import CacheUse, JobError, Outcome, Status, Timings, TokenLogprob, Usage

SEQ_PER_TOKEN = 256
TERMINAL_K = SEQ_PER_TOKEN - 1
_CURSOR = re.compile(r"(0|[1-9][0-9]{0,15})-(0|[1-9][0-9]{0,15})", re.ASCII)


class EventType(StrEnum):
    QUEUED = "queued"  # made up by the API for a viewer of a waiting job, id 0-0; never in the log
    STARTED = "started"
    TOKEN = "token"
    PAUSED = "paused"
    RESUMED = "resumed"
    RESET = "reset"  # forget all text shown so far; the tokens start again at pos 0
    DONE = "done"  # terminal: succeeded, cancelled, expired
    ERROR = "error"  # terminal: failed

    @property
    def terminal(self) -> bool:
        return self in (EventType.DONE, EventType.ERROR)


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """An event id as a value; ordered as the log is."""

    attempt: int
    seq: int

    def __str__(self) -> str:
        return f"{self.attempt}-{self.seq}"

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """Raises BadCursor when ``text`` is not ``<attempt>-<seq>``."""
        match = _CURSOR.fullmatch(text)
        if not match:
            raise BadCursor("an event id has the form <attempt>-<seq>, such as 1-512", param="after")
        return cls(int(match[1]), int(match[2]))


START = Cursor(0, 0)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One entry of a job's log."""

    job: str
    cursor: Cursor
    type: EventType
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"id": str(self.cursor), "job": self.job, "type": str(self.type), **self.data}


def started(job: str, attempt: int, model: str) -> StreamEvent:
    """The marker of an attempt. It must be accepted before anything else of the attempt is written.

    A first attempt says ``started``; a later one says ``reset``, since it begins again from the prompt.
    """
    kind = EventType.STARTED if attempt == 1 else EventType.RESET
    return StreamEvent(job, Cursor(attempt, 0), kind, {"model": model, "attempt": attempt})


def tokens(
    job: str,
    attempt: int,
    *,
    index: int,
    pos: int,
    text: str,
    token_ids: Sequence[int],
    finish_reason: str | None = None,
    logprobs: Sequence[TokenLogprob] | None = None,
) -> StreamEvent:
    """Tokens of choice ``index``; ``pos`` = tokens of the job published before them, all choices.
    ``logprobs``: per token [logprob, [[id, logprob], ...]]."""
    seq = SEQ_PER_TOKEN * (pos + len(token_ids))
    data: dict[str, Any] = {"index": index, "pos": pos, "text": text, "token_ids": list(token_ids)}
    if finish_reason is not None:
        data["finish_reason"] = finish_reason
    if logprobs is not None:
        data["logprobs"] = [item.to_json() for item in logprobs]
    return StreamEvent(job, Cursor(attempt, seq), EventType.TOKEN, data)


def terminal_cursor(attempt: int, tokens_published: int) -> Cursor:
    return Cursor(attempt, SEQ_PER_TOKEN * tokens_published + TERMINAL_K)


def terminal(
    job: str,
    attempt: int,
    status: Status,
    *,
    outcome: Outcome | None,
    error: JobError | None,
    timings: Timings,
    cache: CacheUse,
) -> StreamEvent:
    """The one terminal event of a job, the same whoever builds it: worker, sweep or API."""
    data: dict[str, Any] = {"status": str(status), "timings": asdict(timings), "cache": cache}
    if outcome is not None:
        data["usage"] = usage_json(outcome.usage)
        data["finish_reasons"] = [choice.finish_reason for choice in outcome.choices]
    if error is not None:
        data["error"] = asdict(error)
    kind = EventType.ERROR if status is Status.FAILED else EventType.DONE
    return StreamEvent(job, terminal_cursor(attempt, outcome.tokens if outcome else 0), kind, data)


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
