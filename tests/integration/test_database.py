"""Database: pools, sessions, and what becomes Unavailable."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from promptmill.core.errors import ConfigError, Unavailable
from storage import db
from storage.db import Database, lease_now, parse_url
from storage.jobs import SqlJobStore
from storage.tables import jobs
from tests.support.clock import FakeClock
from tests.support.factories import make_job
from tests.support.servers import free_port


@pytest.fixture
def sqlite(sqlite_url: str) -> Iterator[Database]:
    database = Database.connect(sqlite_url)
    yield database
    database.close()


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Database]:
    database = Database.connect(postgres_url)
    yield database
    database.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://root@localhost/x", "no url", ""])
def test_a_url_that_cannot_be_served_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError):
        Database.connect(url)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_a_postgresql_url_uses_psycopg_3(scheme: str) -> None:
    assert parse_url(f"{scheme}://me:secret@db:5433/x?sslmode=require").render_as_string(hide_password=False) == (
        "postgresql+psycopg://me:secret@db:5433/x?sslmode=require"
    )


# -- SQLite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "level"), [("normal", 1), ("full", 2)])
def test_sqlite_connections_are_set_up_for_durable_concurrent_use(sqlite_url: str, setting: str, level: int) -> None:
    database = Database.connect(sqlite_url, sqlite_synchronous=setting)
    with database.write() as writer, database.read() as reader:
        values = [writer.execute(sa.text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous", "foreign_keys")]
        assert values == ["wal", level, 1]
        assert reader.execute(sa.text("PRAGMA busy_timeout")).scalar() == 5000
    with pytest.raises(Unavailable, match="readonly"), database.read() as reader:
        reader.execute(sa.text("DELETE FROM jobs"))
    database.close()


def test_sqlite_s_lease_clock_is_the_clock_given(sqlite_url: str) -> None:
    clock = FakeClock(monotonic=123.5)
    database = Database.connect(sqlite_url, clock=clock)
    with database.read() as connection:
        assert connection.execute(sa.select(lease_now())).scalar() == 123.5
    database.close()


def test_sqlite_readers_do_not_wait_for_the_writer(sqlite: Database) -> None:
    store = SqlJobStore(sqlite)
    new = make_job()
    store.submit([new])
    with sqlite.write() as connection:
        connection.execute(sa.update(jobs).values(losses=7))
        job = store.get(new.id)
        assert job is not None and job.losses == 0
    job = store.get(new.id)
    assert job is not None and job.losses == 7


def test_a_write_lock_held_by_another_process_is_unavailable(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "WAIT_SECONDS", 0.05)
    other, mine = Database.connect(sqlite_url), Database.connect(sqlite_url)
    store = SqlJobStore(mine)
    with other.write(), pytest.raises(Unavailable, match="locked"):
        store.submit([make_job()])
    assert len(store.submit([make_job()])) == 1, "and usable again after it"
    other.close()
    mine.close()


def test_a_busy_writer_of_the_same_process_is_unavailable(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "WAIT_SECONDS", 0.05)
    database = Database.connect(sqlite_url)
    with database.write(), pytest.raises(Unavailable, match="busy"), database.write():
        pass
    database.close()


def test_an_sqlite_file_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    store = SqlJobStore(Database.connect(f"sqlite:///{tmp_path}/missing/x.db"))
    for call in (store.check, store.recover, lambda: store.get("job_1"), lambda: store.submit([make_job()])):
        with pytest.raises(Unavailable):
            call()
    store.close()


def test_a_block_that_raises_writes_nothing(sqlite: Database) -> None:
    store = SqlJobStore(sqlite)
    new = make_job()
    store.submit([new])
    with pytest.raises(ZeroDivisionError), sqlite.write() as connection:
        connection.execute(sa.update(jobs).values(losses=7))
        raise ZeroDivisionError
    job = store.get(new.id)
    assert job is not None and job.losses == 0


def test_a_mistake_of_ours_is_not_called_an_outage(sqlite: Database) -> None:
    store = SqlJobStore(sqlite)
    new = make_job()
    store.submit([new])
    with pytest.raises(sa.exc.IntegrityError):
        store.submit([new])


# -- PostgreSQL -----------------------------------------------------------------------------------


def test_postgresql_sessions_give_up_in_time(postgres: Database) -> None:
    with postgres.read() as connection:
        for name, value in db.POSTGRES_SESSION.items():
            assert connection.execute(sa.text(f"SHOW {name}")).scalar() == value


def test_options_of_the_url_are_kept(postgres_url: str) -> None:
    url = sa.make_url(postgres_url).update_query_dict({"options": "-c application_name=mill"})
    database = Database.connect(url.render_as_string(hide_password=False))
    with database.read() as connection:
        assert connection.execute(sa.text("SHOW application_name")).scalar() == "mill"
        assert connection.execute(sa.text("SHOW lock_timeout")).scalar() == "2s"
    database.close()


def test_a_server_that_is_away_is_unavailable_without_its_address() -> None:
    store = SqlJobStore(Database.connect(f"postgresql://someone:secret@127.0.0.1:{free_port()}/x"))
    with pytest.raises(Unavailable) as caught:
        store.check()
    assert "someone" not in caught.value.message and "secret" not in caught.value.message
    store.close()


def test_a_row_locked_by_another_session_is_unavailable_not_a_hang(postgres_url: str, postgres: Database) -> None:
    store = SqlJobStore(postgres)
    new = make_job()
    store.submit([new])
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as other:
        other.execute("SELECT 1 FROM jobs FOR UPDATE")
        with pytest.raises(Unavailable, match="LockNotAvailable"):
            store.cancel(new.id)
    job = store.cancel(new.id)
    assert job is not None and job.status == "cancelled"


def test_the_pool_survives_a_server_that_drops_its_sessions(postgres_url: str, postgres: Database) -> None:
    store = SqlJobStore(postgres)
    new = make_job()
    store.submit([new])
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as admin:
        drop = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        admin.execute(drop)
        assert store.get(new.id) is not None, "an idle session is replaced before its use"
        with pytest.raises(Unavailable), postgres.write() as connection:
            admin.execute(drop)
            connection.execute(sa.text("SELECT 1"))
    assert store.get(new.id) is not None


def test_hundreds_of_threads_share_the_pool(postgres: Database) -> None:
    store = SqlJobStore(postgres)
    store.submit([make_job()])
    start, failed = threading.Barrier(200), []

    def read() -> None:
        start.wait()
        try:
            store.page()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
