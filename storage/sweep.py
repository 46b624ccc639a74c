"""The verbs of maintenance: feed queues, take back expired leases, find lost messages, count.

They form the half of SqlJobStore (storage/jobs.py) that no request waits for.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.jobs import Job, JobRef, QueueName
from promptmill.core.ports import Depth
from storage.db import Database, greatest, lease_now
from storage.rows import JOB_COLUMNS, with_data
from storage.tables import CANCELLED, CLAIMED, HELD, PUBLISHED, QUEUED, WAITING, jobs

RESEND_SECONDS = 5.0  # a message is given so long before anyone asks for it; doubles with each resend
RESEND_MOST = 3600.0
OVERTAKEN_SECONDS = 5.0  # a message is lost when one sent so much later was read already
SANE_LEASES = 10  # a lease further ahead than so many was granted before the host's last boot

_NOW = lease_now()


class SqlSweep:
    """Made by SqlJobStore. ``lease_seconds``: life of a claim without a heartbeat."""

    def __init__(self, db: Database, *, lease_seconds: float = 8.0, clock: Clock = SYSTEM_CLOCK):
        self._db = db
        self._lease = lease_seconds
        self._clock = clock

    def feed(self, queue: QueueName, bound: int) -> list[JobRef]:
        name = str(queue)
        with self._db.write() as connection:
            if self._db.postgres:
                # Feeders of one queue take turns, else each would fill the same room. In a statement
                # of its own: the count below must see what the one before us has committed.
                key = sa.func.hashtextextended(f"promptmill.feed.{name}", 0)
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
            some = sa.select(sa.literal(1)).where(PUBLISHED, jobs.c.queue == name).limit(bound).subquery()
            room = bound - connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()
            if room <= 0:
                return []
            picked = self._pick(WAITING, jobs.c.queue == name, limit=room)
            fed = {"fed_at": _NOW, "publish_due": _NOW + RESEND_SECONDS, "resends": 0}
            statement = sa.update(jobs).where(jobs.c.id == picked.c.id).values(fed).returning(jobs.c.id)
            return [JobRef(id, queue) for id in sorted(connection.execute(statement).scalars())]

    def feedable(self) -> list[QueueName]:
        with self._db.read() as connection:
            return self._queues(connection, WAITING)

    def recover(self, limit: int = 1000) -> list[Job]:
        expired = sa.or_(jobs.c.lease_until < _NOW, jobs.c.lease_until > _NOW + SANE_LEASES * self._lease)
        picked = self._pick(HELD, expired, limit=limit)
        values = {
            **handed_back(self._clock.time(), due_in=RESEND_SECONDS),
            "worker": None,
            "node": None,
            "losses": jobs.c.losses + 1,
            # Terminal without the owner: a higher attempt shuts a stale worker out of the log.
            "attempt": sa.case((jobs.c.cancel_requested, jobs.c.attempt + 1), else_=jobs.c.attempt),
        }
        statement = sa.update(jobs).where(jobs.c.id == picked.c.id).values(values).returning(*JOB_COLUMNS)
        with self._db.write() as connection:
            return with_data(connection, connection.execute(statement).all())

    def lost(self, empty: Collection[QueueName], limit: int = 1000) -> list[JobRef]:
        bare = {str(queue) for queue in empty}
        found: list[JobRef] = []
        with self._db.write() as connection:
            for queue in self._queues(connection, sa.and_(PUBLISHED, _due())):
                if len(found) >= limit:
                    break
                # A feed of an earlier boot (fed_at > now) comes before all feeds of this one.
                of_queue = jobs.c.queue == str(queue)
                read = sa.select(sa.func.max(jobs.c.fed_at)).where(of_queue, CLAIMED, jobs.c.fed_at <= _NOW)
                newest = connection.execute(read).scalar_one()
                if str(queue) in bare:
                    overtaken: sa.ColumnElement[bool] = sa.true()
                elif newest is None:
                    continue
                else:
                    overtaken = sa.or_(jobs.c.fed_at <= newest - OVERTAKEN_SECONDS, jobs.c.fed_at > _NOW)
                picked = self._pick(PUBLISHED, of_queue, _due(), overtaken, limit=limit - len(found))
                statement = sa.update(jobs).where(jobs.c.id == picked.c.id).values(_resent()).returning(jobs.c.id)
                found += [JobRef(id, queue) for id in sorted(connection.execute(statement).scalars())]
        return found

    def published(self) -> list[QueueName]:
        with self._db.read() as connection:
            return self._queues(connection, sa.and_(PUBLISHED, _due()))

    def depths(self) -> list[Depth]:
        def part(kind: str, condition: sa.ColumnElement[bool]) -> "sa.Select[Any]":
            oldest = sa.func.min(jobs.c.created_at).label("oldest")
            counted = (jobs.c.queue, sa.literal_column(f"'{kind}'", sa.Text()).label("kind"), sa.func.count().label("n"), oldest)
            return sa.select(*counted).where(condition).group_by(jobs.c.queue)

        parts = sa.union_all(part("waiting", WAITING), part("published", PUBLISHED), part("running", HELD))
        with self._db.read() as connection:
            rows = connection.execute(parts).all()
        counts = {(row.queue, row.kind): row for row in rows}
        now = self._clock.time()
        depths = []
        for name in sorted({row.queue for row in rows}):
            waiting, published, running = (counts.get((name, kind)) for kind in ("waiting", "published", "running"))
            queued = [row for row in (waiting, published) if row is not None]
            oldest = min((row.oldest for row in queued), default=now)
            sizes = (sum(row.n for row in queued), published.n if published else 0, running.n if running else 0)
            depths.append(Depth(_queue(name), *sizes, oldest_s=max(0.0, now - oldest)))
        return depths

    def _pick(self, *conditions: sa.ColumnElement[bool], limit: int) -> sa.CTE:
        """Ids of rows that nobody else is at, locked in id order (which matters on PostgreSQL alone)."""
        select = sa.select(jobs.c.id).where(*conditions).order_by(jobs.c.id).limit(limit)
        return select.with_for_update(skip_locked=True, key_share=True, of=jobs).cte("picked")

    def _queues(self, connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[QueueName]:
        """The queues of the rows that meet the condition: one jump in the index per queue, not a walk
        over every row."""

        def first(*more: sa.ColumnElement[bool]) -> sa.ScalarSelect[str]:
            select = sa.select(jobs.c.queue).where(condition, *more).order_by(jobs.c.queue).limit(1)
            return select.correlate_except(jobs).scalar_subquery()

        names = sa.select(first().label("queue")).cte("names", recursive=True)
        names = names.union_all(sa.select(first(jobs.c.queue > names.c.queue)).where(names.c.queue.is_not(None)))
        rows = connection.execute(sa.select(names.c.queue).where(names.c.queue.is_not(None)))
        return [_queue(name) for name in rows.scalars()]


def handed_back(wall: float, *, due_in: float) -> dict[str, Any]:
    """running -> queued and published anew, or -> cancelled when the flag is set."""
    flag = jobs.c.cancel_requested
    finished = greatest(sa.func.coalesce(jobs.c.started_at, jobs.c.created_at), sa.literal(wall, sa.Double()))
    return {
        "status": sa.case((flag, CANCELLED), else_=QUEUED),
        "lease_until": None,
        "finished_at": sa.case((flag, finished), else_=None),
        "fed_at": sa.case((flag, jobs.c.fed_at), else_=_NOW),
        "publish_due": sa.case((flag, None), else_=_NOW + due_in),
        "resends": 0,
    }


def _due() -> sa.ColumnElement[bool]:
    # Sent in the future: times of an earlier boot.
    return sa.or_(jobs.c.publish_due < _NOW, jobs.c.fed_at > _NOW)


def _resent() -> dict[str, Any]:
    """Due again after 5 s x 2^n, at most an hour; n counts the resends, this one included."""
    doublings = jobs.c.resends + 1
    wait = sa.case((doublings >= 10, RESEND_MOST), else_=RESEND_SECONDS * sa.literal_column("1").bitwise_lshift(doublings))
    return {"fed_at": _NOW, "publish_due": _NOW + wait, "resends": doublings}


def _queue(name: str) -> QueueName:
    queue = QueueName.parse(name)
    assert queue is not None, f"{name} is not the name of a queue"
    return queue
