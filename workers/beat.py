"""The ticks of the maintenance tasks, on a clock that never steps.

Celery's beat compares wall times: after the clock steps back an hour it sends nothing for an hour.
So every schedule gets a ``now`` made of the monotonic clock.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from celery.schedules import schedule

from promptmill.core.clock import SYSTEM_CLOCK

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
EVICT_SECONDS = 60.0


def monotonic_now() -> datetime:
    """A date that only differences are taken of."""
    return EPOCH + timedelta(seconds=SYSTEM_CLOCK.monotonic())


def ticks(sweep_seconds: float) -> dict[str, Any]:
    """Celery's ``beat_schedule``."""

    def every(name: str, seconds: float) -> dict[str, Any]:
        return {"task": f"promptmill.maintenance.{name}", "schedule": schedule(seconds, nowfun=monotonic_now)}

    return {"sweep": every("sweep", sweep_seconds), "feed": every("feed", sweep_seconds), "evict": every("evict", EVICT_SECONDS)}
