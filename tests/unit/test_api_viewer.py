"""The viewer loop: whatever happens to log and feed, each token is shown once, in order, with one end."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.completion import completion
from api.viewer import Viewer
from promptmill.core import events
from promptmill.core.errors import BadCursor, NotFound, Unavailable
from promptmill.core.events import START, Cursor, EventType, StreamEvent
from promptmill.core.jobs import Choice, Finish, Held, JobError, Outcome, Status, Timings, Usage
from promptmill.core.ports import Feed
from storage.memory import MemoryFanOut, MemoryJobStore, MemoryTokenStream
from tests.support.clock import FakeClock
from tests.support.factories import make_job, make_spec

MODEL = "tiny"


class HeldStream(MemoryTokenStream):
    """A log that can be away, and lose what it has."""

    away = False

    def read(self, job: str, after: Cursor) -> list[StreamEvent]:
        if self.away:
            raise Unavailable("Redis cannot be reached")
        return super().read(job, after)

    def drop(self, job: str) -> None:
        with self._lock:
            self._logs.pop(job, None)

    def drop_tail(self, job: str, keep: int) -> None:
        with self._lock:
            if job in self._logs:
                del self._logs[job].events[keep:]


class SmallFanOut(MemoryFanOut):
    """Its feeds overflow early, so that a slow reader is easy to have."""

    size = 1024

    def open(self, job: str) -> Feed:
        feed = super().open(job)
        feed._size = self.size  # type: ignore[attr-defined]
        return feed

    @property
    def jobs(self) -> int:
        return self._feeds.jobs

    def reconnect(self) -> None:
        """The subscription was away: every feed may have missed something."""
        self._feeds.subscribed()


class World:
    """A job, its log, and a worker's verbs on both."""

    def __init__(self, *, feed_size: int = 1024, tokens: int = 12):
        self.clock = FakeClock()
        self.store = MemoryJobStore(clock=self.clock)
        self.stream = HeldStream(clock=self.clock)
        self.fanout = SmallFanOut(self.stream)
        self.fanout.size = feed_size
        self.fanout.start()
        self.stop = threading.Event()
        (submitted,) = self.store.submit([make_job(clock=self.clock, spec=make_spec(max_tokens=100))])
        self.job = submitted.job.id
        self.attempt = 0
        self.pos = 0
        self.text = "".join(chr(97 + i % 26) for i in range(tokens))
        self.ids = tuple(range(tokens))

    def view(self, after: str = "", **timing: float) -> Viewer:
        timing = {"tick_s": 0.001, **timing}
        return Viewer.open(
            self.job, after, store=self.store, stream=self.stream, fanout=self.fanout, clock=self.clock, stop=self.stop, **timing
        )

    def start(self) -> None:
        (claim,) = self.store.claim_many([self.job], "w", "n")
        assert claim is not None
        self.attempt, self.pos = claim.attempt, 0
        self.stream.append([events.started(self.job, self.attempt, MODEL)])

    def say(self, count: int) -> None:
        """Publish the next ``count`` tokens in one event."""
        end = min(self.pos + count, len(self.ids))
        if end > self.pos:
            self.stream.append([self.token(self.pos, end)])
            self.pos = end

    def token(self, begin: int, end: int) -> StreamEvent:
        return events.tokens(self.job, self.attempt, index=0, pos=begin, text=self.text[begin:end], token_ids=self.ids[begin:end])

    def outcome(self) -> Outcome:
        return Outcome((Choice(0, self.text, self.ids, "length"),), Usage(3, len(self.ids)))

    def commit(self) -> None:
        """The result is stored; the terminal event not yet."""
        assert self.store.finish_many([Finish(self.job, self.attempt, "w", Status.SUCCEEDED, self.outcome())]) == [True]

    def tell_end(self) -> None:
        job = self.store.get(self.job)
        assert job is not None
        self.stream.append(
            [events.terminal(self.job, job.attempt, job.status, outcome=job.outcome, error=None, timings=job.timings, cache=job.cache)]
        )

    def finish(self) -> None:
        self.say(len(self.ids))
        self.commit()
        self.tell_end()


