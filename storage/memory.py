"""In-memory twins of the stores: for tests and for one process without servers.

They keep the same promises as the real ones and pass the same contract tests.
"""

import bisect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.events import Cursor, StreamEvent
from promptmill.core.jobs import Outcome
from promptmill.core.ports import Append, Feed, WorkerInfo
from storage.cache import stored
from storage.feeds import BoundedFeed, FeedTable
from storage.memory_jobs import MemoryJobQueue, MemoryJobStore
from storage.workers import LIFE_SECONDS

__all__ = ["MemoryFanOut", "MemoryJobQueue", "MemoryJobStore", "MemoryResultCache", "MemoryTokenStream", "MemoryWorkerDirectory"]


@dataclass(slots=True)
class _Log:
    events: list[StreamEvent] = field(default_factory=list)
    expires: float = float("inf")


class MemoryTokenStream:
    def __init__(self, *, ttl_seconds: float = 60.0, clock: Clock = SYSTEM_CLOCK):
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._logs: dict[str, _Log] = {}
        self._lock = threading.Lock()
        self._listeners: list[Callable[[StreamEvent], None]] = []

    def listen(self, listener: Callable[[StreamEvent], None]) -> None:
        """Publish to ``listener``: called in the order of the log; it must not block or call back."""
        with self._lock:
            self._listeners.append(listener)

    def append(self, events: Sequence[StreamEvent]) -> dict[str, Append]:
        verdicts: dict[str, Append] = {}
        with self._lock:
            self._expire()
            for event in events:
                if verdicts.get(event.job) is not Append.FENCED:
                    verdicts[event.job] = self._append(event)
        return verdicts

    def _append(self, event: StreamEvent) -> Append:
        log = self._logs.setdefault(event.job, _Log())
        last = log.events[-1].cursor if log.events else Cursor(0, 0)
        if event.cursor <= last:
            return Append.ACCEPTED if last.attempt == event.cursor.attempt else Append.FENCED
        log.events.append(event)
        log.expires = self._clock.monotonic() + self._ttl_seconds if event.type.terminal else float("inf")
        for listener in self._listeners:
            listener(event)
        return Append.ACCEPTED

    def read(self, job: str, after: Cursor) -> list[StreamEvent]:
        with self._lock:
            self._expire()
            log = self._logs.get(job)
            return log.events[bisect.bisect_right(log.events, after, key=lambda e: e.cursor) :] if log else []

    def last(self, job: str) -> Cursor | None:
        with self._lock:
            self._expire()
            log = self._logs.get(job)
            return log.events[-1].cursor if log and log.events else None

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for job in [job for job, log in self._logs.items() if log.expires <= now]:
            del self._logs[job]


class MemoryFanOut:
    def __init__(self, stream: MemoryTokenStream):
        self._feeds = FeedTable()
        self._stream = stream

    def start(self) -> None:
        self._stream.listen(self._deliver)
        self._feeds.subscribed()

    def close(self) -> None:
        self._feeds.lost()

    def open(self, job: str) -> Feed:
        return self._feeds.open(job)

    def close_feed(self, feed: Feed) -> None:
        assert isinstance(feed, BoundedFeed)
        self._feeds.close(feed)

    def _deliver(self, event: StreamEvent) -> None:
        for feed in self._feeds.of(event.job):
            feed.put(event)


class MemoryResultCache:
    """Bounds as of SqlResultCache; bytes are counted of the JSON that a real one would store."""

    def __init__(self, *, max_bytes: int = 256 * 1024 * 1024, max_age_seconds: float = 7 * 86400.0, clock: Clock = SYSTEM_CLOCK):
        self._max_bytes = max_bytes
        self._max_age = max_age_seconds
        self._clock = clock
        self._entries: dict[tuple[str, str], tuple[Outcome, float, int]] = {}  # least recently used first
        self._lock = threading.Lock()

    def get(self, tenant: str, key: str) -> Outcome | None:
        with self._lock:
            entry = self._entries.get((tenant, key))
            if entry is None or entry[1] + self._max_age <= self._clock.time():
                return None
            self._entries[tenant, key] = self._entries.pop((tenant, key))
            return entry[0]

    def put(self, tenant: str, key: str, outcome: Outcome) -> None:
        size = len(stored(outcome))
        if size > self._max_bytes:
            return
        with self._lock:
            self._entries.pop((tenant, key), None)
            self._entries[tenant, key] = (outcome, self._clock.time(), size)

    def evict(self) -> int:
        with self._lock:
            old = [name for name, entry in self._entries.items() if entry[1] + self._max_age <= self._clock.time()]
            for name in old:
                del self._entries[name]
            dropped, total = len(old), sum(entry[2] for entry in self._entries.values())
            while total > self._max_bytes:
                total -= self._entries.pop(next(iter(self._entries)))[2]
                dropped += 1
            return dropped


class MemoryWorkerDirectory:
    def __init__(self, *, clock: Clock = SYSTEM_CLOCK):
        self._clock = clock
        self._workers: dict[str, tuple[WorkerInfo, float]] = {}
        self._lock = threading.Lock()

    def announce(self, info: WorkerInfo) -> None:
        with self._lock:
            self._workers[info.node] = (info, self._clock.monotonic() + LIFE_SECONDS)

    def withdraw(self, node: str) -> None:
        with self._lock:
            self._workers.pop(node, None)

    def live(self) -> list[WorkerInfo]:
        now = self._clock.monotonic()
        with self._lock:
            self._workers = {node: entry for node, entry in self._workers.items() if entry[1] > now}
            return [self._workers[node][0] for node in sorted(self._workers)]
