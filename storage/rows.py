"""Between the nouns of a job and its two rows."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from promptmill.core.jobs import Job, JobError, JobSpec, NewJob, Outcome, Priority, QueueName, Status, Timings
from storage.tables import job_data, jobs

JOB_COLUMNS: tuple[sa.Column[Any], ...] = tuple(
    column for column in jobs.c if column.name not in ("queue", "lease_until", "fed_at", "publish_due", "resends")
)
DATA_COLUMNS: tuple[sa.Column[Any], ...] = (job_data.c.request, job_data.c.spec, job_data.c.metadata, job_data.c.outcome)


def dump(value: Any) -> str:
    """JSON in ASCII: U+0000, which PostgreSQL's text refuses, is an escape like any other."""
    return json.dumps(value, separators=(",", ":"))


def state_values(new: NewJob) -> dict[str, Any]:
    """The row of ``jobs`` of a new job, but for its feeding. A job with an outcome is born succeeded."""
    done = new.outcome is not None
    return {
        "id": new.id,
        "tenant": new.tenant,
        "status": str(Status.SUCCEEDED if done else Status.QUEUED),
        "queue": str(QueueName(new.priority, new.model)),
        "priority": str(new.priority),
        "model": new.model,
        "model_revision": new.model_revision,
        "cache": new.cache,
        "attempt": 0,
        "losses": 0,
        "cancel_requested": False,
        "resends": 0,
        "created_at": new.created_at,
        "finished_at": new.created_at if done else None,
    }


def data_values(new: NewJob) -> dict[str, Any]:
    return {
        "id": new.id,
        "request": dump(new.request),
        "spec": dump(new.spec.to_json()),
        "metadata": dump(new.metadata),
        "outcome": None if new.outcome is None else dump(new.outcome.to_json()),
    }


def timings_text(timings: Timings) -> str:
    return dump({name: value for name, value in asdict(timings).items() if value is not None})


def error_text(error: JobError | None) -> str | None:
    return None if error is None else dump(asdict(error))


def outcome_text(outcome: Outcome | None) -> str | None:
    return None if outcome is None else dump(outcome.to_json())


def job_of_new(new: NewJob) -> Job:
    """The job as ``submit`` has stored it."""
    done = new.outcome is not None
    return Job(
        id=new.id,
        tenant=new.tenant,
        status=Status.SUCCEEDED if done else Status.QUEUED,
        model=new.model,
        model_revision=new.model_revision,
        priority=new.priority,
        spec=new.spec,
        request=new.request,
        metadata=new.metadata,
        created_at=new.created_at,
        finished_at=new.created_at if done else None,
        cache=new.cache,
        outcome=new.outcome,
    )


def job_of_rows(state: sa.Row[Any], data: sa.Row[Any]) -> Job:
    """``state`` has JOB_COLUMNS, ``data`` has DATA_COLUMNS; they may be one row that has both."""
    return Job(
        id=state.id,
        tenant=state.tenant,
        status=Status(state.status),
        model=state.model,
        model_revision=state.model_revision,
        priority=Priority(state.priority),
        spec=JobSpec.from_json(json.loads(data.spec)),
        request=json.loads(data.request),
        metadata=json.loads(data.metadata),
        created_at=state.created_at,
        started_at=state.started_at,
        finished_at=state.finished_at,
        attempt=state.attempt,
        losses=state.losses,
        worker=state.worker,
        node=state.node,
        cancel_requested=state.cancel_requested,
        cache=state.cache,
        outcome=None if data.outcome is None else Outcome.from_json(json.loads(data.outcome)),
        error=None if state.error is None else JobError(**json.loads(state.error)),
        timings=Timings() if state.timings is None else Timings(**json.loads(state.timings)),
        batch_id=state.batch_id,
    )


def select_jobs() -> "sa.Select[Any]":
    return sa.select(*JOB_COLUMNS, *DATA_COLUMNS).join_from(jobs, job_data, job_data.c.id == jobs.c.id)


def with_data(connection: sa.Connection, states: Sequence[sa.Row[Any]]) -> list[Job]:
    """The jobs of rows that an UPDATE returned, sorted by id."""
    data = load_data(connection, [state.id for state in states])
    return [job_of_rows(state, data[state.id]) for state in sorted(states, key=lambda state: str(state.id))]


def load_jobs(connection: sa.Connection, ids: Collection[str]) -> dict[str, Job]:
    if not ids:
        return {}
    rows = connection.execute(select_jobs().where(jobs.c.id.in_(ids)))
    return {row.id: job_of_rows(row, row) for row in rows}


def load_data(connection: sa.Connection, ids: Collection[str]) -> dict[str, sa.Row[Any]]:
    if not ids:
        return {}
    rows = connection.execute(sa.select(job_data.c.id, *DATA_COLUMNS).where(job_data.c.id.in_(ids)))
    return {row.id: row for row in rows}
