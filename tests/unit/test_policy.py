import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.policy import (
    GAPS_KNOWN,
    LENGTH_STEP,
    OVERTAKEN_MOST,
    OVERTAKEN_S,
    SILENT_GAPS,
    SILENT_S,
    ArrivalRate,
    Candidate,
    admission_order,
    choose,
    has_row,
    idle_due_at,
    prefill_key,
)
from promptmill.core.jobs import Priority

INTERACTIVE, STANDARD, BULK = Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK
NOW = 100.0

# -- rows


def test_bulk_is_asked_first_until_it_has_its_minimum_unless_a_wide_request_lacks_rows() -> None:
    assert admission_order(0)[0] is BULK
    assert admission_order(1) == (INTERACTIVE, STANDARD, BULK)
    assert admission_order(0, wide_waits=True) == (INTERACTIVE, STANDARD, BULK)


@pytest.mark.parametrize(
    ("priority", "width", "running", "expected"),
    [
        (STANDARD, 1, {BULK: 2, STANDARD: 1}, True),
        (STANDARD, 1, {BULK: 2, STANDARD: 2}, False),  # the other two are reserved
        (INTERACTIVE, 2, {BULK: 2, STANDARD: 2}, True),
        (INTERACTIVE, 3, {BULK: 2, STANDARD: 2}, False),
        (BULK, 1, {INTERACTIVE: 5}, True),
        (STANDARD, 2, {INTERACTIVE: 5}, False),
        (STANDARD, 3, {STANDARD: 1}, True),
        (STANDARD, 4, {STANDARD: 1}, False),
        (STANDARD, 9, {}, True),  # wider than what there is at present: alone
        (INTERACTIVE, 1, {STANDARD: 9}, False),  # the limit was lowered below what runs
    ],
)
def test_a_request_has_rows_if_all_of_its_width_fit(priority: Priority, width: int, running: dict[Priority, int], expected: bool) -> None:
    assert has_row(priority, running, rows=4, reserved=2, width=width) is expected


@given(
    st.sampled_from(Priority),
    st.dictionaries(st.sampled_from(Priority), st.integers(0, 6)),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_rows_are_never_exceeded_and_everybody_fits_in_the_end(
    priority: Priority, running: dict[Priority, int], rows: int, reserved: int, width: int
) -> None:
    assert has_row(priority, {}, rows, reserved, width)
    if sum(running.values()) and has_row(priority, running, rows, reserved, width):
        after = Counter(running)
        after[priority] += width
        assert sum(after.values()) <= rows + reserved
        if priority is not INTERACTIVE:
            assert after[STANDARD] + after[BULK] <= rows


def test_prefill_goes_by_rank_but_each_eighth_step_by_age() -> None:
    rows = [(BULK, 1), (INTERACTIVE, 2)]
    firsts = [min(rows, key=lambda row: prefill_key(row[0], row[1], step))[0] for step in range(16)]
    assert firsts == [*[INTERACTIVE] * 7, BULK] * 2


# -- the choice among equals


def test_the_oldest_goes_first_when_nothing_else_differs() -> None:
    assert choose([Candidate(0, 50), Candidate(0, 10), Candidate(0, 90)], None, NOW) == 0


def test_a_shared_beginning_counts_more_than_a_like_length_and_that_more_than_age() -> None:
    assert choose([Candidate(0, 900), Candidate(2, 900), Candidate(1, 100)], 100.0, NOW) == 1
    assert choose([Candidate(0, 900), Candidate(0, 500), Candidate(0, 120)], 100.0, NOW) == 2


def test_small_differences_of_length_do_not_count() -> None:
    assert choose([Candidate(0, 100 + LENGTH_STEP - 1), Candidate(0, 100)], 100.0, NOW) == 0


def test_nobody_goes_before_one_that_was_overtaken_often_enough_or_long_enough_ago() -> None:
    better = Candidate(3, 50)
    assert choose([Candidate(0, 50, OVERTAKEN_MOST, NOW), better], None, NOW) == 0
    assert choose([Candidate(0, 50, OVERTAKEN_MOST - 1, NOW), better], None, NOW) == 1
    assert choose([Candidate(0, 50, 1, NOW - OVERTAKEN_S), better], None, NOW) == 0
    assert choose([Candidate(0, 50), Candidate(1, 50), Candidate(0, 50, OVERTAKEN_MOST, NOW), better], None, NOW) == 1


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500)), min_size=1, max_size=60),
    st.lists(st.floats(0, 0.15), min_size=60, max_size=60),
    st.one_of(st.none(), st.floats(1, 500)),
    st.integers(1, 32),
)
def test_nobody_is_overtaken_more_than_eight_times_nor_200_ms_after_the_first(
    requests: list[tuple[int, int]], pauses: list[float], running_length: float | None, looked_at: int
) -> None:
    queue = [Candidate(shared, length) for shared, length in requests]
    now = NOW
    for pause in pauses[: len(requests)]:
        index = choose(queue[:looked_at], running_length, now)
        for place, passed in enumerate(queue[:index]):
            assert passed.overtaken < OVERTAKEN_MOST
            assert passed.overtaken_at is None or now - passed.overtaken_at < OVERTAKEN_S
            first = now if passed.overtaken_at is None else passed.overtaken_at
            queue[place] = replace(passed, overtaken=passed.overtaken + 1, overtaken_at=first)
        del queue[index]
        now += pause
    assert not queue


