"""`promptmill up`: everything on one machine under one data directory, in the foreground.

1 hold the data directory, check port, disk and models   preflight.py
2 start Redis, wait until it answers                     services.py
3 migrate SQL
4 start api, workers, maintenance, beat, flower          commands.py, child.py
5 wait until the api lists every worker as ready         ready.py
6 ask one question and show the answer                   demo.py
7 keep the children alive until a signal comes, then stop them in order   group.py
"""

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass

import promptmill
from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import ConfigError, PromptmillError, Unavailable
from promptmill.core.settings import Settings, mask
from promptmill.supervisor import commands
from promptmill.supervisor.child import Child, Died
from promptmill.supervisor.commands import Command, address
from promptmill.supervisor.demo import demo
from promptmill.supervisor.group import Group
from promptmill.supervisor.logfile import LogFile
from promptmill.supervisor.preflight import DataLock, Running, check_disk, check_models, check_port
from promptmill.supervisor.ready import ANY, own_url, waiting_for
from promptmill.supervisor.report import Report
from promptmill.supervisor.services import HOST, answers, find_server, free_port, port_is_free
from promptmill.supervisor.wake import Wake

LOOK_S = 0.2  # between two looks at what is not ready yet
BOUND_LOGS_S = 5.0  # between two looks at the sizes of the logs
REDIS_DEATHS = 3  # before it answered once: then it cannot be started here at all
PATIENCE_S = 300.0  # of `demo`, which must not hang a build


@dataclass(frozen=True, slots=True)
class Options:
    """``once``: stop after the demo (`promptmill demo`); the exit code then tells whether it went well."""

    workers: int = 1
    flower: bool = True
    demo: bool = True
    once: bool = False


