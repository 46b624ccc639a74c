"""``?wait=``: a call that is held until its job is over."""

from api.services import Services
from api.viewer import SILENT_S, TICK_S
from promptmill.core.jobs import Job


def wait_for_end(services: Services, job_id: str, seconds: float) -> Job | None:
    """The job once it is terminal, or as it is after ``seconds``. None = no such job.

    The terminal event wakes it; SQL is asked every few seconds in case that event was lost.
    """
    clock, feed = services.clock, services.fanout.open(job_id)
    try:
        deadline = clock.monotonic() + seconds
        job, asked = services.store.get(job_id), clock.monotonic()  # registered first: no end is missed between
        while job is not None and not job.status.terminal and not services.stop.is_set():
            left = deadline - clock.monotonic()
            if left <= 0:
                break
            event = feed.get(min(left, TICK_S))
            lagging = event is None and feed.lagging
            over = event is not None and event.type.terminal
            if lagging or over or clock.monotonic() - asked >= min(SILENT_S, left):
                job, asked = services.store.get(job_id), clock.monotonic()
                if lagging:
                    feed.caught_up()
        return job
    finally:
        services.fanout.close_feed(feed)
