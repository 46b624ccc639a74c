"""One thread that appends the events of all jobs to the stream, many in one round trip.

Markers, first tokens and terminal events go at once, other tokens at most every 25 ms: one flush
per engine step, or per several steps when those are shorter. When the stream is away the events
stay here, in order, bounded by the running jobs, and are appended again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError

from promptmill.core.clock import Clock
from promptmill.core.errors import Unavailable
from promptmill.core.events import Cursor, StreamEvent
from promptmill.core.logs import get_logger
from promptmill.core.ports import Append, TokenStream
from workers.outbox import Outbox

INTERVAL_S = 0.025
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0

log = get_logger(__name__)


class Flusher:
    """``on_fenced(job, attempt)`` is told when a log belongs to a higher attempt."""

    def __init__(self, stream: TokenStream, clock: Clock, on_fenced: Callable[[str, int], None]):
        self._stream = stream
        self._clock = clock
        self._on_fenced = on_fenced
        self._changed = threading.Condition()
        self._outbox = Outbox()
        self._waiting: dict[tuple[str, Cursor], Future[Append]] = {}
        self._urgent = False
        self._flushed_at = clock.monotonic() - INTERVAL_S
        self._retry_s = 0.0  # > 0: the last append failed
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="flusher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, event: StreamEvent) -> Future[Append]:
        """Append at once, behind all earlier events of the job; the stream's verdict."""
        verdict: Future[Append] = Future()
        with self._changed:
            self._waiting[event.job, event.cursor] = verdict
            self._outbox.add(event)
            self._urgent = True
            self._changed.notify()
        return verdict

    def tokens(self, events: Iterable[StreamEvent], *, urgent: bool) -> None:
        """Queue a step's token events; never blocks on the stream."""
        with self._changed:
            for event in events:
                self._outbox.add(event)
            self._urgent = self._urgent or urgent
            self._changed.notify()

    def drop(self, job: str, attempt: int) -> None:
        """The attempt has nothing more to say; verdicts still awaited are cancelled."""
        with self._changed:
            self._outbox.drop(job, attempt)
            gone = [key for key in self._waiting if key[0] == job and key[1].attempt <= attempt]
            dropped = [self._waiting.pop(key) for key in gone]
        for verdict in dropped:
            verdict.cancel()

    def close(self) -> None:
        """One last flush, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def due_in(self) -> float | None:
        """Seconds until the next flush, 0 = now, None = nothing to flush. Call it under the lock or from tests."""
        if not self._outbox:
            return None
        if self._retry_s:
            delay = self._retry_s
        else:
            delay = 0.0 if self._urgent else INTERVAL_S
        return max(0.0, self._flushed_at + delay - self._clock.monotonic())

    def run_once(self) -> None:
        """Append what there is and hand out the verdicts."""
        with self._changed:
            events = self._outbox.take()
            self._urgent = False
        if not events:
            return
        try:
            verdicts = self._stream.append(events)
        except Unavailable as error:
            self._failed(error)
            return
        with self._changed:
            self._outbox.settle()
            self._retry_s = 0.0
            self._flushed_at = self._clock.monotonic()
            answered = [(e, self._waiting.pop((e.job, e.cursor), None)) for e in events]
        for event, waiting in answered:
            if waiting is not None:
                _answer(waiting, verdicts[event.job])
        for job, attempt in {(e.job, e.cursor.attempt) for e in events if verdicts[e.job] is Append.FENCED}:
            self._on_fenced(job, attempt)

    def _failed(self, error: Unavailable) -> None:
        with self._changed:
            first = not self._retry_s
            self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s or FIRST_RETRY_S)
            self._flushed_at = self._clock.monotonic()
        if first:
            log.warning("stream unavailable", reason=error.message)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (delay := self.due_in()) != 0:
                    self._changed.wait(delay)
                closing = self._closing
            try:
                self.run_once()
            except Exception as error:  # nothing may end this thread: all jobs wait for it
                log.exception("flush failed")
                self._failed(Unavailable(str(error)))
            if closing:
                return


def _answer(waiting: Future[Append], verdict: Append) -> None:
    with contextlib.suppress(InvalidStateError):  # its job gave up waiting
        waiting.set_result(verdict)
