"""Bring a database to the newest schema. Safe when several processes do it at once."""

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from promptmill.core.errors import ConfigError
from storage.db import Database, parse_url

FOLDER = Path(__file__).parent / "migrations"
_LOCK_KEY = 0x706D_6D69_6772  # of PostgreSQL's advisory lock; any number that others do not use


def migrate(url: str) -> None:
    """Create what is missing; the whole change is one transaction under one lock.

    Makes the folder of an SQLite file. Raises Unavailable (cannot be reached, locked, disk full) or
    ConfigError (bad URL, folder cannot be made).
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        _make_folder(Path(parsed.database or "").parent)
    database = Database.connect(url)
    try:
        with database.write() as connection:
            if database.postgres:
                connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
                connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
            # SQLite: the transaction began IMMEDIATE, so it is the lock.
            command.upgrade(alembic_config(connection), "head")
    finally:
        database.close()


def alembic_config(connection: sa.Connection | None = None) -> Config:
    """Alembic without an ini file; ``connection`` is handed to migrations/env.py."""
    config = Config()
    # Config interpolates %; a folder's name may hold one.
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder} for the database: {error.strerror}") from error
