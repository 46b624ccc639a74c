"""Live events reach every viewer, and whoever misses some is told so."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from promptmill.core.events import START, EventType
from storage.feeds import FEED_EVENTS
from tests.support.streams import DEADLINE, KINDS, Streams, ending, opening, streams, token, watch


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest) -> Iterator[Streams]:
    with streams(request.param, request) as made:
        yield made


def test_every_viewer_of_a_job_gets_its_events_and_no_others(both: Streams) -> None:
    first, second, other = both.fanout.open("a"), both.fanout.open("a"), both.fanout.open("b")
    both.stream.append([opening("a"), token("a", 0), opening("b")])
    for feed in (first, second):
        assert feed.get(DEADLINE) == opening("a")
        assert feed.get(DEADLINE) == token("a", 0)
    assert other.get(DEADLINE) == opening("b")
    assert [feed.get(0) for feed in (first, second, other)] == [None] * 3
    assert not any(feed.lagging for feed in (first, second, other))


def test_a_viewer_wakes_when_its_event_comes(both: Streams) -> None:
    feed = both.fanout.open("a")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(feed.get, DEADLINE)
        both.stream.append([opening("a")])
        assert waiting.result(DEADLINE) == opening("a")


def test_a_closed_feed_gets_nothing_and_its_neighbour_goes_on(both: Streams) -> None:
    closed, stays = both.fanout.open("a"), both.fanout.open("a")
    both.fanout.close_feed(closed)
    both.fanout.close_feed(closed)
    both.stream.append([opening("a")])
    assert stays.get(DEADLINE) == opening("a")
    assert closed.get(0) is None


def test_a_slow_viewer_lags_without_hurting_others_and_catches_up_from_the_log(both: Streams) -> None:
    slow, quick = both.fanout.open("a"), both.fanout.open("a")
    events = [token("a", pos) for pos in range(FEED_EVENTS + 500)]
    for at in range(0, len(events), 500):
        part = events[at : at + 500]
        both.stream.append(part)
        assert [quick.get(DEADLINE) for _ in part] == part
    assert not quick.lagging

    assert slow.get(DEADLINE) is None
    assert slow.lagging
    shown = both.stream.read("a", START)
    assert shown == events
    slow.caught_up()
    assert not slow.lagging

    both.stream.append([ending("a", len(events))])
    rest = [slow.get(DEADLINE)]
    while rest[-1] is not None and not rest[-1].type.terminal:
        rest.append(slow.get(DEADLINE))
    fresh = [event for event in rest if event is not None and event.cursor > shown[-1].cursor]
    assert fresh == [ending("a", len(events))]


def test_viewers_that_attach_at_any_moment_see_every_token_once_and_in_order(both: Streams) -> None:
    count = 300
    attached = threading.Semaphore(0)

    def viewer(after_read: int) -> list[int]:
        for _ in range(after_read):
            both.stream.read("a", START)
        attached.release()
        shown = watch(both, "a")
        assert [event.type for event in (shown[0], shown[-1])] == [EventType.STARTED, EventType.DONE]
        assert [event.cursor for event in shown] == sorted({event.cursor for event in shown})
        return [event.data["pos"] for event in shown if event.type is EventType.TOKEN]

    with ThreadPoolExecutor(6) as pool:
        viewers = [pool.submit(viewer, 3 * number) for number in range(5)]
        attached.acquire()  # write while the others are still about to attach
        both.stream.append([opening("a")])
        for pos in range(0, count, 3):
            both.stream.append([token("a", pos), token("a", pos + 1), token("a", pos + 2)])
        late = pool.submit(viewer, 0)
        both.stream.append([ending("a", count)])
        for done in (*viewers, late):
            assert done.result(DEADLINE * 2) == list(range(count))


def test_a_viewer_resumes_after_its_last_id_without_repeats(both: Streams) -> None:
    events = [opening("a"), *(token("a", pos) for pos in range(6)), ending("a", 6)]
    both.stream.append(events[:4])
    with ThreadPoolExecutor(1) as pool:
        resumed = pool.submit(watch, both, "a", events[2].cursor)
        both.stream.append(events[4:])
        assert resumed.result(DEADLINE * 2) == events[3:]
