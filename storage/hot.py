"""The hot half of the result cache: texts in Redis. It never raises; without Redis it is just cold."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import RedisError, ResponseError

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.logs import get_logger
from storage.redis_client import connect

log = get_logger(__name__)
T = TypeVar("T")

PAUSE_SECONDS = 5.0  # without Redis after an error, so that an outage costs one request its timeout, not each
LOOK_SECONDS = 5.0  # between two looks at Redis's memory
FULL = 0.7  # of maxmemory: Redis is shared with queues and logs, which must not meet the limit


class HotCache:
    def __init__(self, url: str, *, clock: Clock = SYSTEM_CLOCK):
        self._redis = connect(url, connect_seconds=1.0, answer_seconds=1.0)
        self._clock = clock
        self._down_until = 0.0
        self._warned = False
        self._room = True
        self._looked_at = float("-inf")

    def get(self, key: str) -> str | None:
        value: Any = self._try(lambda: self._redis.get(key), None)
        return value.decode() if value is not None else None

    def put(self, key: str, text: str, seconds: float) -> None:
        if seconds > 0 and self._has_room():
            self._try(lambda: self._redis.set(key, text, px=max(1, int(seconds * 1000))), None)

    def drop(self, names: Sequence[str]) -> None:
        if names:
            self._try(lambda: self._redis.delete(*names), None)

    def close(self) -> None:
        self._redis.close()

    def _has_room(self) -> bool:
        now = self._clock.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._room = self._try(self._look, True)
        return self._room

    def _look(self) -> bool:
        try:
            memory: Any = self._redis.info("memory")
        except ResponseError:  # fakeredis and some hosted servers have no INFO
            return True
        limit = memory.get("maxmemory", 0)
        return not limit or memory["used_memory"] < FULL * limit

    def _try(self, command: Callable[[], T], otherwise: T) -> T:
        """Two threads may race on the marks here; the worst is a second warning."""
        if self._clock.monotonic() < self._down_until:
            return otherwise
        try:
            answer = command()
        except (RedisError, OSError) as error:
            self._down_until = self._clock.monotonic() + PAUSE_SECONDS
            if not self._warned:
                self._warned = True
                log.warning("the result cache works without Redis", error=type(error).__name__)
            return otherwise
        self._warned = False
        return answer