class Screen:
    """What a strict client makes of the events."""

    def __init__(self) -> None:
        self.seen: list[StreamEvent] = []
        self.ids: list[int] = []
        self.text = ""
        self.ended = False

    def show(self, event: StreamEvent) -> None:
        assert not self.ended, "an event after the end"
        self.seen.append(event)
        if event.type in (EventType.RESET, EventType.STARTED):
            self.ids, self.text = [], ""
        elif event.type is EventType.TOKEN:
            assert event.data["pos"] == len(self.ids), "a gap or a repeat"
            self.ids += event.data["token_ids"]
            self.text += event.data["text"]
        self.ended = event.type.terminal

    def watch(self, stream: Iterator[StreamEvent | None], clock: FakeClock | None = None, idle: int = 200) -> "Screen":
        """All there is, up to the end or to ``idle`` ticks in a row without an event; each tick is a second of ``clock``."""
        quiet = 0
        for event in stream:
            quiet = quiet + 1 if event is None else 0
            if event is None and clock is not None:
                clock.advance(1)
            if event is not None:
                self.show(event)
            if quiet >= idle:
                break
        return self

    @property
    def types(self) -> list[str]:
        return [str(event.type) for event in self.seen]


@pytest.fixture
def world() -> World:
    return World()


def test_a_viewer_from_the_start_sees_the_whole_story(world: World):
    screen, stream = Screen(), world.view().events()
    screen.show(next(stream))
    world.start()
    world.say(3)
    world.finish()
    screen.watch(stream)
    assert screen.types == ["queued", "started", "token", "token", "done"]
    assert str(screen.seen[0].cursor) == "0-0"
    assert (screen.text, screen.ids) == (world.text, list(world.ids))


def test_a_late_viewer_reads_the_log(world: World):
    world.start()
    world.finish()
    assert Screen().watch(world.view().events()).types == ["started", "token", "done"]


def test_a_viewer_goes_on_behind_its_cursor(world: World):
    world.start()
    world.say(5)
    world.finish()
    (_, first, *rest) = world.stream.read(world.job, START)
    assert list(world.view(str(first.cursor)).events()) == rest


def test_a_cursor_at_the_terminal_event_has_nothing_more(world: World):
    world.start()
    world.finish()
    end = str(world.stream.read(world.job, START)[-1].cursor)
    assert world.view(end).at_end
    world.stream.drop(world.job)
    assert world.view(end).at_end


@pytest.mark.parametrize("cursor", ["nonsense", "1", "1-", "-1-0", "1-2-3", "01-0", "9-0", "2-0", "1-99999999", "1-3328", "٣-٤", " 1-0"])
@pytest.mark.parametrize("state", ["running", "finished", "expired"])
def test_b11_a_malformed_cursor_or_one_beyond_the_end_is_refused(world: World, cursor: str, state: str):
    world.start()
    world.say(3)
    if state != "running":
        world.finish()
    if state == "expired":
        world.stream.drop(world.job)
    with pytest.raises(BadCursor):
        world.view(cursor)
    assert world.fanout.jobs == 0


def test_an_unknown_job_is_refused(world: World):
    world.job = "job_" + "0" * 26
    with pytest.raises(NotFound):
        world.view()


def test_a_gap_in_the_feed_is_filled_from_the_log(world: World):
    world = World(feed_size=1)
    world.start()
    screen, stream = Screen(), world.view().events()
    screen.show(next(stream))
    for _ in range(4):
        world.say(2)
    world.finish()
    screen.watch(stream)
    assert (screen.text, screen.types[-1]) == (world.text, "done")
    assert "reset" not in screen.types


def test_a_new_attempt_resets(world: World):
    world.start()
    screen, stream = Screen(), world.view().events()
    world.say(4)
    screen.show(next(stream))
    screen.show(next(stream))
    world.store.release_many("w", [claimed(world)])
    world.start()
    world.finish()
    screen.watch(stream)
    assert screen.types == ["started", "token", "reset", "token", "done"]
    assert screen.text == world.text


def claimed(world: World) -> Held:
    return Held(world.job, world.attempt)


