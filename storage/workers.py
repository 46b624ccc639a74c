"""Who serves what now: every worker announces itself in Redis and vanishes when it stops doing so.

The list of nodes is a sorted set by the time at which a node counts as gone, on the server's clock,
so that reading it needs no scan of the keyspace and no two hosts need the same time.
"""

import json
from dataclasses import asdict
from typing import Any

from promptmill.core.ports import WorkerInfo
from storage import keys
from storage.redis_client import connect, reaching

LIFE_SECONDS = 10


class RedisWorkerDirectory:
    def __init__(self, url: str):
        self._redis = connect(url)

    def announce(self, info: WorkerInfo) -> None:
        with reaching("worker list"):
            pipe = self._redis.pipeline()
            pipe.set(keys.worker(info.node), json.dumps(asdict(info)), ex=LIFE_SECONDS)
            pipe.zadd(keys.WORKERS, {info.node: self._now() + LIFE_SECONDS})
            pipe.expire(keys.WORKERS, LIFE_SECONDS)
            pipe.execute()

    def withdraw(self, node: str) -> None:
        with reaching("worker list"):
            pipe = self._redis.pipeline()
            pipe.delete(keys.worker(node))
            pipe.zrem(keys.WORKERS, node)
            pipe.execute()

    def live(self) -> list[WorkerInfo]:
        """By node name."""
        with reaching("worker list"):
            pipe = self._redis.pipeline()
            pipe.zremrangebyscore(keys.WORKERS, "-inf", self._now())
            pipe.zrange(keys.WORKERS, 0, -1)
            nodes = sorted(node.decode() for node in pipe.execute()[1])
            texts: list[Any] = self._redis.mget([keys.worker(node) for node in nodes]) if nodes else []
        return [WorkerInfo(**json.loads(text)) for text in texts if text is not None]

    def _now(self) -> float:
        seconds, micros = self._redis.time()
        return float(seconds) + float(micros) / 1e6

    def close(self) -> None:
        self._redis.close()
