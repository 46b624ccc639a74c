"""The exact command line of every process, one function each.

``promptmill api|worker|maintenance|beat|flower`` exec them, ``up`` starts them, and the tests hold
Procfile and compose to them, so that ``ps`` shows the same everywhere (docs/architecture.md).

They run as ``python -m``, not by the console scripts beside the interpreter: the first line of a
console script cannot hold a path with a space.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from promptmill.core.settings import PREFIX, Settings

APP = "workers.app"
GRACE_S = 25  # of the api: for requests under way; it ends open streams by itself, within a second


@dataclass(frozen=True, slots=True)
class Command:
    """``name``: of the process in logs and metrics. ``env``: what is set beside the caller's environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def with_flags(self, flags: Mapping[str, object]) -> "Command":
        """Flags win over the environment; the process reads its settings itself, so they travel in it."""
        given = {PREFIX + name.upper(): str(value) for name, value in flags.items() if value is not None}
        return replace(self, env={**given, **self.env})

    def execute(self) -> None:
        """Become this command; returns never."""
        os.environ.update(self.env)
        os.execv(self.argv[0], self.argv)


def api(settings: Settings) -> Command:
    """The HTTP server: few processes, many threads, since every open stream holds a thread.

    No access log (the api writes its own), no control socket (it would lie in the home directory
    and be shared by all instances). Kept-alive connections outlive the usual idle time of load balancers.
    """
    arguments = (
        "api.wsgi:app",
        "--worker-class=api.server.Worker",
        f"--workers={settings.api_workers}",
        f"--threads={settings.api_threads}",
        f"--bind={address(settings.host, settings.port)}",
        f"--graceful-timeout={GRACE_S}",
        "--keep-alive=75",
        f"--log-level={settings.log_level}",
        "--no-control-socket",
    )
    return _command(settings.process or "api", "gunicorn", arguments)


def worker(settings: Settings) -> Command:
    """The engine's process. ``worker_pool`` of the app is used only while no ``-P`` is given.

    REMAP_SIGTERM: SIGTERM starts Celery's soft shutdown (drain, then release), not the warm one,
    which would wait for the longest job.
    """
    name = settings.process or "worker"
    arguments = (*_celery("worker", settings), "--without-gossip", "--without-mingle", "-n", f"{name}@%h")
    return _command(name, "celery", arguments, REMAP_SIGTERM="SIGQUIT")


def maintenance(settings: Settings) -> Command:
    """Sweep, feed, expire. The named pool overrides the app's, so no model is loaded."""
    name = settings.process or "maintenance"
    pool = ("-P", "threads", "-c", "2", "-Q", "maintenance")
    arguments = (*_celery("worker", settings), *pool, "--without-gossip", "--without-mingle", "-n", f"{name}@%h")
    return _command(name, "celery", arguments)


def beat(settings: Settings) -> Command:
    """The clock of maintenance. A process of its own: an embedded beat outlives a killed worker."""
    return _command(settings.process or "beat", "celery", _celery("beat", settings))


def flower(settings: Settings) -> Command:
    """The dashboard. It keeps 10 000 tasks (its default of 100 000 is its memory leak) and gives
    a busy worker 3 s to answer."""
    arguments = (
        "-A",
        APP,
        "flower",
        f"--address={settings.host}",
        f"--port={settings.flower_port}",
        "--max_tasks=10000",
        "--inspect_timeout=3000",
    )
    return _command(settings.process or "flower", "celery", arguments)


COMMANDS: Mapping[str, Callable[[Settings], Command]] = {
    "api": api,
    "worker": worker,
    "maintenance": maintenance,
    "beat": beat,
    "flower": flower,
}


def address(host: str, port: int) -> str:
    """``host:port`` as URLs and servers write it; an IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _celery(subcommand: str, settings: Settings) -> tuple[str, ...]:
    return ("-A", APP, subcommand, f"--loglevel={settings.log_level.upper()}")


def _command(name: str, module: str, arguments: tuple[str, ...], **env: str) -> Command:
    return Command(name, (sys.executable, "-m", module, *arguments), {f"{PREFIX}PROCESS": name, **env})
