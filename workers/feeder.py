"""Standard and bulk jobs are rows first; the feeder keeps a short part of them at the broker.

What waits in Redis cannot be reordered any more, so only ``bound`` jobs per queue are published
and unclaimed at a time.
"""

import threading
from collections import Counter

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import Unavailable
from promptmill.core.jobs import QueueName
from promptmill.core.logs import get_logger
from promptmill.core.ports import JobQueue, JobStore

GAP_S = 0.05  # between two feeds of a queue that were nudged

log = get_logger(__name__)


class Feeder:
    """Its thread starts with the first nudge, so that it lives in the process that nudges, not in
    one that forked it."""

    def __init__(self, store: JobStore, queue: JobQueue, bound: int, clock: Clock = SYSTEM_CLOCK):
        self._store = store
        self._queue = queue
        self._bound = bound
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[QueueName, float] = {}  # nudged -> when to feed
        self._fed_at: dict[QueueName, float] = {}  # fed within the last GAP_S
        self._taken: Counter[QueueName] = Counter()  # finished here since the last nudge
        self._closing = False
        self._thread: threading.Thread | None = None

    def feed(self, queue: QueueName) -> int:
        """Publish and send what the bound leaves room for; the number of jobs. Raises Unavailable."""
        jobs = self._store.feed(queue, self._bound)
        self._queue.send(jobs)
        return len(jobs)

    def nudge(self, queue: QueueName) -> None:
        """Feed soon, on another thread: at once, or 50 ms after the last time."""
        with self._changed:
            if self._closing or queue in self._due:
                return
            now = self._clock.monotonic()
            self._fed_at = {name: at for name, at in self._fed_at.items() if at + GAP_S > now}
            self._due[queue] = max(now, self._fed_at.get(queue, now - GAP_S) + GAP_S)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="feeder", daemon=True)
                self._thread.start()
            self._changed.notify()

    def finished(self, queue: QueueName) -> None:
        """A job of the queue is done. Once half the bound is, fewer than half are likely published."""
        with self._changed:
            self._taken[queue] += 1
            if 2 * self._taken[queue] < self._bound:
                return
            del self._taken[queue]
        self.nudge(queue)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _loop(self) -> None:
        while (queue := self._next()) is not None:
            try:
                self.feed(queue)
            except Unavailable as error:  # the tick feeds it
                log.warning("feed unavailable", queue=str(queue), reason=error.message)
            except Exception:
                log.exception("feed failed", queue=str(queue))

    def _next(self) -> QueueName | None:
        """Wait for the queue that is due first; None when closed."""
        with self._changed:
            while not self._closing:
                now = self._clock.monotonic()
                queue = min(self._due, key=self._due.__getitem__, default=None)
                if queue is not None and self._due[queue] <= now:
                    del self._due[queue]
                    self._fed_at[queue] = now
                    return queue
                self._changed.wait(None if queue is None else self._due[queue] - now)
            return None
