import threading
from collections.abc import Iterator, Sequence

import pytest

from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.engine import EngineStats
from promptmill.core.errors import Unavailable
from promptmill.core.jobs import Held, Priority, Status
from promptmill.core.ports import Heartbeat as Beat
from promptmill.core.ports import WorkerInfo
from storage.memory import MemoryWorkerDirectory
from tests.support.factories import make_spec
from tests.support.way import WORKER, Walk
from workers.heartbeat import Heartbeat, stalled

INFO = WorkerInfo("worker-1@host", {"tiny": "rev"}, "instant", 4, True, "http://127.0.0.1:1/metrics", 1, "host")


@pytest.fixture
def walk() -> Iterator[Walk]:
    with Walk() as walk:
        yield walk


def make_heartbeat(walk: Walk, **options: object) -> Heartbeat:
    given = {"worker": WORKER, "seconds": 60.0, "stall_seconds": 30.0, **options}
    directory = MemoryWorkerDirectory()
    return Heartbeat(walk.store, walk.registry, walk.way, walk.thread, directory, lambda: INFO, SYSTEM_CLOCK, **given)  # type: ignore[arg-type]


def test_a_row_that_is_not_ours_any_more_is_aborted(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(max_tokens=100))
    word = walk.start_and_pause(job)
    walk.store.release_many(WORKER, [Held(job.id, 1)])
    make_heartbeat(walk).run_once()
    assert word.result(20) == "lost"


def test_only_a_statement_that_succeeded_may_report_a_row_missing(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    job = walk.submit(spec=make_spec(max_tokens=20))
    word = walk.start_and_pause(job)

    def away(worker: str, held: Sequence[Held]) -> Beat:
        raise Unavailable("SQL is away")

    with monkeypatch.context() as patch:
        patch.setattr(walk.store, "heartbeat", away)
        make_heartbeat(walk).run_once()
    walk.runner.go.set()
    assert word.result(20) == "succeeded"


def test_a_flagged_job_is_cancelled_in_the_engine(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(max_tokens=100))
    word = walk.start_and_pause(job)
    walk.store.cancel(job.id)
    make_heartbeat(walk).run_once()
    walk.runner.go.set()
    assert word.result(20) == "cancelled"
    assert walk.job(job).status is Status.CANCELLED


def test_a_stalled_engine_ends_the_process_without_renewing(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(max_tokens=100))
    walk.start_and_pause(job)
    hung: list[bool] = []
    make_heartbeat(walk, stall_seconds=-1.0, die=hung.append).run_once()
    assert hung == [True]


def test_an_engine_that_died_gives_its_jobs_back_and_ends_the_process(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(max_tokens=100))
    word = walk.start_and_pause(job)
    walk.runner.breaks = True
    walk.runner.go.set()
    assert walk.died.wait(10)
    hung: list[bool] = []
    make_heartbeat(walk, die=hung.append).run_once()
    assert hung == [False]
    assert word.result(20) == "release"
    assert (walk.job(job).status, walk.job(job).losses) == (Status.QUEUED, 0)
    assert walk.registry.capacity.total == 0, "nothing more is fetched"


def test_an_engine_that_was_drained_or_closed_did_not_die(walk: Walk) -> None:
    hung: list[bool] = []
    heartbeat = make_heartbeat(walk, stall_seconds=-1.0, die=hung.append)
    walk.thread.drain(10)
    heartbeat.run_once()
    walk.thread.close()
    heartbeat.run_once()
    assert hung == [] and not walk.died.is_set()


def test_news_is_announced_at_once(walk: Walk) -> None:
    told = threading.Semaphore(0)

    def info() -> WorkerInfo:
        told.release()
        return INFO

    directory = MemoryWorkerDirectory()
    heartbeat = Heartbeat(
        walk.store, walk.registry, walk.way, walk.thread, directory, info, SYSTEM_CLOCK, worker=WORKER, seconds=3600.0, stall_seconds=30.0
    )
    heartbeat.start()
    assert told.acquire(timeout=10)
    heartbeat.beat_now()
    assert told.acquire(timeout=10)
    heartbeat.close()
    assert directory.live() == [INFO]


@pytest.mark.parametrize(
    ("stats", "hung"),
    [
        (EngineStats(waiting=0, stepped_at=0.0), False),  # nothing to do is no stall
        (EngineStats(waiting=1, stepped_at=0.0), True),
        (EngineStats(waiting=0, running={Priority.BULK: 1}, stepped_at=0.0), True),
        (EngineStats(waiting=0, running={Priority.BULK: 1}, stepped_at=80.0), False),
    ],
)
def test_an_engine_is_stalled_when_it_has_work_and_does_not_step(stats: EngineStats, hung: bool) -> None:
    assert (stalled(stats, now=100.0, stall_seconds=30.0) is not None) is hung
