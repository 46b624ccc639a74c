"""Ready-made nouns, so that a test states only what it is about."""

import itertools
from typing import Any

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.ids import new_id
from promptmill.core.jobs import (
    Choice,
    Finish,
    FinishReason,
    Held,
    IdempotencyKey,
    JobRef,
    JobSpec,
    NewJob,
    Outcome,
    Priority,
    QueueName,
    SamplingParams,
    Status,
    Timings,
    TokenLogprob,
    Usage,
)

MODEL = "tiny"
REVISION = "0123456789abcdef"
_numbers = itertools.count(1)


def make_id(clock: Clock = SYSTEM_CLOCK) -> str:
    """An id that sorts after every earlier one, also within one millisecond."""
    return f"{new_id('job', clock)[:14]}{next(_numbers):016d}"


def make_spec(prompt_ids: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, **sampling: Any) -> JobSpec:
    return JobSpec(prompt_ids, SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}))


def make_outcome(text: str = "four tokens of text", ids: tuple[int, ...] = (4, 5, 6, 7), reason: FinishReason = "stop") -> Outcome:
    return Outcome((Choice(0, text, ids, reason),), Usage(prompt_tokens=3, completion_tokens=len(ids)))


def make_scored_outcome() -> Outcome:
    """Two choices with logprobs, and those of a prompt of three tokens."""
    scores = (TokenLogprob(-0.1, ((4, -0.1), (9, -2.5))), TokenLogprob(-9999.0))
    choices = (Choice(0, "one", (4, 5), "stop", scores), Choice(1, "", (), "length", ()))
    return Outcome(choices, Usage(prompt_tokens=3, completion_tokens=2), (None, TokenLogprob(-1 / 3, ((2, -1 / 3),)), TokenLogprob(-4.0)))


def make_job(priority: Priority = Priority.INTERACTIVE, *, clock: Clock = SYSTEM_CLOCK, **fields: Any) -> NewJob:
    """A NewJob; any field of it can be given by name."""
    base: dict[str, Any] = {
        "id": make_id(clock),
        "model": MODEL,
        "model_revision": REVISION,
        "spec": make_spec(),
        "request": {"prompt": "2 + 2 ="},
        "created_at": clock.time(),
    }
    return NewJob(priority=priority, **{**base, **fields})


def make_key(key: str = "key-1", body_hash: str = "hash-1", route: str = "POST /v1/jobs") -> IdempotencyKey:
    return IdempotencyKey(route, key, body_hash)


def make_finish(held: Held, worker: str, status: Status = Status.SUCCEEDED, **fields: Any) -> Finish:
    if status is Status.SUCCEEDED:
        fields.setdefault("outcome", make_outcome())
    fields.setdefault("timings", Timings(queue_ms=1.5, total_ms=20.25))
    return Finish(held.id, held.attempt, worker, status, **fields)


def queue_of(job: NewJob) -> QueueName:
    return QueueName(job.priority, job.model)


def ref_of(job: NewJob) -> JobRef:
    return JobRef(job.id, queue_of(job))
