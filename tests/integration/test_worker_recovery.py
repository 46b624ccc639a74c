"""Processes that die, drain or never got the message; real ones, real signals."""

import signal
import subprocess
import sys
from pathlib import Path

from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.events import START, EventType
from promptmill.core.jobs import NewJob, Status
from promptmill.core.metrics import Metrics
from tests.support.factories import make_job, make_spec
from tests.support.servers import die_with_parent, eventually
from tests.support.workers import REPOSITORY, Mill
from workers.heartbeat import EXIT_STALLED
from workers.maintenance import LEAST_GAP_S, Maintenance

SLOW = {"instant_step_ms": 20}


def sweeper(mill: Mill) -> Maintenance:
    return Maintenance(
        mill.store, mill.queue, mill.stream, mill.cache, mill.feeder, Metrics(), SYSTEM_CLOCK, lease_seconds=mill.settings.lease_seconds
    )


def sweep_until(mill: Mill, jobs: list[NewJob], status: Status) -> None:
    """Tick as beat does: a sweep does nothing within a second of the last one."""
    maintenance = sweeper(mill)

    def done() -> bool:
        maintenance.sweep()
        return mill.count(jobs, status) == len(jobs)

    eventually(done, 30 + LEAST_GAP_S, f"all {status}")


def streamed(mill: Mill, job_id: str) -> list[EventType]:
    return [event.type for event in mill.stream.read(job_id, START) if event.type is not EventType.TOKEN]


def test_jobs_of_a_killed_worker_finish_once_on_the_next(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url, **SLOW) as mill:
        first = mill.start("worker-1")
        jobs = mill.submit(8, max_tokens=40)
        eventually(lambda: all(len(mill.stream.read(job.id, START)) > 2 for job in jobs), what="tokens of all jobs")
        first.process.kill()
        first.process.wait()
        assert mill.count(jobs, Status.RUNNING) == 8
        mill.start("worker-2")
        sweep_until(mill, jobs, Status.SUCCEEDED)
        for new in jobs:
            job = mill.job(new.id)
            assert (job.attempt, job.losses) == (2, 1)
            assert job.outcome is not None and job.outcome.tokens == 40
            eventually(lambda job=job: EventType.DONE in streamed(mill, job.id), what="the terminal event")
            assert streamed(mill, job.id) == [EventType.STARTED, EventType.RESET, EventType.DONE]
            again = [event for event in mill.stream.read(job.id, START) if event.cursor.attempt == 2 and event.type is EventType.TOKEN]
            assert "".join(event.data["text"] for event in again) == job.outcome.choices[0].text


def test_sigterm_lets_running_jobs_finish(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url, **SLOW) as mill:
        worker = mill.start()
        jobs = mill.submit(6, max_tokens=60)
        mill.wait(jobs, Status.RUNNING)
        begun = SYSTEM_CLOCK.monotonic()
        assert worker.stop(signal.SIGTERM) == 0
        assert SYSTEM_CLOCK.monotonic() - begun < mill.settings.drain_seconds  # the drain ends with the last job
        assert mill.count(jobs, Status.SUCCEEDED) == 6
        assert not mill.directory.live()


def test_what_outlasts_the_drain_goes_back_to_the_queue(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url, drain_seconds=0.5, lease_seconds=60.0, heartbeat_seconds=15.0) as mill:
        slow = mill.start("worker-1", instant_step_ms=50)
        jobs = mill.submit(4, max_tokens=2000)
        mill.wait(jobs, Status.RUNNING)
        slow.stop(signal.SIGTERM)
        assert [(job.status, job.attempt, job.losses) for job in map(mill.job, (new.id for new in jobs))] == [(Status.QUEUED, 1, 0)] * 4
        mill.start("worker-2")  # no sweep: the messages were sent again
        mill.wait(jobs, Status.SUCCEEDED)


BREAKS = """
from batching.engines.instant import InstantRunner
class Broken(BaseException): pass
calls, whole = [], InstantRunner.step
def step(self, rows):
    calls.append(rows)
    if len(calls) > 3: raise Broken
    return whole(self, rows)
InstantRunner.step = step
"""


def test_a_worker_whose_engine_dies_gives_its_jobs_back_and_ends(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url, lease_seconds=60.0, heartbeat_seconds=15.0) as mill:
        worker = mill.start("worker-1", BREAKS)
        jobs = mill.submit(4, max_tokens=40)
        assert worker.process.wait(20) == EXIT_STALLED  # long before the next heartbeat is due
        assert worker.lines().count("engine died") == 1
        assert [(job.status, job.losses) for job in map(mill.job, (new.id for new in jobs))] == [(Status.QUEUED, 0)] * 4
        mill.start("worker-2")  # neither a lease nor a sweep: the messages were sent again
        mill.wait(jobs, Status.SUCCEEDED)


def test_beat_and_maintenance_bring_back_a_lost_message_without_a_model(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url, sweep_seconds=1.0) as mill:
        mill.start()
        jobs = [make_job(spec=make_spec()) for _ in range(3)]
        mill.store.submit(jobs)  # and the process that should send them dies
        arguments = {
            "maintenance": [
                "worker",
                "-P",
                "threads",
                "-c",
                "2",
                "-Q",
                "maintenance",
                "--without-gossip",
                "--without-mingle",
                "-n",
                "m@%h",
            ],
            "beat": ["beat"],
        }
        log = (tmp_path / "maintenance.log").open("wb")
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "workers.app", *words],
                cwd=REPOSITORY,
                env=mill.environment(process=name, model="absent"),
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
            for name, words in arguments.items()
        ]
        try:
            mill.wait(jobs, Status.SUCCEEDED)
            maps = Path(f"/proc/{processes[0].pid}/maps").read_text()
            assert "libtorch" not in maps
        finally:
            for process in processes:
                process.terminate()
            codes = [process.wait(20) for process in processes]
            log.close()
        assert codes == [0, 0]
        assert [mill.job(job.id).attempt for job in jobs] == [1, 1, 1]
        assert not list(REPOSITORY.glob("celerybeat*"))
