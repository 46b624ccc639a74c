"""The one place that reads a clock.

Three clocks, three uses (docs/states.md):

* ``time``       wall time, UNIX seconds; for people, never for decisions,
* ``monotonic``  seconds that never step; for every duration inside one process,
* ``lease``      seconds shared by all processes of one host (CLOCK_BOOTTIME, which also counts
                 suspend); judges leases on SQLite. PostgreSQL judges them by ``clock_timestamp()``.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def time(self) -> float: ...
    def monotonic(self) -> float: ...
    def lease(self) -> float: ...


class SystemClock:
    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def lease(self) -> float:
        return lease_now()


def lease_now() -> float:
    """Seconds since this host booted; equal in all its processes."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


SYSTEM_CLOCK = SystemClock()
