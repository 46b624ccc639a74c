"""Who serves what now; a worker that stops announcing itself vanishes."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import redis

from promptmill.core.ports import WorkerDirectory, WorkerInfo
from storage.memory import MemoryWorkerDirectory
from storage.workers import RedisWorkerDirectory
from tests.support.clock import FakeClock

Directory = tuple[WorkerDirectory, Callable[[float], None]]


@pytest.fixture(params=["memory", "fakeredis", "valkey"])
def both(request: pytest.FixtureRequest) -> Iterator[Directory]:
    """The directory, and a way to let time pass."""
    if request.param == "memory":
        clock = FakeClock()
        yield MemoryWorkerDirectory(clock=clock), clock.advance
        return
    url = request.getfixturevalue({"fakeredis": "fakeredis_url", "valkey": "redis_url"}[request.param])
    directory = RedisWorkerDirectory(url)
    with redis.Redis.from_url(url) as client:

        def pass_time(seconds: float) -> None:
            for key in client.keys("pm:worker:*"):
                client.pexpire(key, max(0, client.pttl(key) - int(seconds * 1000)))
            for node, until in client.zrange("pm:workers", 0, -1, withscores=True):
                client.zadd("pm:workers", {node: until - seconds})

        yield directory, pass_time
        assert all(client.ttl(key) > 0 for key in client.keys("pm:*")), "a key that stays for ever"
    directory.close()


def worker(node: str) -> WorkerInfo:
    return WorkerInfo(node, {"tiny": "0123", "other": "4567"}, "instant", 32, True, "http://127.0.0.1:9100/metrics", 42, "host-1")


def test_announced_workers_are_listed_by_node(both: Directory) -> None:
    directory, _ = both
    assert directory.live() == []
    directory.announce(worker("w2@h"))
    directory.announce(worker("w1@h"))
    assert directory.live() == [worker("w1@h"), worker("w2@h")]


def test_a_newer_announcement_replaces(both: Directory) -> None:
    directory, _ = both
    directory.announce(worker("w1@h"))
    draining = replace(worker("w1@h"), ready=False)
    directory.announce(draining)
    assert directory.live() == [draining]


def test_a_silent_worker_vanishes_after_ten_seconds_and_an_announcing_one_stays(both: Directory) -> None:
    directory, pass_time = both
    directory.announce(worker("silent@h"))
    directory.announce(worker("lives@h"))
    pass_time(5)
    directory.announce(worker("lives@h"))
    assert len(directory.live()) == 2
    pass_time(6)
    assert directory.live() == [worker("lives@h")]
    directory.announce(worker("silent@h"))
    assert len(directory.live()) == 2


def test_a_withdrawn_worker_is_gone_at_once(both: Directory) -> None:
    directory, _ = both
    directory.announce(worker("w1@h"))
    directory.withdraw("w1@h")
    directory.withdraw("never@h")
    assert directory.live() == []