def test_a_viewer_ahead_of_the_log_is_reset_and_never_repeated(world: World):
    """Redis came back with older data, and the worker went on with other cuts between the events."""
    world.start()
    screen, stream = Screen(), world.view().events()
    world.say(6)
    screen.show(next(stream))
    screen.show(next(stream))
    world.stream.drop_tail(world.job, 1)
    world.stream.append([world.token(0, 4), world.token(4, 8)])
    world.pos = 8
    world.finish()
    screen.watch(stream)
    assert screen.types.count("reset") == 1
    assert (screen.text, screen.types[-1]) == (world.text, "done")


def test_a_log_that_lost_its_beginning_is_not_shown_and_sql_ends_the_stream(world: World):
    world.start()
    screen, stream = Screen(), world.view().events()
    world.say(3)
    screen.show(next(stream))
    screen.show(next(stream))
    world.stream.drop(world.job)
    world.stream.append([world.token(5, 8), world.token(8, 12)])
    world.pos = 12
    world.commit()
    world.tell_end()
    screen.watch(stream)
    assert screen.types == ["started", "token", "reset", "token", "done"]
    assert screen.text == world.text


def test_a_lost_terminal_event_is_made_good_from_sql(world: World):
    world.start()
    world.say(12)
    stream, screen = world.view().events(), Screen()
    for _ in range(2):
        screen.show(next(stream))
    world.commit()
    assert next(stream) is None, "SQL was asked before the silence was long enough"
    world.clock.advance(5)
    screen.watch(stream)
    assert screen.types == ["started", "token", "done"]
    assert screen.text == world.text


def test_the_end_made_from_sql_equals_the_one_of_the_log(world: World):
    world.start()
    world.finish()
    logged = world.stream.read(world.job, START)[-1]
    world.stream.drop(world.job)
    assert list(world.view().events())[-1] == logged


def test_b11_after_the_log_expired_a_viewer_gets_reset_and_the_whole_text(world: World):
    world.start()
    world.finish()
    world.clock.advance(61)
    screen = Screen().watch(world.view().events())
    assert screen.types == ["reset", "token", "done"]
    assert (screen.text, screen.ids) == (world.text, list(world.ids))


def test_a_viewer_that_returns_after_the_log_expired(world: World):
    world.start()
    world.say(5)
    world.finish()
    shown = world.stream.read(world.job, START)
    world.stream.drop(world.job)
    middle, last = shown[1], shown[2]
    again = list(world.view(str(middle.cursor)).events())
    assert [str(event.type) for event in again] == ["reset", "token", "done"]
    assert all(a.cursor < b.cursor for a, b in zip([middle, *again], again, strict=False)), "ids went back"
    assert [str(event.type) for event in world.view(str(last.cursor)).events()] == ["done"]


@pytest.mark.parametrize("cut", [1, 2])
def test_a_viewer_that_drops_within_the_stored_text_loses_nothing(world: World, cut: int):
    world.start()
    world.say(5)
    world.finish()
    middle = world.stream.read(world.job, START)[1]
    world.stream.drop(world.job)
    screen = Screen()
    screen.ids, screen.text = list(world.ids[:5]), world.text[:5]
    for after in range(2):
        stream = world.view(str(screen.seen[-1].cursor if after else middle.cursor)).events()
        for event in stream:
            screen.show(event)
            if not after and len(screen.seen) == cut:
                break
    assert screen.ended
    assert screen.text == world.text


def test_a_failed_job_ends_with_an_error_and_keeps_what_was_shown(world: World):
    world.start()
    world.say(5)
    stream, screen = world.view().events(), Screen()
    for _ in range(2):
        screen.show(next(stream))
    world.store.finish_many([Finish(world.job, 1, "w", Status.FAILED, error=JobError("engine_failed", "it failed"))])
    world.clock.advance(5)
    screen.watch(stream)
    assert screen.types == ["started", "token", "error"]
    assert screen.seen[-1].cursor > screen.seen[-2].cursor
    assert world.view(str(screen.seen[-1].cursor)).at_end


def test_a_cached_job_streams_without_a_reset():
    world = World()
    (submitted,) = world.store.submit([make_job(clock=world.clock, cache="hit", outcome=world.outcome())])
    world.job = submitted.job.id
    screen = Screen().watch(world.view().events())
    assert screen.types == ["token", "done"]
    assert screen.text == world.text
    assert world.view(str(screen.seen[-1].cursor)).at_end


