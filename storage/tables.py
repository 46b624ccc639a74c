"""The SQL tables, and the conditions that their partial indexes know.

``jobs`` holds state only: a heartbeat or a claim rewrites the row, and the payload beside it would
be rewritten too. Payloads lie in ``job_data``. JSON is dumped with ``\\uXXXX`` escapes into TEXT
columns, so that U+0000 and lone surrogates come back the same from SQLite and PostgreSQL.

Clocks: ``lease_until``, ``fed_at`` and ``publish_due`` are seconds of the lease clock, all other
times are UNIX seconds.

A row's way through the broker: ``fed_at`` NULL = the row waits in SQL; set = a message with its id was
sent then (it is *published*), and if the row is still queued at ``publish_due`` the sweep asks
whether that message is lost. A claimed row keeps its ``fed_at``: it shows how far its queue's list
was read, since lists are first in, first out.
"""

import sqlalchemy as sa

SCHEMA_VERSION = "0001"  # the newest revision under migrations/versions

metadata = sa.MetaData()

# Literals, not parameters: a planner uses a partial index only for a condition that it can read.
QUEUED, RUNNING, CANCELLED = (sa.literal_column(f"'{status}'", sa.Text()) for status in ("queued", "running", "cancelled"))

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),  # sorts by time of creation
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("queue", sa.Text, nullable=False),  # "<priority>.<model>", one column to group and compare
    sa.Column("priority", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("model_revision", sa.Text, nullable=False),
    sa.Column("cache", sa.Text, nullable=False),  # hit, miss, off
    sa.Column("attempt", sa.Integer, nullable=False),  # the fence: counts claims, never falls
    sa.Column("losses", sa.Integer, nullable=False),  # workers lost under the job
    sa.Column("worker", sa.Text),  # who holds or held it, unique per process start
    sa.Column("node", sa.Text),  # the worker's address for control commands
    sa.Column("lease_until", sa.Double),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    sa.Column("fed_at", sa.Double),
    sa.Column("publish_due", sa.Double),
    sa.Column("resends", sa.Integer, nullable=False),  # messages lost since the row was last fed
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double),  # of the first claim
    sa.Column("finished_at", sa.Double),
    sa.Column("timings", sa.Text),  # JSON, comes with the finish
    sa.Column("error", sa.Text),  # JSON
    sa.Column("batch_id", sa.Text),
    sqlite_with_rowid=False,
)

job_data = sa.Table(
    "job_data",
    metadata,
    sa.Column("id", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("request", sa.Text, nullable=False),  # JSON, as the client sent it
    sa.Column("spec", sa.Text, nullable=False),  # JSON, as the engine needs it
    sa.Column("metadata", sa.Text, nullable=False),  # JSON
    sa.Column("outcome", sa.Text),  # JSON, result and usage
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("route", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("body_hash", sa.Text, nullable=False),
    sa.Column("job_id", sa.Text, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
)

results_cache = sa.Table(
    "results_cache",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("outcome", sa.Text, nullable=False),  # JSON
    sa.Column("bytes", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("used_at", sa.Double, nullable=False),
)

WAITING = sa.and_(jobs.c.status == QUEUED, jobs.c.fed_at.is_(None))
PUBLISHED = sa.and_(jobs.c.status == QUEUED, jobs.c.fed_at.is_not(None))
CLAIMED = sa.and_(jobs.c.status != QUEUED, jobs.c.fed_at.is_not(None))
HELD = jobs.c.status == RUNNING


def _index(name: str, *columns: sa.Column[str] | sa.Column[float], where: sa.ColumnElement[bool] | None = None) -> None:
    sa.Index(name, *columns, sqlite_where=where, postgresql_where=where)


_index("jobs_list", jobs.c.tenant, jobs.c.id)
_index("jobs_list_status", jobs.c.tenant, jobs.c.status, jobs.c.id)
_index("jobs_list_batch", jobs.c.batch_id, jobs.c.id, where=jobs.c.batch_id.is_not(None))
_index("jobs_waiting", jobs.c.queue, jobs.c.id, where=WAITING)
_index("jobs_published", jobs.c.queue, jobs.c.fed_at, where=PUBLISHED)
_index("jobs_claimed", jobs.c.queue, jobs.c.fed_at, where=CLAIMED)
_index("jobs_running", jobs.c.id, where=HELD)
_index("idempotency_expiry", idempotency.c.expires_at)
_index("results_cache_age", results_cache.c.used_at)
