"""A clock that moves only when a test says so."""

import threading


class FakeClock:
    """All three clocks of ``promptmill.core.clock.Clock``; ``advance`` moves them together."""

    def __init__(self, time: float = 1_800_000_000.0, monotonic: float = 1_000.0):
        self._lock = threading.Lock()
        self._time = time
        self._monotonic = monotonic

    def time(self) -> float:
        with self._lock:
            return self._time

    def monotonic(self) -> float:
        with self._lock:
            return self._monotonic

    def lease(self) -> float:
        return self.monotonic()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._time += seconds
            self._monotonic += seconds

    def step_wall(self, seconds: float) -> None:
        """What an operator or NTP does: the wall clock jumps, the others do not."""
        with self._lock:
            self._time += seconds

    def reboot(self) -> None:
        """The host starts again: the lease clock begins anew, wall time goes on."""
        with self._lock:
            self._monotonic = 1.0
