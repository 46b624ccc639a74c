"""A real Celery worker over Valkey and SQLite with the instant engine: what jobs see of it."""

import threading
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from promptmill.core.events import START, EventType
from promptmill.core.jobs import Priority, Status
from tests.support.factories import queue_of
from tests.support.servers import eventually
from tests.support.workers import Mill
from workers.transport import base_app

SLOW = {"instant_step_ms": 20}


def texts_of(mill: Mill, job_id: str) -> list[str]:
    """What a viewer shows after each start of the text; positions must follow each other."""
    shown, position = [""], 0
    for event in mill.stream.read(job_id, START):
        if event.type is EventType.RESET:
            shown.append("")
            position = 0
        elif event.type is EventType.TOKEN:
            assert event.data["pos"] == position
            position += len(event.data["token_ids"])
            shown[-1] += event.data["text"]
    return shown


def test_jobs_finish_and_their_streams_say_what_is_stored(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url) as mill:
        worker = mill.start()
        jobs = mill.submit(30) + mill.submit(5, Priority.STANDARD) + mill.submit(5, Priority.BULK)
        mill.wait(jobs, Status.SUCCEEDED)
        for new in jobs:
            job = mill.job(new.id)
            assert job.attempt == 1 and job.node == worker.node and job.outcome is not None
            assert job.outcome.choices[0].text == texts_of(mill, job.id)[-1]
            assert mill.cache.get("default", job.spec.cache_key(job.model_revision)) == job.outcome
            eventually(lambda job=job: mill.stream.read(job.id, START)[-1].type is EventType.DONE, what="the terminal event")


def test_flower_sees_every_job_by_its_id(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    kinds = ("task-sent", "task-received", "task-started", "task-succeeded")
    seen: dict[str, set[str]] = defaultdict(set)

    def note(event: dict[str, Any]) -> None:
        seen[event["uuid"]].add(event["type"])
        if len(seen) == 10 and all(len(types) == len(kinds) for types in seen.values()):
            receiver.should_stop = True

    with Mill(tmp_path, sqlite_url, redis_url) as mill, base_app(mill.settings).connection_for_read() as connection:
        mill.start()
        receiver = mill.queue.app.events.Receiver(connection, handlers=dict.fromkeys(kinds, note))
        listening = threading.Event()
        receiver.on_consume_ready = lambda *_args, **_options: listening.set()
        thread = threading.Thread(target=receiver.capture, kwargs={"timeout": 20, "wakeup": False})
        thread.start()
        assert listening.wait(10)
        jobs = mill.submit(10)
        thread.join(25)
        assert dict(seen) == {job.id: set(kinds) for job in jobs}


def test_a_running_job_is_cancelled_by_the_control_command(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url, **SLOW) as mill:
        worker = mill.start()
        jobs = mill.submit(2, max_tokens=1000)
        eventually(lambda: all(len(mill.stream.read(job.id, START)) > 2 for job in jobs), what="tokens of both jobs")
        mill.queue.cancel(jobs[0].id, worker.node)  # without the flag in SQL: the heartbeat knows nothing of it
        mill.wait(jobs[:1], Status.CANCELLED)
        job = mill.job(jobs[0].id)
        assert job.outcome is not None and 0 < job.outcome.tokens < 1000  # it keeps what it had
        assert mill.count(jobs[1:], Status.RUNNING) == 1


def test_the_heartbeat_cancels_when_the_control_command_is_lost(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url, **SLOW) as mill:
        mill.start()
        jobs = mill.submit(1, max_tokens=2000)
        mill.wait(jobs, Status.RUNNING)
        mill.store.cancel(jobs[0].id)
        mill.wait(jobs, Status.CANCELLED)


def test_an_interactive_job_starts_next_under_a_bulk_flood(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url, **SLOW) as mill:
        mill.start()
        flood = mill.submit(60, Priority.BULK, max_tokens=50)
        mill.wait(flood, Status.RUNNING, at_least=8)
        urgent = mill.submit(1, max_tokens=5)
        mill.wait(urgent, Status.SUCCEEDED)
        assert mill.count(flood, Status.QUEUED) >= 36  # at most one more round of the 8 rows has begun
        assert mill.count(flood, Status.RUNNING) <= 8  # the reserved rows are not bulk's
        mill.wait(flood, Status.SUCCEEDED, at_least=16)  # and bulk goes on


def test_metrics_and_health_have_a_port_of_their_own(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url) as mill:
        mill.start()
        mill.wait(mill.submit(3), Status.SUCCEEDED)
        (info,) = mill.directory.live()
        assert info.models == {"tiny": "0123456789abcdef"} and info.rows == 8
        with urllib.request.urlopen(info.metrics_url) as answer:
            text = answer.read().decode()
        assert 'promptmill_jobs_total{priority="interactive",status="succeeded"} 3.0' in text
        with urllib.request.urlopen(info.metrics_url.replace("/metrics", "/health/ready")) as answer:
            assert answer.status == 200


def test_a_worker_without_its_model_says_so_in_one_line(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url) as mill, pytest.raises(AssertionError, match=r"no model at .*absent"):
        mill.start(model="absent")
    assert mill.workers[0].process.returncode == 78
    assert "Traceback" not in mill.workers[0].lines()


def test_feeding_sends_no_more_than_the_bound(tmp_path: Path, sqlite_url: str, redis_url: str) -> None:
    with Mill(tmp_path, sqlite_url, redis_url) as mill:
        jobs = mill.submit(100, Priority.BULK)
        queue = queue_of(jobs[0])
        assert [depth.published for depth in mill.store.depths()] == [64]
        assert mill.queue.empty([queue]) == set()
        mill.start(feed_bound=8)  # it nudges after every four of its finishes
        mill.wait(jobs, Status.SUCCEEDED)
