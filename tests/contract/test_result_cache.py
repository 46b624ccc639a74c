"""Results of deterministic requests: exact, per tenant, bounded by age and bytes."""

from collections.abc import Callable, Iterator

import pytest

from promptmill.core.ports import ResultCache
from storage.cache import SqlResultCache, stored
from storage.db import Database
from storage.memory import MemoryResultCache
from tests.support.clock import FakeClock
from tests.support.factories import make_outcome, make_scored_outcome

Make = Callable[..., ResultCache]
KINDS = {"sqlite+fakeredis": ("sqlite_url", "fakeredis_url"), "postgres+valkey": ("postgres_url", "redis_url")}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", *KINDS])
def make(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[Make]:
    """A cache with given bounds; default: a megabyte, an hour."""
    if request.param == "memory":
        yield lambda max_bytes=1_000_000, max_age_seconds=3600.0: MemoryResultCache(
            max_bytes=max_bytes, max_age_seconds=max_age_seconds, clock=clock
        )
        return
    sql, redis = (request.getfixturevalue(name) for name in KINDS[request.param])
    db = Database.connect(sql, clock=clock)
    made = []

    def build(max_bytes: int = 1_000_000, max_age_seconds: float = 3600.0) -> ResultCache:
        made.append(SqlResultCache(db, redis, max_bytes=max_bytes, max_age_seconds=max_age_seconds, hot_seconds=60.0, clock=clock))
        return made[-1]

    yield build
    for cache in made:
        cache.close()
    db.close()


def test_what_was_put_comes_back_equal(make: Make) -> None:
    cache = make()
    outcome = make_outcome(text="Zoë \x00 \ud83d ½\n", ids=(5, 0, 7))
    assert cache.get("default", "k") is None
    cache.put("default", "k", outcome)
    assert cache.get("default", "k") == outcome


def test_logprobs_come_back_equal(make: Make) -> None:
    cache = make()
    cache.put("default", "k", make_scored_outcome())
    assert cache.get("default", "k") == make_scored_outcome()


def test_a_tenant_never_sees_another_ones_result(make: Make) -> None:
    cache = make()
    cache.put("one", "k", make_outcome("first"))
    assert cache.get("two", "k") is None
    cache.put("two", "k", make_outcome("second"))
    assert cache.get("one", "k") == make_outcome("first")
    assert cache.get("two", "k") == make_outcome("second")


def test_a_newer_put_replaces(make: Make) -> None:
    cache = make()
    cache.put("default", "k", make_outcome("old"))
    cache.put("default", "k", make_outcome("new"))
    assert cache.get("default", "k") == make_outcome("new")


def test_an_entry_over_age_is_no_answer_and_is_evicted(make: Make, clock: FakeClock) -> None:
    cache = make(max_age_seconds=100.0)
    cache.put("default", "old", make_outcome())
    clock.advance(60)
    cache.put("default", "young", make_outcome())
    clock.advance(50)
    assert cache.get("default", "old") is None
    assert cache.get("default", "young") == make_outcome()
    assert cache.evict() == 1
    assert cache.evict() == 0
    assert cache.get("default", "young") == make_outcome()


def test_over_the_byte_bound_the_oldest_go(make: Make, clock: FakeClock) -> None:
    size = len(stored(make_outcome()))
    cache = make(max_bytes=3 * size)
    for number in range(5):
        cache.put("default", f"k{number}", make_outcome())
        clock.advance(1)
    assert cache.evict() == 2
    assert [cache.get("default", f"k{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert cache.evict() == 0


def test_many_entries_are_evicted_in_one_call(make: Make, clock: FakeClock) -> None:
    size = len(stored(make_outcome()))
    cache = make(max_bytes=10 * size, max_age_seconds=100.0)
    for number in range(40):
        cache.put("default", f"k{number}", make_outcome())
    clock.advance(1)
    cache.put("default", "last", make_outcome())
    assert cache.evict() == 31
    assert cache.get("default", "last") is not None


def test_an_entry_larger_than_the_bound_is_not_kept(make: Make) -> None:
    cache = make(max_bytes=100)
    cache.put("default", "k", make_outcome("x" * 200))
    assert cache.get("default", "k") is None


def test_a_bound_of_zero_is_no_cache(make: Make) -> None:
    make().put("default", "k", make_outcome())
    off = make(max_bytes=0)
    off.put("default", "k2", make_outcome())
    assert off.get("default", "k") is None
    assert off.get("default", "k2") is None
