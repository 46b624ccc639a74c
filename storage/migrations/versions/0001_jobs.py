"""Jobs, their data, idempotency keys and the result cache."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

WAITING = sa.text("status = 'queued' AND fed_at IS NULL")
PUBLISHED = sa.text("status = 'queued' AND fed_at IS NOT NULL")
CLAIMED = sa.text("status != 'queued' AND fed_at IS NOT NULL")
HELD = sa.text("status = 'running'")
IN_BATCH = sa.text("batch_id IS NOT NULL")


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("priority", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("model_revision", sa.Text, nullable=False),
        sa.Column("cache", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("losses", sa.Integer, nullable=False),
        sa.Column("worker", sa.Text),
        sa.Column("node", sa.Text),
        sa.Column("lease_until", sa.Double),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("fed_at", sa.Double),
        sa.Column("publish_due", sa.Double),
        sa.Column("resends", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("timings", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("batch_id", sa.Text),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job_data",
        sa.Column("id", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text),
    )
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("route", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("body_hash", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )
    op.create_table(
        "results_cache",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False),
    )
    op.create_index("jobs_list", "jobs", ["tenant", "id"])
    op.create_index("jobs_list_status", "jobs", ["tenant", "status", "id"])
    op.create_index("jobs_list_batch", "jobs", ["batch_id", "id"], sqlite_where=IN_BATCH, postgresql_where=IN_BATCH)
    op.create_index("jobs_waiting", "jobs", ["queue", "id"], sqlite_where=WAITING, postgresql_where=WAITING)
    op.create_index("jobs_published", "jobs", ["queue", "fed_at"], sqlite_where=PUBLISHED, postgresql_where=PUBLISHED)
    op.create_index("jobs_claimed", "jobs", ["queue", "fed_at"], sqlite_where=CLAIMED, postgresql_where=CLAIMED)
    op.create_index("jobs_running", "jobs", ["id"], sqlite_where=HELD, postgresql_where=HELD)
    op.create_index("idempotency_expiry", "idempotency", ["expires_at"])
    op.create_index("results_cache_age", "results_cache", ["used_at"])


def downgrade() -> None:
    op.drop_table("results_cache")
    op.drop_table("idempotency")
    op.drop_table("job_data")
    op.drop_table("jobs")
