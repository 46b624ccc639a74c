"""Celery's view of a delivered job when there is nothing to acknowledge."""

from celery.worker.request import Request
from kombu.asynchronous import get_event_loop


class NoAckRequest(Request):
    """Job queues are declared ``no_ack``: the SQL lease is the only acknowledgement.

    The real ``acknowledge`` of a job that outlives a reconnect raises in the hub and kills the
    worker. But the hub must still be woken when a thread gets free, or it fetches only at its
    next poll.
    """

    def acknowledge(self) -> None:
        self.acknowledged = True
        hub = get_event_loop()
        if hub is not None:
            hub.call_soon(_nothing)

    def reject(self, requeue: bool = False) -> None:
        self.acknowledged = True


def _nothing() -> None:
    """The call itself wakes the hub."""
