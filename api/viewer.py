"""One viewer's way through a job's events: every token exactly once, in order, and one end.

Race-free attach: register at the fan-out, read the log behind the cursor, then take the live
events that come after it. The log is read again after a gap (a jump of ``pos``, a higher attempt)
and whenever the feed lags. What does not fit is never shown: a viewer that has other tokens than
the log gets ``reset`` and the log from its start. SQL, not Redis, ends a stream: a viewer that
hears nothing for a while asks whether the job is over, and is completed from the stored result.
"""

import threading
from collections.abc import Generator, Iterator

from api.completion import at_end, beyond_end, completion, shown_at
from promptmill.core.clock import Clock
from promptmill.core.errors import BadCursor, NotFound, Unavailable
from promptmill.core.events import SEQ_PER_TOKEN, START, Cursor, EventType, StreamEvent
from promptmill.core.jobs import Job, Status
from promptmill.core.logs import get_logger
from promptmill.core.ports import FanOut, JobStore, TokenStream

log = get_logger(__name__)

TICK_S = 1.0  # longest wait for an event: bounds how late a viewer's end or the server's stop is noticed
SILENT_S = 5.0  # after so long without an event SQL is asked
MARKERS = (EventType.STARTED, EventType.RESET)  # begin an attempt at its first token


