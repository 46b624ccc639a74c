"""Keeps the leases of this worker's jobs, hears of cancelled ones, and watches the engine.

A thread of its own: a drain stops Celery's main thread for as long as it takes.
"""

import faulthandler
import os
import threading
from collections.abc import Callable

from promptmill.core.clock import Clock
from promptmill.core.engine import EngineStats
from promptmill.core.errors import Unavailable
from promptmill.core.logs import get_logger
from promptmill.core.ports import JobStore, WorkerDirectory, WorkerInfo
from workers.engine_thread import EngineThread
from workers.gate import Capacity
from workers.registry import Registry
from workers.way import JobWay

EXIT_STALLED = 70  # EX_SOFTWARE: a hung engine must not keep its leases
GIVE_BACK_SECONDS = 3.0  # for the jobs of an engine that died; a lease brings back the rest

log = get_logger(__name__)


def stalled(stats: EngineStats, now: float, stall_seconds: float) -> str | None:
    """Why a running engine must be given up, or None. ``now`` is Clock.monotonic."""
    idle_s = now - stats.stepped_at
    if idle_s > stall_seconds and (stats.waiting or any(stats.running.values())):
        return f"the engine has not stepped for {idle_s:.0f} s"
    return None


def die(hung: bool) -> None:
    """End the process now; the jobs it still holds come back by their leases. ``hung``: show where its threads are."""
    if hung:
        faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_STALLED)


class Heartbeat:
    """``announce`` makes this worker's entry in the directory, anew each time."""

    def __init__(
        self,
        store: JobStore,
        registry: Registry,
        way: JobWay,
        engine: EngineThread,
        directory: WorkerDirectory,
        announce: Callable[[], WorkerInfo],
        clock: Clock,
        *,
        worker: str,
        seconds: float,
        stall_seconds: float,
        die: Callable[[bool], None] = die,
    ):
        self._store = store
        self._registry = registry
        self._way = way
        self._engine = engine
        self._directory = directory
        self._announce = announce
        self._clock = clock
        self._worker = worker
        self._seconds = seconds
        self._stall_seconds = stall_seconds
        self._die = die
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_now(self) -> None:
        """There is news to announce."""
        self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def run_once(self) -> None:
        if self._engine.dead:
            self._give_up()
            return
        reason = stalled(self._engine.stats(), self._clock.monotonic(), self._stall_seconds) if self._engine.alive else None
        if reason is not None:
            log.critical("engine stalled", worker=self._worker, reason=reason)
            self._die(True)
            return
        self._renew()
        try:
            self._directory.announce(self._announce())
        except Unavailable as error:
            log.warning("not announced", worker=self._worker, reason=error.message)

    def _give_up(self) -> None:
        """The engine has ended by itself: fetch nothing more, give the jobs back, end the process."""
        log.critical(
            "engine died", worker=self._worker, reason="this worker ends; its jobs run elsewhere, or here once it is started again"
        )
        self._registry.capacity = Capacity(0, 0)
        self._way.close()
        self._registry.wait_idle(GIVE_BACK_SECONDS)
        self._die(False)

    def _renew(self) -> None:
        held = self._registry.held()
        if not held:
            return
        try:
            beat = self._store.heartbeat(self._worker, held)
        except Unavailable as error:  # says nothing about any row
            log.warning("heartbeat unavailable", worker=self._worker, held=len(held), reason=error.message)
            return
        for claim in held:
            if claim not in beat.renewed:
                self._way.lose(claim.id, claim.attempt)
        for job_id in beat.cancelled:
            self._way.cancel(job_id)

    def _loop(self) -> None:
        while not self._closing:
            try:
                self.run_once()
            except Exception:  # leases depend on this thread
                log.exception("heartbeat failed", worker=self._worker)
            self._wake.wait(self._seconds)
            self._wake.clear()
