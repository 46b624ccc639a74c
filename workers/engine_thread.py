"""The thread that an engine runs on, from loading to its end, and whether that end was asked for."""

import threading
from collections.abc import Callable, Sequence

from promptmill.core.engine import Engine, EngineEvent, EngineStats, Resumable
from promptmill.core.logs import get_logger

log = get_logger(__name__)


def nothing() -> None:
    """For those who need not be told."""


class EngineThread:
    """``on_death`` is called on the engine's thread when it ends though neither ``drain`` nor ``close`` asked for it."""

    def __init__(self, engine: Engine, on_death: Callable[[], None] = nothing):
        self._engine = engine
        self._on_death = on_death
        self._settled = threading.Event()  # loaded, or failed to
        self._ready = False
        self._failure: BaseException | None = None
        self._ending = False
        self._thread: threading.Thread | None = None

    def start(self, sink: Callable[[Sequence[EngineEvent]], None]) -> None:
        """Returns when the engine can serve; raises what loading it raised."""
        self._thread = threading.Thread(target=self._run, args=(sink,), name="engine", daemon=True)
        self._thread.start()
        self._settled.wait()
        if not self._ready and self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def alive(self) -> bool:
        """The engine serves."""
        return self._engine.alive

    @property
    def dead(self) -> bool:
        """The engine has ended by itself: nothing brings it back in this process."""
        return self._ready and not self._engine.alive and not self._ending

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def drain(self, seconds: float) -> tuple[Resumable, ...]:
        """Let what runs finish for ``seconds``; what was given up then, without an event. The engine has ended after it."""
        self._ending = True
        return self._engine.drain(seconds) if self._engine.alive else ()

    def close(self) -> None:
        """End the engine and wait for its last events."""
        self._ending = True
        self._engine.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self, sink: Callable[[Sequence[EngineEvent]], None]) -> None:
        try:
            self._engine.run(sink, self._loaded)
        except BaseException as error:  # of any kind: whoever waits in ``start`` must hear of it
            if self._ready:
                log.exception("engine broke")
            self._failure = error
        finally:
            self._settled.set()
        if self._ready and not self._ending:
            self._on_death()

    def _loaded(self) -> None:
        self._ready = True
        self._settled.set()
