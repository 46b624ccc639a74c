"""The embedded Valkey under the supervisor: killed, it comes back on its port with what it was given."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from promptmill.supervisor.child import Backoff, Child, Died, Restarted
from promptmill.supervisor.logfile import LogFile
from promptmill.supervisor.services import Server, answers, find_server, free_port
from tests.support.clock import FakeClock
from tests.support.servers import eventually


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(tmp_path: Path, port: int, clock: FakeClock) -> Iterator[Child]:
    folder = tmp_path / "with a space"
    child = Child(find_server("").command(port, folder / "redis"), LogFile(folder / "logs", "redis"), clock, Backoff())
    child.start()
    try:
        eventually(lambda: answers(port), what="Valkey's answer")
        yield child
    finally:
        child.kill()


def test_it_comes_back_on_the_same_port_with_its_data(server: Child, port: int, clock: FakeClock):
    with redis.Redis(port=port) as client:
        client.lpush("pm:bulk.model", "a", "b")
        client.waitaof(1, 0, 5000)
    pid = server.pid
    kill(server)
    died = server.run_once(clock.monotonic())
    assert isinstance(died, Died)
    clock.advance(died.delay_s)
    assert isinstance(server.run_once(clock.monotonic()), Restarted)
    assert server.pid != pid
    eventually(lambda: answers(port), what="Valkey's answer")
    with redis.Redis(port=port) as client:
        assert client.lrange("pm:bulk.model", 0, -1) == [b"b", b"a"]


def kill(server: Child) -> None:
    assert server.pid
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


def test_it_listens_on_this_machine_alone_and_evicts_nothing(server: Child, port: int):
    with redis.Redis(port=port, decode_responses=True) as client:
        found = client.config_get("bind", "maxmemory-policy", "appendonly", "save")
    assert found == {"bind": "127.0.0.1", "maxmemory-policy": "noeviction", "appendonly": "yes", "save": ""}


def test_a_plain_stop_ends_it_with_its_data_on_disk(server: Child, port: int):
    with redis.Redis(port=port) as client:
        client.set("pm:key", "value")
    server.stop()
    eventually(lambda: server.gone, what="the end of Valkey")
    assert any("value" in file.read_text(errors="replace") for file in log_files(server))


def log_files(server: Child) -> list[Path]:
    return list((server.log.path.parents[1] / "redis" / "appendonlydir").glob("*.aof"))


def test_fakeredis_serves_when_there_is_nothing_else(tmp_path: Path, port: int, clock: FakeClock):
    server = Server("fakeredis", (sys.executable, "-m", "promptmill.supervisor.fakeserver"), durable=False)
    child = Child(server.command(port, tmp_path), LogFile(tmp_path, "redis"), clock)
    child.start()
    try:
        eventually(lambda: answers(port), 30, what="fakeredis's answer")
    finally:
        child.kill()
