"""Viewers of one process: their bounded queues, and the table that a fan-out delivers through."""

import threading
from collections import deque

from promptmill.core.events import StreamEvent

FEED_EVENTS = 1024  # a viewer this far behind reads the log instead


class BoundedFeed:
    """One viewer's queue: one thread reads it, the fan-out's thread writes it and never waits.

    ``lagging`` is a count of losses against a count of losses made good. ``caught_up`` makes good
    only those known when ``lagging`` was seen, so a loss during the read of the log is not forgotten.
    """

    def __init__(self, job: str, *, size: int, complete: bool):
        self.job = job
        self._size = size
        self._events: deque[StreamEvent] = deque()
        self._changed = threading.Condition()
        self._losses = 0 if complete else 1
        self._repaired = 0
        self._seen: int | None = None

    def get(self, timeout: float) -> StreamEvent | None:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._behind, timeout)
            if self._behind or not self._events:
                return None
            return self._events.popleft()

    @property
    def lagging(self) -> bool:
        with self._changed:
            if self._behind and self._seen is None:
                self._seen = self._losses
            return self._behind

    def caught_up(self) -> None:
        with self._changed:
            if self._seen is not None:
                self._repaired, self._seen = self._seen, None

    def put(self, event: StreamEvent) -> None:
        with self._changed:
            if len(self._events) < self._size:
                self._events.append(event)
            else:
                self._events.clear()  # the log has them all
                self._losses += 1
            self._changed.notify_all()

    def mark_lagging(self) -> None:
        with self._changed:
            self._losses += 1
            self._changed.notify_all()

    @property
    def _behind(self) -> bool:
        return self._losses > self._repaired


class FeedTable:
    """Open feeds by job. Empty jobs leave no entry behind."""

    def __init__(self) -> None:
        self._feeds: dict[str, tuple[BoundedFeed, ...]] = {}  # tuples: delivery iterates without the lock
        self._lock = threading.Lock()
        self._complete = False

    def open(self, job: str) -> BoundedFeed:
        with self._lock:
            feed = BoundedFeed(job, size=FEED_EVENTS, complete=self._complete)
            self._feeds[job] = (*self._feeds.get(job, ()), feed)
            return feed

    def close(self, feed: BoundedFeed) -> None:
        """Closing twice is harmless."""
        with self._lock:
            rest = tuple(other for other in self._feeds.get(feed.job, ()) if other is not feed)
            if rest:
                self._feeds[feed.job] = rest
            else:
                self._feeds.pop(feed.job, None)

    def of(self, job: str) -> tuple[BoundedFeed, ...]:
        return self._feeds.get(job, ())

    def subscribed(self) -> None:
        """From now on every event comes here; what was published before may have been missed."""
        with self._lock:
            self._complete = True
            feeds = [feed for own in self._feeds.values() for feed in own]
        for feed in feeds:
            feed.mark_lagging()

    def lost(self) -> None:
        """Nothing comes until the next ``subscribed``: feeds opened meanwhile start behind."""
        with self._lock:
            self._complete = False

    @property
    def complete(self) -> bool:
        """Whether every event comes here now, as far as is known."""
        return self._complete

    @property
    def jobs(self) -> int:
        """Jobs with viewers."""
        return len(self._feeds)
