from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition, Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.window import MicroBatcher, Reason, Window
from promptmill.core.clock import SystemClock
from promptmill.core.errors import Unavailable

DEADLINE_S = 30
LONG_S = 1_000.0  # a window that only a test's failure would wait for

times_st = st.lists(st.integers(0, 50), min_size=1, max_size=8).map(lambda ts: [float(t) for t in sorted(ts)])


class ArrivalClock(SystemClock):
    """Lets a test wait until n items have come: the batcher reads the clock under its lock for each."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._reads = 0

    def monotonic(self) -> float:
        with self._changed:
            self._reads += 1
            self._changed.notify_all()
        return super().monotonic()

    @property
    def reads(self) -> int:
        return self._reads

    def wait_for_reads(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._reads >= count, DEADLINE_S)


class Recorder:
    """Doubles numbers and keeps the batches; ``gate`` holds the runs back until it is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.began = Event()
        self.gate = Event()
        self.gate.set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        self.began.set()
        assert self.gate.wait(DEADLINE_S)
        if -1 in items:
            raise ValueError("bad item")
        return [2 * item for item in items]


def call_all(batcher: Callable[[int], int], items: Sequence[int]) -> list[Future[int]]:
    pool = ThreadPoolExecutor(len(items))
    futures = [pool.submit(batcher, item) for item in items]
    pool.shutdown(wait=False)
    return futures


# -- the decision


@given(times_st, st.floats(0, 100))
def test_a_window_is_due_by_size_or_by_age_of_its_first_item_alone(arrivals: list[float], now: float) -> None:
    window = Window(max_size=5, probe_s=3.0, max_wait_s=20.0)
    company = len(arrivals) > 1 and arrivals[1] <= arrivals[0] + 3
    expected = len(arrivals) >= 5 or now >= arrivals[0] + (20 if company else 3)
    assert (window.reason(arrivals, now) is not None) == expected == (now >= window.due_at(arrivals))


@pytest.mark.parametrize(
    ("arrivals", "now", "reason"),
    [
        ([0.0], 2.9, None),
        ([0.0], 3.0, "gap"),
        ([0.0, 1.0], 3.0, None),
        ([0.0, 1.0], 19.9, None),
        ([0.0, 1.0], 20.0, "time"),
        ([0.0, 5.0], 5.0, "gap"),  # the second came after the probe: the first was due before
        ([0.0, 0.0, 0.0], 0.0, "size"),
    ],
)
def test_the_reason_of_a_batch(arrivals: list[float], now: float, reason: Reason | None) -> None:
    assert Window(max_size=3, probe_s=3.0, max_wait_s=20.0).reason(arrivals, now) == reason


def test_a_window_without_times_is_due_at_once() -> None:
    assert Window(64, 0.0, 0.0).reason([7.0], 7.0) == "gap"


# -- the batcher


def test_a_full_batch_goes_at_once_and_each_caller_gets_its_own_result() -> None:
    run = Recorder()
    batcher = MicroBatcher(run, max_size=4, probe_s=LONG_S, max_wait_s=LONG_S)
    assert [future.result(DEADLINE_S) for future in call_all(batcher, [1, 2, 3, 4])] == [2, 4, 6, 8]
    assert [sorted(batch) for batch in run.batches] == [[1, 2, 3, 4]]


def test_a_lone_item_goes_after_the_probe() -> None:
    told: list[tuple[int, float, Reason]] = []
    batcher = MicroBatcher(
        Recorder(), max_size=4, probe_s=0.002, max_wait_s=LONG_S, on_batch=lambda size, waited, reason: told.append((size, waited, reason))
    )
    assert batcher(21) == 42
    [(size, waited, reason)] = told
    assert (size, reason) == (1, "gap")
    assert waited >= 0.002


def test_a_second_item_stretches_the_window() -> None:
    reasons: list[Reason] = []
    batcher = MicroBatcher(
        Recorder(), max_size=8, probe_s=LONG_S, max_wait_s=0.02, on_batch=lambda size, waited, reason: reasons.append(reason)
    )
    assert sorted(future.result(DEADLINE_S) for future in call_all(batcher, [1, 2])) == [2, 4]
    assert reasons == ["time"]


