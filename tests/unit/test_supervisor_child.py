"""A child process: when it is started again, and that it never outlives its supervisor."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from promptmill.supervisor.child import Backoff, Child, Died, Restarted
from promptmill.supervisor.commands import Command
from promptmill.supervisor.logfile import LogFile
from tests.support.clock import FakeClock

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's leash is Linux's")


def test_the_backoff_doubles_up_to_its_bound():
    deaths, delays = 0, []
    for _ in range(9):
        deaths, delay = Backoff().after(deaths, lived_s=0.1)
        delays.append(delay)
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_long_life_forgives_earlier_deaths():
    assert Backoff().after(7, lived_s=60.0) == (1, 0.5)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def child(tmp_path: Path, clock: FakeClock, script: str) -> Child:
    return Child(Command("some", (sys.executable, "-c", script)), LogFile(tmp_path, "some"), clock)


def wait_for_death(pid: int) -> None:
    """Until our child is a zombie; it is not reaped."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def died(child: Child, now: float) -> Died:
    assert child.pid
    wait_for_death(child.pid)
    notice = child.run_once(now)
    assert isinstance(notice, Died)
    return notice


def test_a_dead_child_is_reported_with_its_last_words_and_started_when_due(tmp_path: Path, clock: FakeClock):
    some = child(tmp_path, clock, "import sys; print('first'); sys.exit('the last words')")
    some.start()
    notice = died(some, clock.monotonic())
    assert (notice.name, notice.reason, notice.delay_s, notice.last_line) == ("some", "exited with code 1", 0.5, "the last words")
    assert some.run_once(clock.monotonic()) is None, "it is not due yet"
    assert not some.alive
    clock.advance(0.5)
    assert isinstance(some.run_once(clock.monotonic()), Restarted)
    assert died(some, clock.monotonic()).delay_s == 1.0


def test_a_killed_child_is_reported_by_the_signals_name(tmp_path: Path, clock: FakeClock):
    some = child(tmp_path, clock, "import signal; signal.pause()")
    some.start()
    os.kill(some.pid or 0, signal.SIGKILL)
    assert died(some, clock.monotonic()).reason == "was killed by SIGKILL"


def test_a_stopped_child_is_not_started_again(tmp_path: Path, clock: FakeClock):
    some = child(tmp_path, clock, "import signal; signal.pause()")
    some.start()
    pid = some.pid or 0
    some.stop()
    wait_for_death(pid)
    assert some.run_once(clock.monotonic()) is None
    clock.advance(1000)
    assert some.run_once(clock.monotonic()) is None
    assert some.gone


def test_a_stop_between_death_and_restart_prevents_the_restart(tmp_path: Path, clock: FakeClock):
    some = child(tmp_path, clock, "raise SystemExit(3)")
    some.start()
    died(some, clock.monotonic())
    some.stop()
    clock.advance(1000)
    assert some.run_once(clock.monotonic()) is None
    assert some.gone


def test_what_a_dead_child_leaves_behind_is_killed(tmp_path: Path, clock: FakeClock):
    """Such as the workers of a killed gunicorn, which would hold its port."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.exit(1)"
    some = child(tmp_path, clock, script)
    some.start()
    wait_for_death(some.pid or 0)
    grandchild = os.pidfd_open(int(some.log.path.read_text()))
    some.run_once(clock.monotonic())
    try:
        assert select.select([grandchild], [], [], 10)[0], "it still lives"
    finally:
        os.close(grandchild)


def test_a_program_that_cannot_run_is_an_error_at_the_first_start(tmp_path: Path, clock: FakeClock):
    with pytest.raises(OSError, match="no-such"):
        Child(Command("some", ("/no-such-program",)), LogFile(tmp_path, "some"), clock).start()


def test_kill_ends_a_child_that_ignores_sigterm(tmp_path: Path, clock: FakeClock):
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    some = child(tmp_path, clock, script)
    some.start()
    pid = some.pid or 0
    some.stop()
    some.kill()
    assert some.gone
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@linux
def test_a_child_dies_with_a_supervisor_that_is_killed(tmp_path: Path):
    supervisor = """
import sys, signal
from pathlib import Path
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.supervisor.child import Child
from promptmill.supervisor.commands import Command
from promptmill.supervisor.logfile import LogFile
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
child = Child(Command("some", (sys.executable, "-c", deaf)), LogFile(Path(sys.argv[1]), "some"), SYSTEM_CLOCK)
child.start()
print(child.pid, flush=True)
signal.pause()
"""
    command = [sys.executable, "-c", supervisor, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout
        orphan = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    try:
        assert select.select([orphan], [], [], 10)[0], "the child outlived its supervisor"
    finally:
        os.close(orphan)
