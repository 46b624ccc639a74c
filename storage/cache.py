"""The result cache: durable in SQL, hot in Redis. A cache never fails a request, so get and put never raise."""

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import Unavailable
from promptmill.core.jobs import Outcome
from promptmill.core.logs import get_logger
from storage import keys
from storage.db import Database
from storage.hot import HotCache
from storage.tables import results_cache as table

log = get_logger(__name__)

CHUNK_ROWS = 1000  # per commit while evicting: short locks
TOUCH_SECONDS = 60.0  # ``used_at`` is no finer than this, so that few hits write


class SqlResultCache:
    """Bounds: ``max_bytes`` of stored JSON in SQL (0 = no cache), ``max_age_seconds`` since creation,
    ``hot_seconds`` in Redis. An entry is "<created_at> <JSON>" there, so that its age is known."""

    def __init__(self, db: Database, url: str, *, max_bytes: int, max_age_seconds: float, hot_seconds: float, clock: Clock = SYSTEM_CLOCK):
        self._db = db
        self._hot = HotCache(url, clock=clock)
        self._max_bytes = max_bytes
        self._max_age = max_age_seconds
        self._hot_seconds = hot_seconds
        self._clock = clock
        self._warned = False

    def get(self, tenant: str, key: str) -> Outcome | None:
        if not self._max_bytes:
            return None
        now = self._clock.time()
        entry = self._from_redis(tenant, key) or self._from_sql(tenant, key, now)
        if entry is None or entry[0] + self._max_age <= now:
            return None
        try:
            return Outcome.from_json(json.loads(entry[1]))
        except (ValueError, KeyError, TypeError):  # of another version of this program
            return None

    def put(self, tenant: str, key: str, outcome: Outcome) -> None:
        text = stored(outcome)
        if len(text) > self._max_bytes:
            return
        now = self._clock.time()
        row = {"tenant": tenant, "key": key, "outcome": text, "bytes": len(text), "created_at": now, "used_at": now}
        insert: Any = (postgresql if self._db.postgres else sqlite).insert(table).values(row)
        changes = {name: insert.excluded[name] for name in ("outcome", "bytes", "created_at", "used_at")}
        try:
            with self._db.write() as connection:
                connection.execute(insert.on_conflict_do_update(index_elements=["tenant", "key"], set_=changes))
            self._warned = False
        except (Unavailable, SQLAlchemyError) as error:
            self._warn(error)
        self._warm(tenant, key, now, text)

    def evict(self) -> int:
        """Over age first, then least recently used over the byte bound. Raises Unavailable."""
        dropped = 0
        old = table.c.created_at <= self._clock.time() - self._max_age
        while victims := self._oldest(old):
            dropped += self._drop([(tenant, key) for tenant, key, _ in victims])
        with self._db.read() as connection:
            excess = connection.execute(sa.select(sa.func.coalesce(sa.func.sum(table.c.bytes), 0))).scalar_one() - self._max_bytes
        while excess > 0 and (rows := self._oldest(sa.true())):
            names = []
            for tenant, key, size in rows:
                if excess <= 0:
                    break
                names.append((tenant, key))
                excess -= size
            dropped += self._drop(names)
        return dropped

    def close(self) -> None:
        self._hot.close()

    def _from_redis(self, tenant: str, key: str) -> tuple[float, str] | None:
        created, _, text = (self._hot.get(keys.cached(tenant, key)) or "").partition(" ")
        try:
            return (float(created), text) if text else None
        except ValueError:
            return None

    def _from_sql(self, tenant: str, key: str, now: float) -> tuple[float, str] | None:
        own = sa.and_(table.c.tenant == tenant, table.c.key == key)
        try:
            with self._db.read() as connection:
                row = connection.execute(sa.select(table.c.created_at, table.c.outcome, table.c.used_at).where(own)).first()
            self._warned = False
            if row is None:
                return None
            self._warm(tenant, key, row.created_at, row.outcome)
            if row.used_at <= now - TOUCH_SECONDS:
                self._touch(own, now)
            return row.created_at, row.outcome
        except (Unavailable, SQLAlchemyError) as error:
            self._warn(error)
            return None

    def _touch(self, own: sa.ColumnElement[bool], now: float) -> None:
        try:
            with self._db.write() as connection:
                connection.execute(sa.update(table).where(own).values(used_at=now))
        except (Unavailable, SQLAlchemyError) as error:  # the answer is known all the same
            self._warn(error)

    def _warm(self, tenant: str, key: str, created_at: float, text: str) -> None:
        left = created_at + self._max_age - self._clock.time()
        self._hot.put(keys.cached(tenant, key), f"{created_at!r} {text}", min(self._hot_seconds, left))

    def _oldest(self, condition: sa.ColumnElement[bool]) -> list[tuple[str, str, int]]:
        query = sa.select(table.c.tenant, table.c.key, table.c.bytes).where(condition).order_by(table.c.used_at).limit(CHUNK_ROWS)
        with self._db.read() as connection:
            return [(row.tenant, row.key, row.bytes) for row in connection.execute(query)]

    def _drop(self, names: list[tuple[str, str]]) -> int:
        with self._db.write() as connection:
            gone = connection.execute(sa.delete(table).where(sa.tuple_(table.c.tenant, table.c.key).in_(names))).rowcount
        self._hot.drop([keys.cached(tenant, key) for tenant, key in names])
        return gone

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the result cache works without SQL", error=type(error).__name__)


def stored(outcome: Outcome) -> str:
    """JSON in ASCII: any text of a model, and a length in characters that is its length in bytes."""
    return json.dumps(outcome.to_json(), separators=(",", ":"), ensure_ascii=True)