class Viewer:
    """Made by ``open``, which raises NotFound, BadCursor or Unavailable; then iterate ``events``.
    ``close`` frees the feed, also when nothing was iterated; closing twice is harmless."""

    def __init__(
        self,
        job: Job,
        after: Cursor,
        *,
        store: JobStore,
        stream: TokenStream,
        fanout: FanOut,
        clock: Clock,
        stop: threading.Event,
        tick_s: float = TICK_S,
        silent_s: float = SILENT_S,
    ):
        self._job = job
        self._last = after
        self._shown = shown_at(after)
        self._store = store
        self._stream = stream
        self._fanout = fanout
        self._clock = clock
        self._stop = stop
        self._tick_s = tick_s
        self._silent_s = silent_s
        self._heard = clock.monotonic()
        self._broken = False  # the log lacks tokens: show none until an attempt begins anew or the job ends
        self._behind = False  # the log could not be read
        self.ended = False  # the terminal event was given out
        self._feed = fanout.open(job.id)
        try:
            self._log_end = self._read_log_end()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        job_id: str,
        after: str,
        *,
        store: JobStore,
        stream: TokenStream,
        fanout: FanOut,
        clock: Clock,
        stop: threading.Event,
        **timing: float,
    ) -> "Viewer":
        """``after``: the id of the last event that the viewer has, "" for none."""
        cursor = Cursor.parse(after) if after else START
        job = store.get(job_id)
        if job is None:
            raise NotFound("no such job")
        viewer = cls(job, cursor, store=store, stream=stream, fanout=fanout, clock=clock, stop=stop, **timing)
        if not viewer.at_end and beyond_end(job, cursor, viewer._log_end):
            viewer.close()
            raise BadCursor("this event id lies beyond the end of the job's events", param="after")
        return viewer

    @property
    def at_end(self) -> bool:
        """The viewer has had the terminal event: there is nothing more to say."""
        return at_end(self._job, self._last)

    def close(self) -> None:
        self._fanout.close_feed(self._feed)

    def events(self) -> Iterator[StreamEvent | None]:
        """The events; None after each tick without one, so that the caller can look after its
        connection. Ends after the terminal event, or when ``stop`` is set."""
        try:
            yield from self._begin()
            while not self.ended and not self._stop.is_set():
                yield from self._turn()
        finally:
            self.close()

    # -- turns --------------------------------------------------------------------------------

    def _begin(self) -> Iterator[StreamEvent | None]:
        if self._job.status.terminal and self._log_end is None:
            yield from self._complete(self._job)
            return
        if self._job.status is Status.QUEUED and self._log_end is None and self._last == START:
            yield StreamEvent(self._job.id, START, EventType.QUEUED, {"model": self._job.model})
        yield from self._catch_up()

    def _turn(self) -> Iterator[StreamEvent | None]:
        event = self._feed.get(self._tick_s)
        if event is not None:
            yield from self._live(event)
        elif self._feed.lagging:
            if (yield from self._catch_up()):
                self._feed.caught_up()
            else:
                self._stop.wait(self._tick_s)  # a feed that lags returns at once
                yield None
        else:
            if self._behind:
                yield from self._catch_up()
            yield None
        if not self.ended and self._clock.monotonic() - self._heard >= self._silent_s:
            yield from self._ask()

    def _live(self, event: StreamEvent) -> Iterator[StreamEvent]:
        if event.cursor <= self._last or self._skips(event):
            return
        if self._fits(event):
            yield self._show(event)
        else:
            yield from self._catch_up()

    def _ask(self) -> Iterator[StreamEvent]:
        """Is the job over? Then what the log still has comes first."""
        job = self._look()
        if job is not None and job.status.terminal:
            yield from self._catch_up()
            if not self.ended:
                yield from self._complete(job)

    # -- the log ------------------------------------------------------------------------------

    def _catch_up(self) -> Generator[StreamEvent, None, bool]:
        """Show what the log has behind the cursor. False when it could not be read."""
        events = self._read(self._last)
        for event in events or ():
            if self._skips(event):
                continue
            if not self._fits(event):
                return (yield from self._replay())
            yield self._show(event)
        return events is not None

    def _replay(self) -> Generator[StreamEvent, None, bool]:
        """What the viewer has and what the log has differ: forget, and show the log from its start."""
        events = self._read(START)
        if events is None:
            return False
        if not events:  # gone since it was read: a running job's worker writes it again, a finished job's row has it
            self._broken = True
            return True
        begin = max((at for at, event in enumerate(events) if event.type in MARKERS), default=None)
        story = events if begin is None else events[begin + 1 :]
        if not whole(story):
            self._broken = True
            if story and story[-1].type.terminal:
                yield from self._settle()
            return True
        marker = events[0] if begin is None else events[begin]
        data = {"model": self._job.model, "attempt": marker.cursor.attempt}
        yield self._show(StreamEvent(self._job.id, Cursor(marker.cursor.attempt, 0), EventType.RESET, data))
        for event in story:
            if self._fits(event):
                yield self._show(event)
        return True

    def _settle(self) -> Iterator[StreamEvent]:
        """The log has an end but not the tokens before it."""
        job = self._look()
        if job is not None and job.status.terminal:
            yield from self._complete(job)

    def _complete(self, job: Job) -> Iterator[StreamEvent]:
        for event in completion(job, self._last):
            yield self._show(event)

    def _fits(self, event: StreamEvent) -> bool:
        """Whether ``event`` is the next one after what was shown."""
        if event.type in MARKERS:
            return True
        pos = event.data["pos"] if event.type is EventType.TOKEN else event.cursor.seq // SEQ_PER_TOKEN
        return event.cursor.attempt == self._last.attempt and bool(pos == self._shown)

    def _skips(self, event: StreamEvent) -> bool:
        return self._broken and event.type not in MARKERS and not event.type.terminal

    def _show(self, event: StreamEvent) -> StreamEvent:
        self._last = event.cursor
        self._heard = self._clock.monotonic()
        if event.type in MARKERS:
            self._shown = 0
            self._broken = False
        elif event.type is EventType.TOKEN:
            self._shown = event.data["pos"] + len(event.data["token_ids"])
        self.ended = event.type.terminal
        return event

    # -- what may be away -----------------------------------------------------------------------

    def _read(self, after: Cursor) -> list[StreamEvent] | None:
        try:
            events = self._stream.read(self._job.id, after)
        except Unavailable:
            self._behind = True
            return None
        self._behind = False
        return events

    def _read_log_end(self) -> Cursor | None:
        try:
            return self._stream.last(self._job.id)
        except Unavailable:
            return None

    def _look(self) -> Job | None:
        """The job now; None while SQL is away. A job that is no more ends its viewers."""
        self._heard = self._clock.monotonic()
        try:
            job = self._store.get(self._job.id)
        except Unavailable as error:
            log.warning("cannot ask whether a job is over", job=self._job.id, error=error.message)
            return None
        if job is None:
            self.ended = True
        return job


def whole(story: list[StreamEvent]) -> bool:
    """Whether the token events lie end to end from pos 0, up to the terminal event if there is one."""
    pos = 0
    for event in story:
        if event.type is EventType.TOKEN:
            if event.data["pos"] != pos:
                return False
            pos += len(event.data["token_ids"])
    return not story or not story[-1].type.terminal or story[-1].cursor.seq // SEQ_PER_TOKEN == pos