def test_a_job_with_several_choices_is_completed_choice_by_choice(world: World):
    world.start()
    choices = (Choice(0, "ab", (1, 2), "stop"), Choice(1, "", (), "stop"), Choice(2, "c", (3,), "length"))
    world.store.finish_many([Finish(world.job, 1, "w", Status.SUCCEEDED, Outcome(choices, Usage(1, 3)))])
    job = world.store.get(world.job)
    assert job is not None
    found = completion(job, START)
    assert [(event.data["index"], event.data["pos"]) for event in found if event.type is EventType.TOKEN] == [(0, 0), (2, 2)]
    assert found[-1].cursor == events.terminal_cursor(1, 3)


def test_redis_away_does_not_end_a_viewer(world: World):
    world.start()
    world.stream.away = True
    stream, screen = world.view().events(), Screen()
    assert next(stream) is None
    world.say(12)
    assert next(stream) is None
    world.stream.away = False
    world.commit()
    world.tell_end()
    screen.watch(stream)
    assert (screen.text, screen.types[-1]) == (world.text, "done")


def test_redis_away_for_good_is_ended_by_sql(world: World):
    world.start()
    world.stream.away = True
    stream = world.view().events()
    assert next(stream) is None
    world.commit()
    world.clock.advance(5)
    screen = Screen().watch(stream)
    assert screen.types == ["reset", "token", "done"]


def test_stop_ends_a_viewer_and_frees_its_feed(world: World):
    world.start()
    stream = world.view().events()
    next(stream)
    world.stop.set()
    assert [event for event in stream if event is not None] == []
    assert world.fanout.jobs == 0


def test_a_viewer_that_leaves_frees_its_feed(world: World):
    viewer = world.view()
    stream = viewer.events()
    next(stream)
    assert world.fanout.jobs == 1
    stream.close()
    assert world.fanout.jobs == 0
    viewer.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(1, 5)),
        st.tuples(st.just("look"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["restart", "return", "lag", "away", "back", "lose_log", "lose_tail", "silence"]), st.integers(0, 6)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, told=st.booleans(), expired=st.booleans(), size=st.sampled_from([1, 2, 1024]))
def test_whatever_happens_a_viewer_sees_each_token_once_in_order(steps: list[tuple[str, int]], told: bool, expired: bool, size: int):
    """Appends, a slow reader, reconnects with the last id, workers that start anew, Redis away, logs lost."""
    world, screen = World(feed_size=size), Screen()
    world.start()
    stream = world.view().events()
    for verb, number in steps:
        if verb == "say":
            world.say(number)
        elif verb == "look":
            for _ in range(number):
                event = next(stream)
                if event is not None:
                    screen.show(event)
        elif verb == "restart":
            world.store.release_many("w", [claimed(world)])
            world.start()
        elif verb == "return":
            stream.close()
            try:
                stream = world.view(str(screen.seen[-1].cursor) if screen.seen else "").events()
            except BadCursor:  # the log was lost: the client starts from nothing
                screen = Screen()
                stream = world.view().events()
        elif verb == "lag":
            world.fanout.reconnect()
        elif verb in ("away", "back"):
            world.stream.away = verb == "away"
        elif verb == "lose_log":
            world.stream.drop(world.job)
        elif verb == "lose_tail":
            world.stream.drop_tail(world.job, number)
        else:
            world.clock.advance(3)
    world.stream.away = False
    world.say(len(world.ids))
    world.commit()
    if told:
        world.tell_end()
    if expired:
        world.stream.drop(world.job)
    screen.watch(stream, world.clock)
    assert screen.ended
    assert screen.text == world.text
    assert screen.ids == list(world.ids)


def test_the_strict_screen_complains():
    """The checker itself: a repeat, a gap, an event after the end."""
    world = World()
    world.attempt = 1
    for second in (world.token(0, 2), world.token(3, 4)):
        screen = Screen()
        screen.show(world.token(0, 2))
        with pytest.raises(AssertionError):
            screen.show(second)
    ended = Screen()
    end = events.terminal(world.job, 1, Status.SUCCEEDED, outcome=None, error=None, timings=Timings(), cache="off")
    ended.show(end)
    with pytest.raises(AssertionError):
        ended.show(replace(end, cursor=Cursor(1, 999)))