def test_what_comes_during_a_run_gathers_for_the_next_one() -> None:
    run, clock = Recorder(), ArrivalClock()
    run.gate.clear()
    batcher = MicroBatcher(run, max_size=64, probe_s=0.0, max_wait_s=0.0, clock=clock)
    first = call_all(batcher, [0])
    assert run.began.wait(DEADLINE_S)
    before = clock.reads
    others = call_all(batcher, [1, 2, 3, 4, 5])
    clock.wait_for_reads(before + 5)
    run.gate.set()
    assert [future.result(DEADLINE_S) for future in first + others] == [0, 2, 4, 6, 8, 10]
    assert [sorted(batch) for batch in run.batches] == [[0], [1, 2, 3, 4, 5]]


def test_no_batch_is_larger_than_max_size_and_the_rest_follows() -> None:
    run, clock = Recorder(), ArrivalClock()
    run.gate.clear()
    batcher = MicroBatcher(run, max_size=2, probe_s=0.0, max_wait_s=0.0, clock=clock)
    first = call_all(batcher, [0])
    assert run.began.wait(DEADLINE_S)
    before = clock.reads
    others = call_all(batcher, [1, 2, 3, 4, 5])
    clock.wait_for_reads(before + 5)
    run.gate.set()
    assert sorted(future.result(DEADLINE_S) for future in first + others) == [0, 2, 4, 6, 8, 10]
    assert [len(batch) for batch in run.batches] == [1, 2, 2, 1]


def test_an_error_reaches_every_caller_of_the_batch() -> None:
    batcher = MicroBatcher(Recorder(), max_size=3, probe_s=LONG_S, max_wait_s=LONG_S)
    for future in call_all(batcher, [1, -1, 3]):
        with pytest.raises(ValueError, match="bad item"):
            future.result(DEADLINE_S)


def test_a_bad_item_that_is_retried_alone_does_not_fail_its_neighbours() -> None:
    run = Recorder()
    batcher = MicroBatcher(run, max_size=3, probe_s=LONG_S, max_wait_s=LONG_S, retry_alone=True)
    good, bad, fine = call_all(batcher, [1, -1, 3])
    assert (good.result(DEADLINE_S), fine.result(DEADLINE_S)) == (2, 6)
    with pytest.raises(ValueError, match="bad item"):
        bad.result(DEADLINE_S)
    assert sorted(map(len, run.batches)) == [1, 1, 1, 3]


def test_an_error_does_not_stop_the_batcher() -> None:
    batcher = MicroBatcher(Recorder(), max_size=1, probe_s=0.0, max_wait_s=0.0)
    with pytest.raises(ValueError, match="bad item"):
        batcher(-1)
    assert batcher(4) == 8


def test_a_function_that_loses_a_result_is_an_error_of_all() -> None:
    batcher = MicroBatcher(lambda items: items[1:], max_size=2, probe_s=LONG_S, max_wait_s=LONG_S)
    for future in call_all(batcher, [1, 2]):
        with pytest.raises(ValueError, match="batch of 2 got 1"):
            future.result(DEADLINE_S)


def test_close_runs_what_waits_and_refuses_what_comes_later() -> None:
    clock = ArrivalClock()
    batcher = MicroBatcher(Recorder(), max_size=8, probe_s=LONG_S, max_wait_s=LONG_S, clock=clock)
    waiting = call_all(batcher, [1])
    clock.wait_for_reads(1)
    batcher.close()
    try:
        assert waiting[0].result(DEADLINE_S) == 2
    finally:
        with pytest.raises(Unavailable):
            batcher(2)


def test_many_threads_each_get_their_own_result() -> None:
    run = Recorder()
    batcher = MicroBatcher(run, max_size=7, probe_s=0.0, max_wait_s=0.0)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(batcher, range(500))) == [2 * n for n in range(500)]
    assert sorted(item for batch in run.batches for item in batch) == list(range(500))
    assert max(map(len, run.batches)) <= 7
