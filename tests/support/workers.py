"""A real Celery worker as a subprocess, with all it needs, and the stores beside it to look into."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from promptmill.core.jobs import Job, NewJob, Priority, Status
from promptmill.core.settings import Settings, load_settings
from storage.cache import SqlResultCache
from storage.db import Database
from storage.jobs import SqlJobStore
from storage.stream import RedisTokenStream
from storage.workers import RedisWorkerDirectory
from tests.support.engine import save_tiny_model
from tests.support.factories import make_job, make_spec, queue_of, ref_of
from tests.support.servers import die_with_parent, eventually
from workers.queue import CeleryQueue, Feeder

START_SECONDS = 40.0
REPOSITORY = Path(__file__).resolve().parents[2]


class Worker:
    """One ``celery -A workers.app worker``; its log lies in the mill's folder. ``prelude``: Python that runs before it."""

    def __init__(self, mill: "Mill", name: str, prelude: str = "", **settings: object):
        self.node = f"{name}@{os.uname().nodename}"
        self.log = mill.folder / f"{name}.log"
        arguments = ["-A", "workers.app", "worker", "--without-gossip", "--without-mingle", "-n", f"{name}@%h"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{prelude}\nfrom celery.__main__ import main\nmain()", *arguments],
                cwd=REPOSITORY,
                env=mill.environment(process=name, **settings),
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def stop(self, number: int = signal.SIGTERM, timeout: float = 40.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)

    def lines(self) -> str:
        return self.log.read_text(errors="replace")


class Mill:
    """Stores, queue and workers of one test, over a Valkey and an SQLite file. Leases are short."""

    def __init__(self, folder: Path, database_url: str, redis_url: str, **settings: object):
        self.folder = folder
        self._settings = {
            "data_dir": folder / "var",
            "database_url": database_url,
            "redis_url": redis_url,
            "engine": "instant",
            "model": "tiny",
            "lease_seconds": 2.0,
            "heartbeat_seconds": 0.4,
            "engine_rows": 8,
            "reserved_rows": 2,
            **settings,
        }
        self.settings: Settings = load_settings(**self._settings)
        if not self.settings.models_path.exists():
            save_tiny_model(self.settings.models_path, context_length=4096)
        self.db = Database.connect(self.settings.database)
        self.store = SqlJobStore(self.db, lease_seconds=self.settings.lease_seconds)
        self.stream = RedisTokenStream(redis_url)
        self.cache = SqlResultCache(self.db, redis_url, max_bytes=1_000_000, max_age_seconds=60, hot_seconds=60)
        self.directory = RedisWorkerDirectory(redis_url)
        self.queue = CeleryQueue.connect(self.settings)
        self.feeder = Feeder(self.store, self.queue, bound=64)
        self.workers: list[Worker] = []

    def __enter__(self) -> "Mill":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.workers:
            if kind is not None:
                sys.stderr.write(worker.lines()[-6000:])
            worker.process.kill()
            worker.process.wait()
        for part in (self.feeder, self.directory, self.cache, self.stream, self.db):
            part.close()

    def environment(self, **settings: object) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PROMPTMILL_", "PROMETHEUS_"))}
        given = {**self._settings, **settings, "env": "test"}
        return {**kept, **{f"PROMPTMILL_{name.upper()}": str(value) for name, value in given.items()}}

    def start(self, name: str = "worker-1", prelude: str = "", **settings: object) -> Worker:
        """A worker that is ready for jobs."""
        worker = Worker(self, name, prelude, **settings)
        self.workers.append(worker)
        eventually(lambda: worker.process.poll() is not None or self._ready(worker), START_SECONDS, f"{name} ready")
        assert worker.process.poll() is None, worker.lines()[-3000:]
        return worker

    def _ready(self, worker: Worker) -> bool:
        return any(info.pid == worker.process.pid and info.ready for info in self.directory.live())

    def submit(self, count: int, priority: Priority = Priority.INTERACTIVE, max_tokens: int = 8) -> list[NewJob]:
        """As the api does it: commit, then send interactive jobs and feed others."""
        jobs = [make_job(priority, spec=make_spec((10, 11, 12 + number), max_tokens)) for number in range(count)]
        self.store.submit(jobs)
        if priority is Priority.INTERACTIVE:
            self.queue.send([ref_of(job) for job in jobs])
        else:
            self.feeder.feed(queue_of(jobs[0]))
        return jobs

    def job(self, job_id: str) -> Job:
        job = self.store.get(job_id)
        assert job is not None
        return job

    def count(self, jobs: list[NewJob], *statuses: Status) -> int:
        return sum(self.job(job.id).status in statuses for job in jobs)

    def wait(self, jobs: list[NewJob], *statuses: Status, at_least: int | None = None, timeout: float = 30.0) -> None:
        wanted = len(jobs) if at_least is None else at_least
        eventually(lambda: self.count(jobs, *statuses) >= wanted, timeout, f"{wanted} jobs {'/'.join(statuses)}")
