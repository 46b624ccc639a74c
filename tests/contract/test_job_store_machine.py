"""Random walks over a JobStore: only the transitions of the state machine ever happen."""

from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from promptmill.core.jobs import TRANSITIONS, Held, Job, Priority, QueueName, Status
from promptmill.core.ports import Depth
from storage.migrate import migrate
from storage.tables import metadata
from tests.support.clock import FakeClock
from tests.support.factories import make_finish, make_job
from tests.support.stores import LEASE, Stand, memory_stand, sql_store

WORKERS = st.sampled_from(["w1", "w2"])
ENDS = st.sampled_from([Status.SUCCEEDED, Status.FAILED, Status.CANCELLED])


class JobWalk(RuleBasedStateMachine):
    """Knows of each job only what the store said last; checks each change against the rules."""

    ids = Bundle("ids")
    claims = Bundle("claims")

    def __init__(self, stand: Stand):
        super().__init__()
        self.stand = stand
        self.seen: dict[str, Job] = {}
        self.owners: dict[Held, str] = {}

    @rule(target=ids, priority=st.sampled_from(Priority))
    def submit(self, priority: Priority) -> str:
        new = make_job(priority, clock=self.stand.clock)
        (job,) = self.stand.submit(new)
        self.seen[new.id] = job
        return new.id

    @rule(target=claims, ids=st.lists(ids, min_size=1, max_size=4), worker=WORKERS)
    def claim(self, ids: list[str], worker: str) -> tuple[str, list[Held]]:
        before = {id: self.seen[id].status for id in ids}
        claims = self.stand.store.claim_many(ids, worker, "n1")
        won = [claim.held for claim in claims if claim is not None]
        assert sorted({held.id for held in won}) == sorted({id for id in ids if before[id] is Status.QUEUED})
        for held in won:
            assert held not in self.owners, "an attempt is given out once"
            self.owners[held] = worker
        return worker, won

    @rule(claim=claims, status=ENDS)
    def finish(self, claim: tuple[str, list[Held]], status: Status) -> None:
        worker, held = claim
        before = {one.id: self.seen[one.id] for one in held}
        verdicts = self.stand.store.finish_many([make_finish(one, worker, status) for one in held])
        for one, won in zip(held, verdicts, strict=True):
            job = before[one.id]
            fenced = (job.attempt, job.worker) != (one.attempt, worker) or job.status not in (Status.RUNNING, status)
            assert won is not fenced

    @rule(claim=consumes(claims))
    def release(self, claim: tuple[str, list[Held]]) -> None:
        worker, held = claim
        self.stand.store.release_many(worker, held)

    @rule(claim=claims)
    def heartbeat(self, claim: tuple[str, list[Held]]) -> None:
        worker, held = claim
        beat = self.stand.store.heartbeat(worker, held)
        alive = {one for one in held if self.seen[one.id].status is Status.RUNNING and self.seen[one.id].attempt == one.attempt}
        assert beat.renewed == alive

    @rule(id=ids)
    def cancel(self, id: str) -> None:
        self.stand.store.cancel(id)

    @rule(id=ids, bound=st.integers(0, 3))
    def feed(self, id: str, bound: int) -> None:
        queue = QueueName(self.seen[id].priority, self.seen[id].model)
        before = self.depth(queue)
        fed = self.stand.store.feed(queue, bound)
        room = max(0, bound - before.published)
        assert len(fed) == min(room, before.queued - before.published)
        assert all(self.seen[ref.id].status is Status.QUEUED for ref in fed)

    def depth(self, queue: QueueName) -> Depth:
        return next((depth for depth in self.stand.store.depths() if depth.queue == queue), Depth(queue, 0, 0, 0, 0.0))

    @rule(seconds=st.sampled_from([0.5, LEASE / 2, LEASE + 1]))
    def wait(self, seconds: float) -> None:
        self.stand.passes(seconds)

    @rule(seconds=st.sampled_from([-50.0, 50.0]))
    def wall_clock_steps(self, seconds: float) -> None:
        self.stand.clock.step_wall(seconds)

    @rule()
    def recover(self) -> None:
        for job in self.stand.store.recover():
            assert self.seen[job.id].status is Status.RUNNING

    @rule()
    def resend(self) -> None:
        for ref in self.stand.store.lost(self.stand.store.published()):
            assert self.seen[ref.id].status is Status.QUEUED

    @invariant()
    def only_legal_changes_happen(self) -> None:
        for id, before in self.seen.items():
            now = self.stand.job(id)
            if now.status is not before.status:
                assert now.status in TRANSITIONS[before.status]
            if before.status.terminal:
                assert now == before, "terminal is final"
            assert before.attempt <= now.attempt <= before.attempt + 1, "the fence never falls"
            assert now.losses >= before.losses
            assert (now.finished_at is not None) == now.status.terminal
            assert now.created_at <= (now.started_at or now.created_at) <= (now.finished_at or float("inf"))
            assert not (now.status is Status.QUEUED and now.cancel_requested)
            assert (now.worker is not None) or now.status is not Status.RUNNING
            self.seen[id] = now


def walk(stands: Iterator[Stand]) -> None:
    run_state_machine_as_test(
        lambda: JobWalk(next(stands)),
        settings=settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )


def test_memory_knows_only_the_transitions() -> None:
    def stands() -> Iterator[Stand]:
        while True:
            yield memory_stand()

    walk(stands())


@pytest.mark.timeout(300)
def test_sqlite_knows_only_the_transitions(tmp_path: Path) -> None:
    clock = FakeClock()
    url = f"sqlite:///{tmp_path}/walk.db"
    migrate(url)
    store, database = sql_store(url, clock)

    def stands() -> Iterator[Stand]:
        while True:
            with database.write() as connection:
                for table in reversed(metadata.sorted_tables):
                    connection.execute(sa.delete(table))
            yield Stand(store, clock)

    walk(stands())
    store.close()
