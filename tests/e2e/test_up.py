"""What `promptmill up` promises: it stops whole, runs once per data directory, and says in one line why it cannot start."""

import json
import os
import select
import signal
import socket
from pathlib import Path

import pytest

from tests.support.client import text_of
from tests.support.processes import alive, using
from tests.support.system import System, free_port, run_cli

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NAMES = {"api", "worker-1", "maintenance", "beat", "flower"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_up_stops_whole_and_leaves_no_process(tmp_path: Path, number: signal.Signals):
    with System(tmp_path / "with a space" / "data", instant_step_ms=20) as system:
        family = system.processes()
        assert {p.name for p in family} >= NAMES
        for job in range(3):  # a drain with work in hand
            system.client.submit(f"running {job}", max_tokens=2000, cache="off", priority="interactive")
        assert system.stop(number) == 0
    assert [p for p in family if alive(p.pid)] == []
    assert using(system.data_dir) == []


def test_jobs_that_a_stop_interrupts_finish_after_the_next_start(tmp_path: Path):
    with System(tmp_path / "data", instant_step_ms=20, drain_seconds=1) as system:
        job = system.client.submit("patience", max_tokens=400, cache="off", temperature=0)["id"]
        next(event for event in system.client.events(job) if event["type"] == "token")
        system.stop()
    with System(tmp_path / "data") as system:
        done = system.client.wait(job)
    assert done["status"] == "succeeded"
    assert done["result"]["usage"]["completion_tokens"] == 400


def test_children_die_with_up_even_by_sigkill(tmp_path: Path):
    with System(tmp_path / "data") as system:
        family = [p.pid for p in system.processes()]
        os.kill(system.pid, signal.SIGKILL)
        ends = [os.pidfd_open(pid) for pid in family if alive(pid)]
        for end in ends:
            _wait_readable(end)
    assert [pid for pid in family if alive(pid)] == []


def _wait_readable(descriptor: int) -> None:
    try:
        assert select.select([descriptor], [], [], 20)[0], "a child outlived `up`"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_dead_child_is_restarted_and_said_so(restartable: System, name: str):
    pid = restartable.kill(name)
    said = restartable.output("restarted", 60)
    assert said["process"] == name
    assert restartable.process(name).pid != pid


@pytest.fixture(scope="module")
def restartable(tmp_path_factory: pytest.TempPathFactory):
    with System(tmp_path_factory.mktemp("restart") / "data") as system:
        yield system


def refused(*options: str, **settings: str) -> str:
    """The one line of an `up` that cannot start."""
    done = run_cli("up", "--no-demo", "--engine", "instant", *options, **settings)
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


def test_a_second_up_on_the_same_data_is_refused(instant: System):
    line = refused("--data-dir", str(instant.data_dir), "--port", str(free_port()))
    assert str(instant.data_dir) in line
    assert instant.client.http.get("/health/ready").status_code == 200


def test_a_taken_port_is_refused(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refused("--data-dir", str(tmp_path / "data"), "--port", str(port))
    assert using(tmp_path / "data") == []


def test_a_missing_model_is_refused(tmp_path: Path):
    line = refused("--data-dir", str(tmp_path / "data"), "--port", str(free_port()), "--model", "no-such-model")
    assert "no-such-model" in line
    assert using(tmp_path / "data") == []


def test_submit_streams_the_text_that_is_stored(instant: System):
    done = run_cli("submit", "Hello from the command line", "--raw", "--stream", "--max-tokens", "24", "--url", instant.url)
    assert done.returncode == 0, done.stderr
    newest = instant.client.http.get("/v1/jobs", params={"limit": 1}).json()["data"][0]
    assert newest["request"]["prompt"] == "Hello from the command line"
    assert done.stdout == text_of(newest) + "\n"


def test_tail_prints_a_job_that_is_over(instant: System):
    job = instant.client.run("tail me", max_tokens=12)
    done = run_cli("tail", job["id"], "--url", instant.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text_of(job) + "\n"


def test_submit_as_json_prints_the_job(instant: System):
    done = run_cli("submit", "Hello as JSON", "--json", "--priority", "interactive", "--url", instant.url)
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert job["priority"] == "interactive"
    assert instant.client.wait(job["id"])["status"] == "succeeded"


@pytest.mark.parametrize("words", [("jobs",), ("stats",), ("doctor",)], ids=" ".join)
def test_commands_that_look_at_a_running_system_succeed(instant: System, words: tuple[str, ...]):
    environment = instant.process("api").environment
    settings = {n.removeprefix("PROMPTMILL_").lower(): v for n, v in environment.items() if n.startswith("PROMPTMILL_")}
    done = run_cli(*words, **{**settings, "process": ""})
    assert done.returncode == 0, done.stdout + done.stderr
