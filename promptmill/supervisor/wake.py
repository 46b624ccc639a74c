"""The supervisor's one place of rest: it wakes for a signal, a dead child or a deadline."""

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Self

from promptmill.core.clock import Clock

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST_S = 1.0  # `make` and the terminal may both pass on the same signal


class Wake:
    """A context manager for the main thread. ``stops`` counts the requests to stop so far; signals
    within a second of each other are one request."""

    def __init__(self, clock: Clock) -> None:
        self.stops = 0
        self._clock = clock
        self._last_stop = float("-inf")
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def __enter__(self) -> Self:
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        wanted = [signum for signum in STOPS if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN]  # nohup
        self._old = {signum: signal.signal(signum, self._stop) for signum in wanted}
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or earlier when a signal came or ``nudge`` was called."""
        if select.select([self._read], [], [], max(0.0, seconds))[0]:
            os.read(self._read, 4096)

    def nudge(self) -> None:
        """End the wait; for other threads."""
        os.write(self._write, b"\0")

    def _stop(self, _signum: int, _frame: FrameType | None) -> None:
        now = self._clock.monotonic()
        if now - self._last_stop >= ONE_REQUEST_S:
            self.stops += 1
        self._last_stop = now
