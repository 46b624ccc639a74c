"""How this project talks to Redis or Valkey: one factory with timeouts, and one mapping of errors."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import DataError, RedisError
from redis.retry import Retry

from promptmill.core.errors import ConfigError, Unavailable

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
HEALTH_SECONDS = 10  # a connection idle for so long is pinged before use


def connect(url: str, *, connect_seconds: float = CONNECT_SECONDS, answer_seconds: float = ANSWER_SECONDS) -> Redis:
    """A client with a pool; it opens no connection yet. Raises ConfigError for a bad URL.

    It never sends a command twice by itself: redis-py's default is to retry (ten times in 8.1),
    and a script that ran although its answer was lost would run again. Who calls decides on that.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": connect_seconds,
        "socket_timeout": answer_seconds,
        "health_check_interval": HEALTH_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
    }
    if not url.startswith("unix:"):
        options |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    try:
        return Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"bad Redis URL: {error}") from None


def _keepalive() -> dict[int, int]:
    """Notice a peer that is gone without a word within about 25 s; kernels differ in what they offer."""
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn the errors of Redis into Unavailable. ``what`` names the use, such as "token log".

    The message is public, and the texts of Redis may name hosts: they stay in the cause.
    """
    try:
        yield
    except DataError:  # a value of a type that redis-py cannot send: our own fault
        raise
    except (RedisError, OSError) as error:
        raise Unavailable(f"Redis cannot be used for the {what} now ({type(error).__name__})") from error
