"""Alembic runs this file. The connection, and with it the transaction, is the caller's (storage/migrate.py)."""

from alembic import context

from storage.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite can too, once the driver does not begin transactions by itself
    render_as_batch=True,  # SQLite cannot alter a column in place
)
with context.begin_transaction():
    context.run_migrations()
