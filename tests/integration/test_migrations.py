"""Migrations on real databases: from nothing, twice, by two processes at once, and equal to the tables."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from promptmill.core.errors import ConfigError, Unavailable
from storage.db import Database
from storage.jobs import SqlJobStore
from storage.migrate import alembic_config, migrate
from storage.tables import SCHEMA_VERSION, metadata
from tests.support.factories import make_job


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/a folder/100%/promptmill.db"
    url: str = request.getfixturevalue("empty_postgres_url")
    return url


@pytest.fixture
def database(empty_url: str) -> Iterator[Database]:
    database = Database.connect(empty_url)
    yield database
    database.close()


def test_the_newest_revision_is_the_one_that_stores_ask_for() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [SCHEMA_VERSION]


def test_migrating_twice_keeps_the_data(empty_url: str, database: Database) -> None:
    migrate(empty_url)
    store = SqlJobStore(database)
    new = make_job()
    store.submit([new])
    migrate(empty_url)
    assert store.get(new.id) is not None
    store.check()


def test_two_processes_may_migrate_at_once(empty_url: str, database: Database) -> None:
    code = "import sys; from storage.migrate import migrate; migrate(sys.argv[1])"
    processes = [subprocess.Popen([sys.executable, "-c", code, empty_url], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    SqlJobStore(database).check()


def test_the_migrated_tables_are_those_of_the_code(empty_url: str, database: Database) -> None:
    migrate(empty_url)
    with database.write() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_the_migrated_indexes_have_the_conditions_of_the_code(tmp_path: Path) -> None:
    # Compared as SQLite writes them down, since alembic's comparison is blind to conditions.
    def indexes(url: str) -> dict[str, str]:
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            rows = connection.execute(sa.text("SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")).all()
        engine.dispose()
        return {name: sql.replace("jobs.", "") for name, sql in rows}

    migrated, created = f"sqlite:///{tmp_path}/migrated.db", f"sqlite:///{tmp_path}/created.db"
    migrate(migrated)
    engine = sa.create_engine(created)
    metadata.create_all(engine)
    engine.dispose()
    assert indexes(migrated) == indexes(created)


def test_going_back_leaves_nothing_behind(empty_url: str, database: Database) -> None:
    migrate(empty_url)
    with database.write() as connection:
        command.downgrade(alembic_config(connection), "base")
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]


def test_the_check_refuses_an_empty_database_and_another_schema(empty_url: str, database: Database) -> None:
    store = SqlJobStore(database)
    Path(empty_url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(Unavailable, match="promptmill migrate"):
        store.check()
    migrate(empty_url)
    with database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'older'"))
    with pytest.raises(Unavailable, match="another schema"):
        store.check()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        migrate(f"sqlite:///{tmp_path}/file/promptmill.db")
