"""Live events: one Redis subscription per process, owned by one thread, that feeds every viewer.

The thread does nothing but look a job up and put the event into bounded queues: a slow subscriber
is cut off by Redis (client-output-buffer-limit pubsub), a slow viewer only loses its own events.
A ``PubSub`` is not thread-safe (redis-py's documentation), so nobody else touches it.
"""

import threading
from typing import Any

from redis.client import PubSub
from redis.exceptions import RedisError

from promptmill.core.logs import get_logger
from promptmill.core.ports import Feed
from storage import keys
from storage.feeds import BoundedFeed, FeedTable
from storage.redis_client import connect
from storage.stream import decode

log = get_logger(__name__)

TURN_SECONDS = 0.2  # longest wait for a message: bounds ``close`` and lets redis-py ping an idle connection
BACKOFF_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0)
_PREFIX = len(keys.TOKENS)


class RedisFanOut:
    def __init__(self, url: str):
        self._redis = connect(url)
        self._feeds = FeedTable()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fan-out", daemon=True)

    def start(self) -> None:
        """Start the subscriber thread; returns at once. Viewers that come before it is subscribed start lagging."""
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._redis.close()

    def open(self, job: str) -> Feed:
        return self._feeds.open(job)

    def close_feed(self, feed: Feed) -> None:
        assert isinstance(feed, BoundedFeed)
        self._feeds.close(feed)

    def _run(self) -> None:
        failures = 0  # since the last subscription
        while not self._stop.is_set():
            try:
                self._listen()
            except Exception as error:  # of any kind: without this thread every viewer is deaf
                failures = 1 if self._feeds.complete else failures + 1
                if failures == 1:
                    foreseen = isinstance(error, RedisError | OSError)
                    log.warning("fan-out has no subscription, trying again", error=type(error).__name__, exc_info=not foreseen)
                self._feeds.lost()
                self._stop.wait(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS)) - 1])

    def _listen(self) -> None:
        """One connection's life. Redis confirms the subscription before it sends the first message."""
        pubsub: PubSub
        with self._redis.pubsub() as pubsub:  # type: ignore[no-untyped-call]
            pubsub.psubscribe(keys.TOKEN_PATTERN)
            while not self._stop.is_set():
                message = pubsub.get_message(timeout=TURN_SECONDS)
                if message is None:
                    continue
                if message["type"] == "psubscribe":  # the first, or redis-py connected again by itself
                    self._feeds.subscribed()
                elif message["type"] == "pmessage":
                    self._deliver(message)

    def _deliver(self, message: dict[str, Any]) -> None:
        feeds = self._feeds.of(message["channel"][_PREFIX:].decode(errors="replace"))
        if not feeds:  # another process's viewers; do not parse
            return
        try:
            event = decode(message["data"])
        except ValueError:  # not ours: anybody may publish
            log.warning("fan-out dropped a message that is no event", channel=message["channel"].decode(errors="replace"))
            return
        for feed in feeds:
            feed.put(event)
