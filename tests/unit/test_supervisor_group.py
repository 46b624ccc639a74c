"""The order in which `up` stops its children, with real processes that note when they are told to end."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.supervisor.child import Child
from promptmill.supervisor.commands import Command
from promptmill.supervisor.group import Group
from promptmill.supervisor.logfile import LogFile
from promptmill.supervisor.wake import Wake
from tests.support.clock import FakeClock
from tests.support.servers import eventually

NOTES = """
import os, signal, sys
name, notes, obeys = sys.argv[1:]
def told(*_):
    with open(notes, "a") as file:
        file.write(name + "\\n")
    if obeys == "yes":
        os._exit(0)
signal.signal(signal.SIGTERM, told)
print("up", flush=True)
while True:
    signal.pause()
"""


class Family:
    """Children by name that write their name into ``notes`` when they get SIGTERM."""

    def __init__(self, folder: Path, wake: Wake):
        self.folder = folder
        self.notes = folder / "notes"
        self.group = Group(SYSTEM_CLOCK, wake)

    def add(self, name: str, *, obeys: bool = True) -> None:
        argv = (sys.executable, "-c", NOTES, name, str(self.notes), "yes" if obeys else "no")
        child = Child(Command(name, argv), LogFile(self.folder, name), SYSTEM_CLOCK)
        self.group.start(child)
        eventually(lambda: "up" in child.log.path.read_text(), what=f"{name}'s start")

    @property
    def told(self) -> list[str]:
        return self.notes.read_text().split()


@pytest.fixture
def wake() -> Iterator[Wake]:
    with Wake(SYSTEM_CLOCK) as wake:
        yield wake


@pytest.fixture
def family(tmp_path: Path, wake: Wake) -> Iterator[Family]:
    family = Family(tmp_path, wake)
    yield family
    for child in family.group.children:
        child.kill()


def test_redis_stops_last_and_maintenance_after_all_that_makes_work(family: Family):
    for name in ("redis", "api", "worker-1", "worker-2", "maintenance", "beat", "flower"):
        family.add(name)
    assert family.group.stop(drain_s=20) == []
    assert family.told[-2:] == ["maintenance", "redis"]
    assert set(family.told[:-2]) == {"api", "worker-1", "worker-2", "beat", "flower"}
    assert all(child.gone for child in family.group.children)


def test_who_does_not_stop_in_time_is_killed_and_named(family: Family):
    family.add("worker-1", obeys=False)
    family.add("redis")
    assert family.group.stop(drain_s=-8) == ["worker-1"], "all of its time is over"
    assert family.told[-1] == "redis"


def test_streams_are_not_held_open_once_the_workers_are_gone(family: Family):
    family.add("api", obeys=False)
    family.add("worker-1")
    assert family.group.stop(drain_s=600) == ["api"]


def test_a_second_request_ends_the_wait(tmp_path: Path, family: Family, wake: Wake):
    """The first one began the stop; the second comes from a child of ours while it lasts."""
    wake.stops = 1
    family.add("worker-1", obeys=False)
    impatient = Child(
        Command("impatient", (sys.executable, "-c", f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM)")),
        LogFile(tmp_path, "impatient"),
        SYSTEM_CLOCK,
    )
    impatient.start()
    assert family.group.stop(drain_s=600) == ["worker-1"]
    assert wake.stops == 2
    impatient.kill()


def test_a_hangup_that_was_ignored_stays_ignored():
    """As `nohup` wants it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Wake(FakeClock()) as wake:
            os.kill(os.getpid(), signal.SIGHUP)
            assert wake.stops == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_close_together_are_one_request():
    clock = FakeClock()
    with Wake(clock) as wake:
        os.kill(os.getpid(), signal.SIGINT)
        clock.advance(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wake.stops == 1
        clock.advance(1.5)
        os.kill(os.getpid(), signal.SIGINT)
        assert wake.stops == 2


def test_the_wait_ends_with_a_child(family: Family, wake: Wake):
    family.add("worker-1")
    (child,) = family.group.children
    os.kill(child.pid or 0, signal.SIGKILL)
    wake.wait(60)
    eventually(lambda: not child.alive)