def up(settings: Settings, options: Options, report: Report, clock: Clock = SYSTEM_CLOCK) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP; the exit code. Raises ConfigError for what forbids a start.

    Call it from the main thread of a process with no other thread.
    """
    lock = DataLock(settings.data_dir)
    try:
        check_port(settings.host, settings.port)
        check_disk(settings.data_dir)
        names = [card.name for card in check_models(settings)]
        shutil.rmtree(settings.metrics_dir, ignore_errors=True)
        with Wake(clock) as wake:
            return _Up(_placed(settings, names, report), options, report, clock, wake, lock).run()
    finally:
        lock.release()


def _placed(settings: Settings, models: list[str], report: Report) -> Settings:
    """The settings with every choice made that all children must share."""
    port = settings.port or free_port(settings.host)
    flower_port = settings.flower_port
    if flower_port == port or not flower_port or not port_is_free(settings.host, flower_port):
        flower_port = free_port(settings.host)
    if settings.flower_port not in (0, flower_port):
        report.event("warning", f"port {settings.flower_port} is taken, so Flower gets {flower_port}", port=flower_port)
    update = {"data_dir": settings.data_dir.absolute(), "port": port, "flower_port": flower_port, "model": ",".join(models)}
    return settings.model_copy(update=update)


class _Up:
    def __init__(self, settings: Settings, options: Options, report: Report, clock: Clock, wake: Wake, lock: DataLock):
        self._settings = settings
        self._options = options
        self._report = report
        self._clock = clock
        self._wake = wake
        self._lock = lock
        self._group = Group(clock, wake)
        self._embedded = "redis_url" not in settings.model_fields_set
        self._answered = False

    def run(self) -> int:
        settings = self._settings
        line = f"promptmill {promptmill.__version__} · {settings.engine} engine · {settings.model} · data in {settings.data_dir}"
        self._report.event("starting", line, engine=settings.engine, model=settings.model, data_dir=str(settings.data_dir), pid=os.getpid())
        try:
            return self._serve() if self._start() else 0
        finally:
            self._report.waiting(None)
            self._stop()

    def _start(self) -> bool:
        """Steps 2 to 5; False when asked to stop meanwhile."""
        if not self._redis():
            return False
        self._lock.say(self._running())
        self._migrate()
        for command in self._commands():
            self._group.start(self._child(command))
        names = [child.name for child in self._group.children]
        self._report.event("started", f"started {', '.join(names)}", processes=names)
        begun = self._clock.monotonic()

        def missing() -> str | None:
            what = waiting_for(own_url(self._settings), self._options.workers)
            if what and self._options.once and self._clock.monotonic() - begun > PATIENCE_S:
                raise Unavailable(f"still not ready after {PATIENCE_S:.0f} s: waiting for {what}; see {self._settings.data_dir / 'logs'}")
            return f"waiting for {what}" if what else None

        return self._until(missing)

    def _serve(self) -> int:
        """Steps 6 and 7."""
        self._say_ready()
        talk = threading.Thread(target=self._demo, name="demo", daemon=True)
        if self._options.demo:
            talk.start()
        while not self._wake.stops:
            self._supervise()
            if self._options.once and not talk.is_alive():
                return 0 if self._answered else 1
            due = self._group.due()
            self._wake.wait(min(BOUND_LOGS_S, due - self._clock.monotonic() if due is not None else BOUND_LOGS_S))
        return 1 if self._options.once else 0

    def _redis(self) -> bool:
        """A Redis that answers; False when asked to stop meanwhile."""
        if not self._embedded:
            from storage.stream import RedisTokenStream

            stream = RedisTokenStream(self._settings.redis_url, ttl_seconds=self._settings.log_ttl_seconds)
            try:
                stream.check()
            finally:
                stream.close()
            self._report.event("redis", f"redis: {mask(self._settings.redis_url)}", url=mask(self._settings.redis_url))
            return True
        server, port = find_server(), free_port()
        self._settings = self._settings.model_copy(update={"redis_url": f"redis://{HOST}:{port}/0"})
        child = self._child(server.command(port, self._settings.data_dir / "redis"))
        self._group.start(child)
        self._report.event("redis", f"redis: {server.label} on {HOST}:{port}", url=self._settings.redis_url, durable=server.durable)

        def missing() -> str | None:
            if child.deaths >= REDIS_DEATHS:
                raise ConfigError(f"the embedded Redis does not start: {child.log.last_line()} (see {child.log.path})")
            return None if answers(port) else "waiting for redis"

        return self._until(missing, every=0.05)

    def _migrate(self) -> None:
        from storage.migrate import migrate

        self._report.waiting("migrating the database")
        migrate(self._settings.database)
        self._report.waiting(None)
        self._report.event("database", f"database: {mask(self._settings.database)}", url=mask(self._settings.database))

    def _commands(self) -> list[Command]:
        """Every process but Redis, in the order of their start."""
        settings = self._settings
        names = [f"worker-{number}" for number in range(1, self._options.workers + 1)]
        found = [commands.api(_as(settings, "api"))]
        found += [commands.worker(_as(settings, name)) for name in names]
        found += [commands.maintenance(_as(settings, "maintenance")), commands.beat(_as(settings, "beat"))]
        if self._options.flower:
            found.append(commands.flower(_as(settings, "flower")))
        return found

    def _child(self, command: Command) -> Child:
        settings = self._settings
        shared: dict[str, object] = {
            "data_dir": settings.data_dir,
            "redis_url": settings.redis_url,
            "host": settings.host,
            "port": settings.port,
            "flower_port": settings.flower_port,
            "model": settings.model,
            "engine": settings.engine,
        }
        if self._options.workers > 1 and not settings.threads:  # else each would take all cores
            shared["threads"] = max(1, (os.cpu_count() or 1) // self._options.workers)
        return Child(command.with_flags(shared), LogFile(settings.data_dir / "logs", command.name), self._clock)

    def _until(self, missing: Callable[[], str | None], every: float = LOOK_S) -> bool:
        """Supervise until nothing is missing any more; False when asked to stop before."""
        while not self._wake.stops:
            self._supervise()
            line = missing()
            self._report.waiting(line)
            if line is None:
                return True
            self._wake.wait(every)
        return False

    def _supervise(self) -> None:
        for notice in self._group.run_once(self._clock.monotonic()):
            if isinstance(notice, Died):
                tail = f": {notice.last_line}" if notice.last_line else ""
                line = f"{notice.name} {notice.reason}{tail}; it starts again in {notice.delay_s:g} s"
                self._report.event("died", line, process=notice.name, reason=notice.reason, delay_s=notice.delay_s, log=notice.last_line)
            else:
                self._report.event("restarted", f"{notice.name} started again", process=notice.name, pid=notice.pid)

    def _say_ready(self) -> None:
        found, logs = self._running(), self._settings.data_dir / "logs"
        self._report.event("ready", f"ready {found.url}", url=found.url)
        places = {"docs": f"{found.url}/docs", "flower": found.flower_url, "logs": str(logs)}
        line = "\n".join(f"  {name:<7}{place}" for name, place in places.items() if place)
        self._report.event("places", line, **places)

    def _running(self) -> Running:
        settings = self._settings
        flower = f"http://{address(ANY.get(settings.host, settings.host), settings.flower_port)}" if self._options.flower else None
        return Running(os.getpid(), own_url(settings), settings.redis_url, flower)

    def _demo(self) -> None:
        try:
            self._answered = demo(own_url(self._settings), self._report)
        except PromptmillError as error:
            if not self._wake.stops:
                self._report.event("failed", f"the demo failed: {error.message}", code=error.code)
        finally:
            self._wake.nudge()

    def _stop(self) -> None:
        self._report.event("stopping", "stopping; running jobs get a moment to finish")
        for name in self._group.stop(self._settings.drain_seconds):
            self._report.event("killed", f"{name} had not stopped yet and was killed", process=name)
        self._report.event("stopped", "stopped")


def _as(settings: Settings, process: str) -> Settings:
    return settings.model_copy(update={"process": process})
