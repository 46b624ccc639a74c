import threading
from collections.abc import Sequence

from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.errors import Unavailable
from promptmill.core.jobs import JobRef, Priority, QueueName
from storage.memory import MemoryJobQueue, MemoryJobStore
from tests.support.factories import make_job, queue_of
from workers.feeder import Feeder

BULK = QueueName(Priority.BULK, "tiny")


class TellingQueue(MemoryJobQueue):
    """Tells of each send, also of empty ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.told = threading.Semaphore(0)

    def send(self, jobs: Sequence[JobRef]) -> None:
        super().send(jobs)
        self.sent.append(len(jobs))
        self.told.release()


def test_a_feed_fills_up_to_the_bound() -> None:
    store, queue = MemoryJobStore(), MemoryJobQueue()
    store.submit([make_job(Priority.BULK) for _ in range(5)])
    feeder = Feeder(store, queue, bound=3)
    assert [feeder.feed(BULK), feeder.feed(BULK)] == [3, 0]


def test_a_nudge_feeds_on_another_thread_and_a_second_one_follows_the_gap() -> None:
    store, queue = MemoryJobStore(), TellingQueue()
    feeder = Feeder(store, queue, bound=10)
    before = SYSTEM_CLOCK.monotonic()
    for _ in range(2):
        store.submit([make_job(Priority.BULK)])
        feeder.nudge(BULK)
        assert queue.told.acquire(timeout=10)
    assert SYSTEM_CLOCK.monotonic() - before >= 0.05
    feeder.close()
    assert queue.sent == [1, 1]


def test_nudges_within_the_gap_are_one() -> None:
    store, queue = MemoryJobStore(), TellingQueue()
    feeder = Feeder(store, queue, bound=100)
    feeder.nudge(BULK)
    assert queue.told.acquire(timeout=10)
    for _ in range(20):
        store.submit([make_job(Priority.BULK)])
        feeder.nudge(BULK)
    assert queue.told.acquire(timeout=10)
    feeder.close()
    assert queue.sent == [0, 20]


def test_finishes_nudge_once_half_the_bound_is_gone() -> None:
    store, queue = MemoryJobStore(), TellingQueue()
    feeder = Feeder(store, queue, bound=4)
    feeder.finished(BULK)
    feeder.finished(QueueName(Priority.STANDARD, "tiny"))
    assert queue.sent == []
    feeder.finished(BULK)
    assert queue.told.acquire(timeout=10)
    feeder.close()


def test_an_outage_of_sql_does_not_stop_the_feeder() -> None:
    class Away(MemoryJobStore):
        away = True
        asked = threading.Semaphore(0)

        def feed(self, queue: QueueName, bound: int) -> list[JobRef]:
            if self.away:
                self.away = False
                self.asked.release()
                raise Unavailable("SQL is away")
            return super().feed(queue, bound)

    store, queue = Away(), TellingQueue()
    job = make_job(Priority.BULK)
    store.submit([job])
    feeder = Feeder(store, queue, bound=4)
    feeder.nudge(queue_of(job))
    assert store.asked.acquire(timeout=10)
    feeder.nudge(queue_of(job))
    assert queue.told.acquire(timeout=10)
    feeder.close()
    assert queue.take(BULK) == job.id


def test_a_closed_feeder_starts_nothing() -> None:
    feeder = Feeder(MemoryJobStore(), MemoryJobQueue(), bound=4)
    feeder.close()
    threads = threading.active_count()
    feeder.nudge(BULK)
    assert threading.active_count() == threads
