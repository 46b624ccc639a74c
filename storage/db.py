"""One database, SQLite or PostgreSQL, behind two verbs: ``read`` and ``write``.

SQLite (one host): the writer is a pool of one connection whose transactions begin IMMEDIATE (a
deferred read-then-write fails at once when another process writes, whatever the busy timeout), and
readers are connections of their own: in WAL mode they never wait for the writer.

The *lease clock* (promptmill/core/clock.py) is asked by the statements themselves, as
``lease_now()``: PostgreSQL has its ``clock_timestamp()``; on SQLite each connection has a function
``pm_now()`` that reads this process's Clock.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import ConfigError, Unavailable

WAIT_SECONDS = 5.0  # for a free connection, for SQLite's write lock, for a connect
READERS = 16
POSTGRES_CONNECTIONS = 20  # per process; more threads than that take turns
POSTGRES_SESSION = {
    "lock_timeout": "2s",
    "statement_timeout": "5s",
    "idle_in_transaction_session_timeout": "5s",
}
TCP_USER_TIMEOUT_MS = 10_000  # a peer that vanished without a word is noticed after this
_POSTGRES_NAMES = ("postgres", "postgresql", "postgresql+psycopg")


class lease_now(FunctionElement[float]):
    """The lease clock as an SQL expression, in seconds."""

    type = sa.Double()
    inherit_cache = True
    name = "lease_now"


@compiles(lease_now, "sqlite")
def _lease_now_sqlite(_element: lease_now, _compiler: SQLCompiler, **_kw: Any) -> str:
    return "pm_now()"


@compiles(lease_now, "postgresql")
def _lease_now_postgresql(_element: lease_now, _compiler: SQLCompiler, **_kw: Any) -> str:
    # Not now(): that is the start of the transaction, which may have waited for locks.
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


class greatest(FunctionElement[float]):
    """The larger of two values, neither of them NULL (the dialects differ on NULL)."""

    type = sa.Double()
    inherit_cache = True
    name = "greatest"


@compiles(greatest, "sqlite")
def _greatest_sqlite(element: greatest, compiler: SQLCompiler, **kw: Any) -> str:
    return f"max({compiler.process(element.clauses, **kw)})"


@compiles(greatest, "postgresql")
def _greatest_postgresql(element: greatest, compiler: SQLCompiler, **kw: Any) -> str:
    return f"greatest({compiler.process(element.clauses, **kw)})"


class Database:
    """Connections to one database. Thread-safe; make it after a fork, one per process."""

    def __init__(self, writer: Engine, reader: Engine):
        self._writer = writer
        self._reader = reader
        self.postgres = writer.dialect.name == "postgresql"

    @classmethod
    def connect(cls, url: str, *, sqlite_synchronous: str = "normal", clock: Clock = SYSTEM_CLOCK) -> "Database":
        """Prepare the pools; the first use connects. ``sqlite_synchronous``: normal (a power cut may
        lose the last seconds) or full. Raises ConfigError for a URL that cannot be served."""
        parsed = parse_url(url)
        if parsed.get_backend_name() == "postgresql":
            engine = _postgres_engine(parsed)
            return cls(engine, engine.execution_options(isolation_level="AUTOCOMMIT"))
        if sqlite_synchronous not in ("normal", "full"):
            raise ConfigError(f"sqlite_synchronous is normal or full, not {sqlite_synchronous}")
        writer = _sqlite_engine(parsed, clock, connections=1, begin="BEGIN IMMEDIATE")
        reader = _sqlite_engine(parsed, clock, connections=READERS, begin="BEGIN")
        sa.event.listen(writer, "connect", _pragmas("journal_mode=WAL", f"synchronous={sqlite_synchronous}"))
        sa.event.listen(reader, "connect", _pragmas("query_only=ON"))
        return cls(writer, reader)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits at the end of the block. Raises Unavailable."""
        with _unavailable(), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that only reads. Raises Unavailable."""
        with _unavailable(), self._reader.begin() as connection:
            yield connection

    def rows(self, name: str, **columns: Sequence[str] | Sequence[int] | Sequence[str | None]) -> "sa.FromClause":
        """A table expression over Python values: equally long columns of one type each.

        One statement text for any number of rows, so that compiling, parsing and planning are
        cached: ``unnest`` of arrays on PostgreSQL, ``json_each`` of one JSON text on SQLite.
        """
        kinds: Mapping[str, sa.types.TypeEngine[Any]] = {
            key: sa.Integer() if values and isinstance(values[0], int) else sa.Text() for key, values in columns.items()
        }
        if self.postgres:
            arrays = [sa.bindparam(f"{name}_{key}", list(columns[key]), ARRAY(kinds[key])) for key in columns]
            given = sa.func.unnest(*arrays).table_valued(*(sa.column(key, kinds[key]) for key in columns), name=name)
            return given.render_derived()
        records = [list(record) for record in zip(*columns.values(), strict=True)]
        each = sa.func.json_each(sa.bindparam(name, records, sa.JSON())).table_valued("value", name=f"{name}_each")
        fields = [sa.func.json_extract(each.c.value, f"$[{n}]", type_=kinds[key]).label(key) for n, key in enumerate(columns)]
        return sa.select(*fields).subquery(name)

    def close(self) -> None:
        self._writer.dispose()
        self._reader.dispose()


def parse_url(url: str) -> URL:
    """The URL with its driver named. Raises ConfigError."""
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise ConfigError("the database URL cannot be read; it looks like sqlite:///path or postgresql://user@host/name") from None
    if parsed.drivername in _POSTGRES_NAMES:
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if parsed.database in (None, "", ":memory:"):
            raise ConfigError("SQLite needs a file that all processes can open, such as sqlite:///var/promptmill.db")
        return parsed
    raise ConfigError(f"no support for databases of the kind {parsed.drivername}; use sqlite or postgresql")


def _postgres_engine(url: URL) -> Engine:
    options = [str(url.query["options"])] if "options" in url.query else []
    options += [f"-c {name}={value}" for name, value in POSTGRES_SESSION.items()]
    arguments = {"options": " ".join(options), "connect_timeout": int(WAIT_SECONDS), "tcp_user_timeout": TCP_USER_TIMEOUT_MS}
    return sa.create_engine(
        url.difference_update_query(["options"]),
        pool_size=POSTGRES_CONNECTIONS,
        max_overflow=0,
        pool_timeout=WAIT_SECONDS,
        pool_pre_ping=True,
        connect_args=arguments,
    )


def _sqlite_engine(url: URL, clock: Clock, *, connections: int, begin: str) -> Engine:
    engine = sa.create_engine(
        url,
        pool_size=connections,
        max_overflow=0,
        pool_timeout=WAIT_SECONDS,
        # None: the driver begins nothing by itself; the event below says how a transaction begins.
        connect_args={"isolation_level": None, "timeout": WAIT_SECONDS, "check_same_thread": False},
    )
    sa.event.listen(engine, "connect", _pragmas("foreign_keys=ON"))

    @sa.event.listens_for(engine, "connect")
    def add_clock(connection: sqlite3.Connection, _record: object) -> None:
        connection.create_function("pm_now", 0, clock.lease)

    @sa.event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _pragmas(*settings: str) -> Any:
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:
        for setting in settings:
            connection.execute(f"PRAGMA {setting}").close()

    return on_connect


@contextmanager
def _unavailable() -> Iterator[None]:
    """Trouble of the connection or of locks -> Unavailable; mistakes of ours stay what they are."""
    try:
        yield
    except exc.TimeoutError as error:
        raise Unavailable("the database is busy: no connection came free in time") from error
    except (exc.OperationalError, exc.InterfaceError, exc.InternalError) as error:
        raise Unavailable(f"the database cannot be used now ({_reason(error.orig)})") from error
    except exc.DBAPIError as error:
        if not error.connection_invalidated:
            raise
        raise Unavailable("the connection to the database was lost") from error


def _reason(error: BaseException | None) -> str:
    """What may be shown: SQLite's texts are fixed phrases, PostgreSQL's may name hosts and users."""
    return str(error) if isinstance(error, sqlite3.Error) else type(error).__name__
