"""Ends a viewer's stream from the stored job when the log cannot: it expired, lost entries, or never was."""

from dataclasses import replace

from promptmill.core import events
from promptmill.core.events import SEQ_PER_TOKEN, TERMINAL_K, Cursor, EventType, StreamEvent
from promptmill.core.jobs import Job

RESET_K = TERMINAL_K - 1  # a reset made here: its id follows all that was shown, and says that nothing is shown now


def shown_at(cursor: Cursor) -> int:
    """How many tokens of the job a viewer has that holds this cursor."""
    tokens, k = divmod(cursor.seq, SEQ_PER_TOKEN)
    return 0 if k == RESET_K else tokens


def completion(job: Job, last: Cursor) -> list[StreamEvent]:
    """The events that bring a viewer from ``last`` to the end of the terminal ``job``.

    Has it seen all, only the terminal event; else a ``reset``, one token event per choice with the
    whole text, then the terminal event. A job that failed without a result keeps what was shown.
    """
    shown, same_attempt = shown_at(last), last.attempt == job.attempt
    total = job.outcome.tokens if job.outcome else 0
    found: list[StreamEvent] = []
    if not (same_attempt and (shown == total or job.outcome is None)):
        if shown or (total and not same_attempt):
            found.append(_reset(job, last))
        found += _whole_text(job)
    return [*found, _end(job, last)]


def at_end(job: Job, cursor: Cursor) -> bool:
    """Whether a viewer that holds ``cursor`` has seen the terminal event of ``job``."""
    if not job.status.terminal or cursor.attempt != job.attempt or cursor.seq % SEQ_PER_TOKEN != TERMINAL_K:
        return False
    return job.outcome is None or cursor == events.terminal_cursor(job.attempt, job.outcome.tokens)


def beyond_end(job: Job, cursor: Cursor, log_end: Cursor | None) -> bool:
    """Whether no event of ``job`` can ever have had the id ``cursor``. ``log_end``: the log's last
    id, None when the log is gone (a running job's may come back)."""
    most = job.spec.sampling.total_tokens
    if job.status.terminal:
        return cursor > events.terminal_cursor(job.attempt, job.outcome.tokens if job.outcome else most)
    if log_end is not None:
        return cursor > log_end
    return cursor.attempt > job.attempt or shown_at(cursor) > most


def _reset(job: Job, last: Cursor) -> StreamEvent:
    seq = last.seq - last.seq % SEQ_PER_TOKEN + RESET_K if last.attempt == job.attempt else 0
    return StreamEvent(job.id, Cursor(job.attempt, seq), EventType.RESET, {"model": job.model, "attempt": job.attempt})


def _whole_text(job: Job) -> list[StreamEvent]:
    found, pos = [], 0
    for choice in job.outcome.choices if job.outcome else ():
        if choice.token_ids:
            found.append(
                events.tokens(
                    job.id,
                    job.attempt,
                    index=choice.index,
                    pos=pos,
                    text=choice.text,
                    token_ids=choice.token_ids,
                    finish_reason=choice.finish_reason,
                    logprobs=choice.logprobs,
                )
            )
        pos += len(choice.token_ids)
    return found


def _end(job: Job, last: Cursor) -> StreamEvent:
    """The same event as the log's. Its id never goes back: a job may have failed after more tokens than it kept."""
    end = events.terminal(job.id, job.attempt, job.status, outcome=job.outcome, error=job.error, timings=job.timings, cache=job.cache)
    if end.cursor <= last:
        return replace(end, cursor=Cursor(last.attempt, last.seq - last.seq % SEQ_PER_TOKEN + TERMINAL_K))
    return end
