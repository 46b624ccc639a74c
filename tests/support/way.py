"""The way of a job in one process: real parts of the worker over the in-memory twins and a fake runner."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from batching.runner import RowResult, RowWork
from batching.window import MicroBatcher
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.errors import Unavailable
from promptmill.core.events import START, EventType, StreamEvent
from promptmill.core.jobs import Claim, Finish, Job, NewJob
from promptmill.core.metrics import Metrics
from promptmill.core.ports import Append
from storage.memory import MemoryJobQueue, MemoryJobStore, MemoryResultCache, MemoryTokenStream
from tests.support.engine import FakeRunner, make_engine
from tests.support.factories import make_job
from workers.claims import Arrival, Claims
from workers.engine_thread import EngineThread
from workers.flusher import Flusher
from workers.gate import Capacity
from workers.registry import Abort, Registry, Run
from workers.sink import Sink
from workers.way import JobWay, Parts

WORKER = "worker-1@host/0001"


class LoopBroken(BaseException):
    """What no runner may raise: not an error of a step, so that nothing in the loop takes it for one."""


class PausedRunner(FakeRunner):
    """Steps only while ``go`` is set; ``stepped`` tells that a first step was done. One that ``breaks``
    takes the engine's loop with it."""

    breaks = False

    def __init__(self) -> None:
        super().__init__(rows=4, reserved=2)
        self.go, self.stepped = threading.Event(), threading.Event()
        self.go.set()

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        if self.stepped.is_set():
            self.go.wait(10)
        if self.breaks:
            raise LoopBroken
        results = super().step(rows)
        self.stepped.set()
        return results


class FlakyStore(MemoryJobStore):
    """``finish_many`` and ``release_many`` fail ``failures`` times; with ``after`` they have written by then."""

    failures = 0
    after = False
    finishes = 0

    def finish_many(self, items: Sequence[Finish]) -> list[bool]:
        self.finishes += 1
        if self.failures:
            self.failures -= 1
            if self.after:
                super().finish_many(items)
            raise Unavailable("SQL is away")
        return super().finish_many(items)


class FlakyStream(MemoryTokenStream):
    away = False

    def append(self, events: Sequence[StreamEvent]) -> dict[str, Append]:
        if self.away:
            raise Unavailable("the stream is away")
        return super().append(events)


class Walk:
    """Use it as a context manager."""

    def __init__(self) -> None:
        self.store, self.stream = FlakyStore(), FlakyStream()
        self.queue, self.cache = MemoryJobQueue(), MemoryResultCache()
        self.runner = PausedRunner()
        self.engine = make_engine(self.runner, SYSTEM_CLOCK)
        self.died = threading.Event()
        self.thread = EngineThread(self.engine, on_death=self.died.set)
        self.registry = Registry(Capacity(4, 2), SYSTEM_CLOCK)
        self.flusher = Flusher(self.stream, SYSTEM_CLOCK, lambda job, attempt: self.way.lose(job, attempt))
        self.fed: list[Claim] = []
        metrics = Metrics()
        claims = Claims(self.store, self.registry, self._displace, metrics, SYSTEM_CLOCK, WORKER, "worker-1@host")
        self.sink = Sink(self.registry, self.flusher, metrics, SYSTEM_CLOCK, WORKER)
        self.way = JobWay(
            Parts(
                store=self.store,
                queue=self.queue,
                cache=self.cache,
                engine=self.engine,
                flusher=self.flusher,
                registry=self.registry,
                metrics=metrics,
                clock=SYSTEM_CLOCK,
                worker=WORKER,
                claim=MicroBatcher[Arrival, Run | None](
                    claims.claim, max_size=64, probe_s=0.003, max_wait_s=0.02, on_batch=claims.on_batch
                ),
                finish=MicroBatcher[Finish, bool](self.store.finish_many, max_size=64, probe_s=0, max_wait_s=0, retry_alone=True),
                finished=self.fed.append,
            )
        )
        self._threads = ThreadPoolExecutor(8)

    def _displace(self, run: Run) -> None:
        self.way.abort(run, Abort.LOST)

    def __enter__(self) -> "Walk":
        self.thread.start(self.sink)
        self.flusher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.go.set()
        self.stream.away = False
        self.way.close()
        self._threads.shutdown()
        self.thread.close()
        self.flusher.close()

    def submit(self, **fields: object) -> NewJob:
        job = make_job(**fields)  # type: ignore[arg-type]
        self.store.submit([job])
        return job

    def run(self, job: NewJob) -> str:
        return self.start(job).result(20)

    def start(self, job: NewJob) -> "Future[str]":
        return self._threads.submit(self.way.run, job.id)

    def start_and_pause(self, job: NewJob) -> "Future[str]":
        """The job is in the engine, has tokens, and does not go on until ``runner.go`` is set."""
        self.runner.go.clear()
        word = self.start(job)
        assert self.runner.stepped.wait(10)
        return word

    def job(self, new: NewJob) -> Job:
        job = self.store.get(new.id)
        assert job is not None
        return job

    def events(self, job: NewJob) -> list[StreamEvent]:
        return self.stream.read(job.id, START)

    def kinds(self, job: NewJob) -> list[EventType]:
        return [event.type for event in self.events(job)]
