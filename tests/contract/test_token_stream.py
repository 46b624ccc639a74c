"""The log of each job: ordered, replayable, fenced, and published exactly once."""

from collections.abc import Iterator

import pytest

from promptmill.core.errors import BadCursor
from promptmill.core.events import START, Cursor, EventType, StreamEvent
from promptmill.core.ports import Append, Feed
from tests.support.streams import DEADLINE, KINDS, Streams, ending, opening, streams, token


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest) -> Iterator[Streams]:
    with streams(request.param, request) as made:
        yield made


def live(feed: Feed, count: int) -> list[StreamEvent]:
    events = []
    for _ in range(count):
        event = feed.get(DEADLINE)
        assert event is not None, f"only {events} came"
        events.append(event)
    return events


def test_events_come_back_whole_and_in_order(both: Streams) -> None:
    events = [opening("a"), token("a", 0, text="Zoë \x00 \ud83d ½"), token("a", 1), ending("a", 2)]
    assert both.stream.append(events) == {"a": Append.ACCEPTED}
    assert both.stream.read("a", START) == events


def test_read_goes_on_after_the_cursor(both: Streams) -> None:
    events = [opening("a"), *(token("a", pos) for pos in range(5))]
    both.stream.append(events)
    assert both.stream.read("a", events[2].cursor) == events[3:]
    assert both.stream.read("a", events[-1].cursor) == []
    assert both.stream.read("a", Cursor(1, events[2].cursor.seq + 7)) == events[3:]
    assert both.stream.read("a", Cursor(9, 0)) == []


def test_last_is_the_newest_id_and_none_without_a_log(both: Streams) -> None:
    assert both.stream.last("a") is None
    assert both.stream.read("a", START) == []
    both.stream.append([opening("a"), token("a", 0)])
    assert both.stream.last("a") == token("a", 0).cursor


def test_the_same_events_twice_are_kept_and_published_once(both: Streams) -> None:
    feed = both.fanout.open("a")
    first = [opening("a"), token("a", 0)]
    both.stream.append(first)
    assert both.stream.append([*first, token("a", 1)]) == {"a": Append.ACCEPTED}
    assert both.stream.append([token("a", 1)]) == {"a": Append.ACCEPTED}
    assert both.stream.append([ending("a", 2)]) == {"a": Append.ACCEPTED}
    assert both.stream.append([ending("a", 2)]) == {"a": Append.ACCEPTED}
    other = both.fanout.open("z")
    both.stream.append([opening("z")])  # the channel is ordered: after this one nothing of "a" can follow
    expected = [*first, token("a", 1), ending("a", 2)]
    assert both.stream.read("a", START) == expected
    assert live(feed, 4) == expected
    assert live(other, 1) == [opening("z")]
    assert feed.get(0) is None
    assert not feed.lagging


def test_a_higher_attempt_fences_the_lower_and_nothing_of_it_is_published(both: Streams) -> None:
    feed = both.fanout.open("a")
    both.stream.append([opening("a"), token("a", 0)])
    assert both.stream.append([opening("a", 2)]) == {"a": Append.ACCEPTED}
    assert both.stream.append([token("a", 1), token("a", 2), ending("a", 3)]) == {"a": Append.FENCED}
    both.stream.append([token("a", 0, attempt=2)])
    expected = [opening("a"), token("a", 0), opening("a", 2), token("a", 0, attempt=2)]
    assert expected[2].type is EventType.RESET
    assert both.stream.read("a", START) == expected
    assert live(feed, 4) == expected


def test_a_marker_of_an_attempt_that_is_over_is_fenced(both: Streams) -> None:
    both.stream.append([opening("a", 3)])
    assert both.stream.append([opening("a", 2)]) == {"a": Append.FENCED}
    assert both.stream.append([opening("a", 3)]) == {"a": Append.ACCEPTED}


def test_one_flush_serves_many_jobs_and_only_the_fenced_one_is_refused(both: Streams) -> None:
    feeds = {job: both.fanout.open(job) for job in "abc"}
    both.stream.append([opening("a"), opening("b", 2), opening("c")])
    flush = [token("a", 0), token("b", 0), token("c", 0), token("a", 1), token("b", 1), ending("c", 1)]
    assert both.stream.append(flush) == {"a": Append.ACCEPTED, "b": Append.FENCED, "c": Append.ACCEPTED}
    assert both.stream.read("a", START) == [opening("a"), token("a", 0), token("a", 1)]
    assert both.stream.read("b", START) == [opening("b", 2)]
    assert both.stream.read("c", START) == [opening("c"), token("c", 0), ending("c", 1)]
    for job, feed in feeds.items():
        log = both.stream.read(job, START)
        assert live(feed, len(log)) == log
        assert feed.get(0) is None


def test_a_repeated_flush_writes_what_the_first_one_did_not(both: Streams) -> None:
    """The answer of the first was lost: the caller repeats it together with newer events."""
    both.stream.append([opening("a"), token("a", 0), token("a", 1)])
    both.stream.append([token("a", 0), token("a", 1), token("a", 2)])
    assert [event.cursor for event in both.stream.read("a", START)] == [opening("a").cursor, *(token("a", n).cursor for n in range(3))]


def test_an_empty_flush_is_nothing(both: Streams) -> None:
    assert both.stream.append([]) == {}


def test_a_log_is_gone_a_while_after_its_terminal_event(both: Streams) -> None:
    both.stream.append([opening("a"), token("a", 0), ending("a", 1), opening("b")])
    both.pass_time("a", 59.0)
    assert both.stream.last("a") is not None
    both.pass_time("a", 1.5)
    assert both.stream.last("a") is None
    assert both.stream.read("a", START) == []
    assert both.stream.last("b") is not None


def test_the_log_can_be_reached(both: Streams) -> None:
    both.stream.check()


@pytest.mark.parametrize("text", ["", "1", "1-", "-1-2", "1-2-3", "01-2", "1-2 ", "x-y", "1-99999999999999999"])
def test_a_malformed_cursor_is_refused_before_any_store(text: str) -> None:
    with pytest.raises(BadCursor):
        Cursor.parse(text)
