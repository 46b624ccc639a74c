"""One child process that is started again when it dies, and that dies with its supervisor."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from promptmill.core.clock import Clock
from promptmill.supervisor.commands import Command
from promptmill.supervisor.logfile import LogFile

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a dead child waits: ``first_s``, doubled with each death in a row, at most ``most_s``.
    A child that lived ``calm_s`` begins again at ``first_s``."""

    first_s: float = 0.5
    most_s: float = 30.0
    calm_s: float = 60.0

    def after(self, deaths: int, lived_s: float) -> tuple[int, float]:
        """(deaths in a row, seconds until the next start) after a child died that lived ``lived_s``."""
        deaths = 1 if lived_s >= self.calm_s else deaths + 1
        return deaths, min(self.most_s, self.first_s * 2.0 ** min(deaths - 1, 16))


@dataclass(frozen=True, slots=True)
class Died:
    """``reason``: as a person reads it. ``delay_s``: until the next start. ``last_line``: of
    the log of a child that ended by itself."""

    name: str
    reason: str
    delay_s: float
    deaths: int
    last_line: str


@dataclass(frozen=True, slots=True)
class Restarted:
    name: str
    pid: int


class Child:
    """Not thread-safe. Start it from the main thread only: the kernel kills a child when the
    *thread* that started it ends (prctl(2), PR_SET_PDEATHSIG)."""

    def __init__(self, command: Command, log: LogFile, clock: Clock, backoff: Backoff | None = None):
        self.command = command
        self.log = log
        self._clock = clock
        self._backoff = backoff or Backoff()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at: float | None = None
        self._wanted = False
        self.deaths = 0

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and not _exited(self._process.pid)

    @property
    def due(self) -> float | None:
        """When the next start is due (Clock.monotonic), None while nothing is planned."""
        return self._start_at

    def start(self) -> None:
        """Raises OSError when the program cannot be run."""
        self._wanted = True
        self._start_at = None
        with self.log.open() as output:
            self._process = subprocess.Popen(
                self.command.argv,
                env={**os.environ, **self.command.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C reaches the supervisor alone, which stops the children in order
                preexec_fn=_leash(os.getpid()),
            )
        self._started_at = self._clock.monotonic()

    def run_once(self, now: float) -> Died | Restarted | None:
        """Notice a death and plan the next start, or start what is due."""
        self.log.bound()
        if self._process is not None and _exited(self._process.pid):
            return self._bury(now)
        if self._wanted and self._start_at is not None and now >= self._start_at:
            try:
                self.start()
            except OSError as error:  # such as EAGAIN: no room for another process now
                return self._plan(now, lived_s=0.0, reason=f"could not be started ({error.strerror})", said="")
            return Restarted(self.name, self.pid or 0)
        return None

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask it to end and start it no more; ``gone`` tells when it has."""
        self._wanted = False
        self._start_at = None
        if self._process is not None and not _exited(self._process.pid):
            os.kill(self._process.pid, signum)

    def kill(self) -> None:
        """End it and all that it started, now."""
        self._wanted = False
        self._start_at = None
        if self._process is not None:
            _kill_group(self._process.pid)
            self._process.wait()
            self._process = None

    @property
    def gone(self) -> bool:
        """Whether it has ended and nothing of its process group is left."""
        if self._process is not None and _exited(self._process.pid):
            self._reap()
        return self._process is None

    def _bury(self, now: float) -> Died | None:
        code = self._reap()
        if not self._wanted:
            return None
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        said = "" if code < 0 else self.log.last_line()  # what a killed child said last is no reason
        return self._plan(now, lived_s=now - self._started_at, reason=reason, said=said)

    def _plan(self, now: float, *, lived_s: float, reason: str, said: str) -> Died:
        self.deaths, delay = self._backoff.after(self.deaths, lived_s)
        self._start_at = now + delay
        return Died(self.name, reason, delay, self.deaths, said)

    def _reap(self) -> int:
        """Kill what the dead child left behind (a gunicorn worker would hold the port), then reap it.
        In this order: until it is reaped, nobody else can have its process group's number."""
        process, self._process = self._process, None
        assert process is not None
        _kill_group(process.pid)
        return process.wait()


def _exited(pid: int) -> bool:
    """Whether our child has ended; it stays a zombie."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(pid, signal.SIGKILL)


def _leash(supervisor: int) -> Callable[[], None] | None:
    """What a new child runs before its program: let the kernel kill it when the supervisor dies,
    however that dies. Linux only; elsewhere a killed supervisor leaves its children."""
    libc = _LIBC
    if libc is None:
        return None

    def leash() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)

    return leash