# -- the idle window


def test_an_unknown_rate_waits_the_whole_window_from_the_oldest_on() -> None:
    assert idle_due_at([(STANDARD, 10.0), (BULK, 9.0)], 0.5, 8, None) == 9.5


@pytest.mark.parametrize("gap_s", [None, 0.1, 9.0])
def test_interactive_never_waits(gap_s: float | None) -> None:
    assert idle_due_at([(STANDARD, 10.0), (INTERACTIVE, 10.2)], 0.5, 8, gap_s) <= 10.2


@pytest.mark.parametrize("gap_s", [None, 0.1, 9.0])
def test_full_rows_go_at_once(gap_s: float | None) -> None:
    assert idle_due_at([(BULK, 10.0)] * 8, 0.5, 8, gap_s) == -math.inf


def test_the_window_closes_at_once_when_the_next_arrival_is_not_expected_in_it() -> None:
    assert idle_due_at([(STANDARD, 10.0)], 0.5, 8, 0.6) == 10.0
    assert idle_due_at([(STANDARD, 10.0), (STANDARD, 10.3)], 0.5, 8, 0.4) == 10.3


def test_the_window_closes_early_when_arrivals_have_stopped() -> None:
    waiting = [(STANDARD, 10.0), (STANDARD, 10.05)]
    assert idle_due_at(waiting, 0.5, 8, 0.05) == pytest.approx(10.05 + SILENT_GAPS * 0.05)
    assert idle_due_at(waiting, 0.5, 8, 0.0) == pytest.approx(10.05 + SILENT_S)
    assert idle_due_at(waiting, 0.5, 8, 0.4) == 10.5


@given(
    st.lists(st.tuples(st.sampled_from(Priority), st.floats(0, 100)), min_size=1, max_size=10),
    st.floats(0, 1),
    st.integers(1, 12),
    st.one_of(st.none(), st.floats(0, 10)),
)
def test_nobody_waits_longer_than_the_window(
    waiting: list[tuple[Priority, float]], window_s: float, rows: int, gap_s: float | None
) -> None:
    assert idle_due_at(waiting, window_s, rows, gap_s) <= min(at for _, at in waiting) + window_s


def test_the_rate_is_known_after_some_arrivals() -> None:
    rate = ArrivalRate()
    for n in range(GAPS_KNOWN):
        rate.note(n * 0.5)
        assert rate.gap_s is None
    rate.note(GAPS_KNOWN * 0.5)
    assert rate.gap_s == pytest.approx(0.5)


def test_the_rate_follows_the_latest_arrivals() -> None:
    rate, now = ArrivalRate(), 0.0
    for gap in [1.0] * 50 + [0.01] * 100:
        now += gap
        rate.note(now)
    assert rate.gap_s == pytest.approx(0.01, rel=0.5)


def test_a_long_silence_closes_the_window_of_those_that_come_next_but_not_for_long() -> None:
    rate, now = ArrivalRate(), 0.0
    for _ in range(50):
        rate.note(now := now + 0.001)
    rate.note(now := now + 3600)
    assert idle_due_at([(STANDARD, now)], 0.02, 8, rate.gap_s) == now
    for _ in range(30):
        rate.note(now := now + 0.001)
    assert idle_due_at([(STANDARD, now)], 0.02, 8, rate.gap_s) == now + 0.02
