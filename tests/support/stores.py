"""A JobStore of each kind behind one stand, with a clock that tests move."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from promptmill.core.jobs import Claim, Held, Job, NewJob, Status
from promptmill.core.ports import JobStore
from storage.db import Database
from storage.jobs import SqlJobStore
from storage.memory_jobs import MemoryJobStore
from storage.tables import jobs
from tests.support.clock import FakeClock

LEASE = 8.0
KEY_LIFE = 3600.0


@dataclass(frozen=True)
class Stand:
    """``clock`` is the store's wall clock, and its lease clock too except on PostgreSQL, which has
    its own: there ``passes`` makes the rows older instead."""

    store: JobStore
    clock: FakeClock
    shift_rows: Callable[[float], None] | None = None

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self.shift_rows is not None:
            self.shift_rows(-seconds)

    def reboot(self) -> None:
        """The lease clock starts again from zero, so that stored times lie far ahead."""
        self.clock.reboot()
        if self.shift_rows is not None:
            self.shift_rows(1_000_000.0)

    def submit(self, *new: NewJob) -> list[Job]:
        return [answer.job for answer in self.store.submit(new)]

    def claim(self, job_id: str, worker: str = "w1", node: str = "n1") -> Claim:
        (claim,) = self.store.claim_many([job_id], worker, node)
        assert claim is not None
        return claim

    def held(self, new: NewJob, worker: str = "w1") -> Held:
        """Submit and claim in one go."""
        self.submit(new)
        return self.claim(new.id, worker).held

    def job(self, job_id: str) -> Job:
        job = self.store.get(job_id)
        assert job is not None
        return job

    def status(self, job_id: str) -> Status:
        return self.job(job_id).status


def sql_store(url: str, clock: FakeClock) -> tuple[SqlJobStore, Database]:
    database = Database.connect(url, clock=clock)
    return SqlJobStore(database, lease_seconds=LEASE, idempotency_seconds=KEY_LIFE, clock=clock), database


def memory_stand() -> Stand:
    clock = FakeClock()
    return Stand(MemoryJobStore(lease_seconds=LEASE, idempotency_seconds=KEY_LIFE, clock=clock), clock)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """Every JobStore there is, one after the other."""
    if request.param == "memory":
        yield memory_stand()
        return
    clock = FakeClock()
    store, database = sql_store(request.getfixturevalue(f"{request.param}_url"), clock)

    def shift_rows(seconds: float) -> None:
        columns = (jobs.c.lease_until, jobs.c.fed_at, jobs.c.publish_due)
        with database.write() as connection:
            connection.execute(sa.update(jobs).values({column: column + seconds for column in columns}))

    try:
        yield Stand(store, clock, shift_rows if database.postgres else None)
    finally:
        store.close()
