"""The token stream and the fan-out over each implementation, and a viewer as the API has one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import redis

from promptmill.core.events import START, Cursor, StreamEvent, started, terminal, tokens
from promptmill.core.jobs import Status, Timings
from promptmill.core.ports import FanOut, TokenStream
from storage.fanout import RedisFanOut
from storage.memory import MemoryFanOut, MemoryTokenStream
from storage.stream import RedisTokenStream
from tests.support.clock import FakeClock
from tests.support.factories import make_outcome
from tests.support.servers import eventually

KINDS = ("memory", "fakeredis", "valkey")
DEADLINE = 20.0


@dataclass
class Streams:
    """``pass_time(job, seconds)``: let the log's clock go on; Redis has its own, so the key's is set back."""

    stream: TokenStream
    fanout: FanOut
    pass_time: Callable[[str, float], None]


@contextmanager
def streams(kind: str, request: pytest.FixtureRequest, *, ttl_seconds: float = 60.0) -> Iterator[Streams]:
    if kind == "memory":
        clock = FakeClock()
        memory = MemoryTokenStream(ttl_seconds=ttl_seconds, clock=clock)
        fan = MemoryFanOut(memory)
        fan.start()
        yield Streams(memory, fan, lambda _job, seconds: clock.advance(seconds))
        fan.close()
        return
    url = request.getfixturevalue({"fakeredis": "fakeredis_url", "valkey": "redis_url"}[kind])
    stream, fanout = RedisTokenStream(url, ttl_seconds=ttl_seconds), RedisFanOut(url)
    fanout.start()
    try:
        wait_subscribed(fanout)
        with redis.Redis.from_url(url) as client:

            def pass_time(job: str, seconds: float) -> None:
                left = client.pttl(f"pm:tok:{job}")
                assert left != -1, "a log without expiry"
                client.pexpire(f"pm:tok:{job}", max(0, left - int(seconds * 1000)))

            yield Streams(stream, fanout, pass_time)
    finally:
        fanout.close()
        stream.close()


def wait_subscribed(fanout: FanOut) -> None:
    def subscribed() -> bool:
        feed = fanout.open("probe")
        fanout.close_feed(feed)
        return not feed.lagging

    eventually(subscribed, what="the subscription")


def token(job: str, pos: int, *, attempt: int = 1, text: str = "x") -> StreamEvent:
    return tokens(job, attempt, index=0, pos=pos, text=text, token_ids=(100 + pos,))


def opening(job: str, attempt: int = 1) -> StreamEvent:
    return started(job, attempt, "tiny")


def ending(job: str, count: int, attempt: int = 1) -> StreamEvent:
    outcome = make_outcome(ids=tuple(range(count)))
    return terminal(job, attempt, Status.SUCCEEDED, outcome=outcome, error=None, timings=Timings(), cache="miss")


def watch(streams: Streams, job: str, after: Cursor = START) -> list[StreamEvent]:
    """What a viewer shows until the terminal event: register, read the log, follow; again when lagging."""
    feed = streams.fanout.open(job)
    shown: list[StreamEvent] = []
    last = after

    def show(events: list[StreamEvent]) -> None:
        nonlocal last
        for event in events:
            if event.cursor > last:
                shown.append(event)
                last = event.cursor

    try:
        show(streams.stream.read(job, last))
        while not (shown and shown[-1].type.terminal):
            event = feed.get(DEADLINE)
            if event is not None:
                show([event])
            else:
                assert feed.lagging, f"nothing came within {DEADLINE} s after {last}"
                show(streams.stream.read(job, last))
                feed.caught_up()
        return shown
    finally:
        streams.fanout.close_feed(feed)
