from collections.abc import Collection

import pytest

from promptmill.core.errors import Unavailable
from promptmill.core.events import START, EventType
from promptmill.core.jobs import Job, JobRef, NewJob, Outcome, Priority, QueueName, Status
from promptmill.core.metrics import Metrics
from storage.memory import MemoryJobQueue, MemoryJobStore, MemoryResultCache, MemoryTokenStream
from tests.support.clock import FakeClock
from tests.support.factories import make_job, make_outcome, queue_of
from workers.beat import monotonic_now, ticks
from workers.feeder import Feeder
from workers.maintenance import LEAST_GAP_S, Maintenance

LEASE = 8.0


class Store(MemoryJobStore):
    away = False

    def recover(self, limit: int = 1000) -> list[Job]:
        if self.away:
            raise Unavailable("SQL is away")
        return super().recover(limit)


class Queue(MemoryJobQueue):
    away = False

    def empty(self, queues: Collection[QueueName]) -> set[QueueName]:
        if self.away:
            raise Unavailable("the broker is away")
        return super().empty(queues)


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store, self.queue = Store(lease_seconds=LEASE, clock=self.clock), Queue()
        self.stream = MemoryTokenStream(clock=self.clock)
        self.cache = MemoryResultCache(max_bytes=10_000, max_age_seconds=60, clock=self.clock)
        self.metrics = Metrics()
        self.feeder = Feeder(self.store, self.queue, bound=3)
        self.maintenance = Maintenance(self.store, self.queue, self.stream, self.cache, self.feeder, self.metrics, self.clock, LEASE)

    def submit(self, priority: Priority = Priority.INTERACTIVE, count: int = 1) -> list[NewJob]:
        jobs = [make_job(priority, clock=self.clock) for _ in range(count)]
        self.store.submit(jobs)
        return jobs

    def sweep(self) -> None:
        self.clock.advance(LEAST_GAP_S)
        self.maintenance.sweep()

    def status(self, job: NewJob) -> Status:
        stored = self.store.get(job.id)
        assert stored is not None
        return stored.status


@pytest.fixture
def world() -> World:
    return World()


def test_jobs_of_a_lost_worker_are_sent_again(world: World) -> None:
    (job,) = world.submit()
    world.store.claim_many([job.id], "dead", "node")
    world.sweep()
    assert world.queue.take(queue_of(job)) is None
    world.clock.advance(LEASE + 1)
    world.sweep()
    assert world.status(job) is Status.QUEUED and world.queue.take(queue_of(job)) == job.id
    assert world.metrics.leases_recovered._value.get() == 1


def test_a_flagged_job_of_a_lost_worker_ends_in_the_stream(world: World) -> None:
    (job,) = world.submit()
    world.store.claim_many([job.id], "dead", "node")
    world.store.cancel(job.id)
    world.clock.advance(LEASE + 1)
    world.sweep()
    assert world.status(job) is Status.CANCELLED
    assert [event.type for event in world.stream.read(job.id, START)][-1] is EventType.DONE
    assert world.queue.take(queue_of(job)) is None


def test_lost_messages_are_sent_again_once_their_list_is_empty(world: World) -> None:
    (job,) = world.submit()  # and never sent
    world.sweep()
    assert world.queue.empty([queue_of(job)])
    world.clock.advance(6)
    world.sweep()
    assert world.queue.take(queue_of(job)) == job.id
    assert world.metrics.messages_resent._value.get() == 1


def test_a_message_that_still_waits_is_not_doubled(world: World) -> None:
    (job,) = world.submit()
    world.queue.send([JobRef(job.id, queue_of(job))])
    world.clock.advance(60)
    world.sweep()
    assert [world.queue.take(queue_of(job)), world.queue.take(queue_of(job))] == [job.id, None]


def test_a_broker_that_is_away_holds_up_no_recovery(world: World) -> None:
    taken, lost = world.submit(count=2)
    world.store.claim_many([taken.id], "dead", "node")
    world.clock.advance(LEASE + 1)
    world.queue.away = True
    world.sweep()
    assert world.status(taken) is Status.QUEUED and world.status(lost) is Status.QUEUED


def test_after_an_outage_of_sql_live_workers_get_a_lease_to_renew(world: World) -> None:
    (job,) = world.submit()
    world.store.claim_many([job.id], "live", "node")
    world.clock.advance(LEASE + 1)  # the heartbeats failed all along
    world.store.away = True
    world.sweep()
    world.store.away = False
    world.sweep()
    assert world.status(job) is Status.RUNNING
    world.clock.advance(LEASE)
    world.sweep()
    assert world.status(job) is Status.QUEUED


def test_a_run_that_finds_a_fresh_one_does_nothing(world: World) -> None:
    (job,) = world.submit()
    world.store.claim_many([job.id], "dead", "node")
    world.maintenance.sweep()
    world.clock.advance(LEAST_GAP_S / 2)
    world.store.away = True  # it would say so
    world.maintenance.sweep()
    world.store.away = False
    world.clock.advance(LEASE + 1)
    world.maintenance.sweep()
    assert world.status(job) is Status.QUEUED  # the second run did not see the outage


def test_the_tick_feeds_every_queue_up_to_the_bound(world: World) -> None:
    bulk, standard = world.submit(Priority.BULK, 5), world.submit(Priority.STANDARD, 2)
    world.maintenance.feed()
    sent = [[world.queue.take(queue_of(jobs[0])) for _ in range(5)] for jobs in (bulk, standard)]
    assert sent == [[*[job.id for job in bulk[:3]], None, None], [*[job.id for job in standard], None, None, None]]


def test_old_results_are_evicted(world: World) -> None:
    outcome: Outcome = make_outcome()
    world.cache.put("default", "key", outcome)
    world.clock.advance(61)
    world.maintenance.evict()
    assert world.cache.evict() == 0


def test_beat_ticks_by_a_clock_that_never_steps() -> None:
    schedule = ticks(2.0)
    assert {name: entry["task"] for name, entry in schedule.items()} == {
        name: f"promptmill.maintenance.{name}" for name in ("sweep", "feed", "evict")
    }
    sweep = schedule["sweep"]["schedule"]
    assert sweep.now() <= monotonic_now() and sweep.run_every.total_seconds() == 2.0
    assert not sweep.is_due(monotonic_now()).is_due
