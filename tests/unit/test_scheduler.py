from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batching.policy import BULK_MINIMUM, PATIENCE, idle_due_at
from batching.request import Row
from batching.runner import RowError
from batching.scheduler import Broke, Drew, Plan, Scheduler
from promptmill.core.jobs import Priority
from tests.support.engine import make_request, tiny_model

INTERACTIVE, STANDARD, BULK = Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK
MODEL = tiny_model()


def make_scheduler(rows: int = 4, reserved: int = 2, kv_budget: int = 10_000, prefill_tokens: int = 16) -> Scheduler:
    return Scheduler(rows=rows, reserved=reserved, kv_budget=kv_budget, kv_bytes=lambda tokens: tokens, prefill_tokens=prefill_tokens)


def make_row(name: str, priority: Priority = STANDARD, prompt_len: int = 3, max_tokens: int = 4) -> Row:
    return Row(make_request(name, (10,) * prompt_len, priority, max_tokens=max_tokens), MODEL)


def submit(scheduler: Scheduler, priority: Priority, count: int, prefix: str = "", **size: int) -> None:
    for n in range(count):
        scheduler.submit(make_row(f"{prefix or priority}-{n}", priority, **size))


def names(rows: Sequence[Row]) -> list[str]:
    return [row.request.id for row in rows]


def commit(scheduler: Scheduler, plan: Plan) -> list[Drew | Broke]:
    return scheduler.commit(plan, [None if work.draw is None else 20 for work in plan.works])


# -- admission


def test_interactive_goes_before_standard_before_bulk_once_bulk_has_its_minimum() -> None:
    scheduler = make_scheduler()
    submit(scheduler, BULK, 2)
    submit(scheduler, STANDARD, 2)
    submit(scheduler, INTERACTIVE, 2)
    assert names(scheduler.admit()) == ["bulk-0", "interactive-0", "interactive-1", "standard-0", "standard-1", "bulk-1"]


def test_bulk_and_standard_leave_the_reserved_rows_to_interactive() -> None:
    scheduler = make_scheduler(rows=4, reserved=2)
    submit(scheduler, BULK, 9)
    submit(scheduler, STANDARD, 9)
    assert len(scheduler.admit()) == 4
    submit(scheduler, INTERACTIVE, 3)
    assert names(scheduler.admit()) == ["interactive-0", "interactive-1"]


def test_a_row_that_bulk_has_lost_goes_back_to_bulk_before_interactive() -> None:
    scheduler = make_scheduler(rows=2, reserved=1)
    submit(scheduler, BULK, 3)
    submit(scheduler, INTERACTIVE, 9)
    assert names(scheduler.admit()) == ["bulk-0", "interactive-0", "interactive-1"]
    scheduler.remove("bulk-0")
    assert names(scheduler.admit()) == ["bulk-1"]
    scheduler.remove("interactive-0")
    assert names(scheduler.admit()) == ["interactive-2"]


def test_a_big_request_is_not_overtaken_by_small_ones_of_its_rank_but_by_higher_ones() -> None:
    scheduler = make_scheduler(kv_budget=100)
    submit(scheduler, STANDARD, 1, "first", prompt_len=30, max_tokens=30)
    scheduler.admit()
    submit(scheduler, STANDARD, 1, "big", prompt_len=50, max_tokens=40)
    submit(scheduler, STANDARD, 1, "small")
    submit(scheduler, BULK, 1)
    assert names(scheduler.admit()) == ["bulk-0"]  # bulk's minimum: asked first, and it fits
    submit(scheduler, BULK, 1, "lower")
    submit(scheduler, INTERACTIVE, 1)
    assert names(scheduler.admit()) == ["interactive-0"]
    for request_id in ("first-0", "bulk-0", "interactive-0"):
        scheduler.remove(request_id)
    assert names(scheduler.admit()) == ["lower-0", "big-0"]
    assert names(scheduler.waiting) == ["small-0"]


def test_bytes_are_reserved_for_the_whole_life_of_a_row() -> None:
    scheduler = make_scheduler(kv_budget=20)
    submit(scheduler, STANDARD, 3, prompt_len=3, max_tokens=5)
    assert len(scheduler.admit()) == 2
    assert scheduler.kv_bytes_used == 16
    scheduler.remove("standard-0")
    assert scheduler.kv_bytes_used == 8


# -- steps


def test_a_step_is_all_decodes_then_prefill_chunks() -> None:
    scheduler = make_scheduler()
    submit(scheduler, STANDARD, 2)
    scheduler.admit()
    commit(scheduler, scheduler.plan())
    submit(scheduler, INTERACTIVE, 1)
    scheduler.admit()
    plan = scheduler.plan()
    assert plan.ids == ("standard-0", "standard-1", "interactive-0")
    assert (plan.decode_rows, plan.prompt_tokens) == (2, 3)
    assert [tuple(work.token_ids) for work in plan.works] == [(20,), (20,), (10, 10, 10)]
    assert [work.past for work in plan.works] == [3, 3, 0]
    assert [work.draw.position for work in plan.works if work.draw] == [1, 1, 0]


def test_chunks_lie_at_multiples_of_the_chunk_whatever_runs_beside() -> None:
    def chunks(neighbours: int) -> list[tuple[int, int]]:
        scheduler = make_scheduler(prefill_tokens=16)
        submit(scheduler, STANDARD, neighbours, "beside", prompt_len=7)
        scheduler.submit(make_row("long", prompt_len=40))
        scheduler.admit()
        seen = []
        for _ in range(20):
            plan = scheduler.plan()
            works = dict(zip(plan.ids, plan.works, strict=True))
            if "long" in works and works["long"].past < 40:
                seen.append((works["long"].past, len(works["long"].token_ids)))
            commit(scheduler, plan)
        return seen

    assert chunks(0) == chunks(1) == chunks(3) == [(0, 16), (16, 16), (32, 8)]


def test_several_short_prompts_share_the_prefill_budget() -> None:
    scheduler = make_scheduler(prefill_tokens=16)
    submit(scheduler, STANDARD, 4, prompt_len=5)
    scheduler.admit()
    assert [len(work.token_ids) for work in scheduler.plan().works] == [5, 5, 5]


def test_the_last_chunk_alone_draws() -> None:
    scheduler = make_scheduler(prefill_tokens=16)
    scheduler.submit(make_row("long", prompt_len=20))
    scheduler.admit()
    first = scheduler.plan()
    assert first.works[0].draw is None
    assert commit(scheduler, first) == []
    last = scheduler.plan()
    assert last.works[0].draw is not None
    [drew] = commit(scheduler, last)
    assert isinstance(drew, Drew)
    assert drew.row.output == [20]


def test_interactive_prompts_are_prefilled_before_bulk_ones_that_came_earlier() -> None:
    scheduler = make_scheduler(prefill_tokens=16)
    submit(scheduler, BULK, 4, prompt_len=64)
    scheduler.admit()
    commit(scheduler, scheduler.plan())
    scheduler.submit(make_row("now", INTERACTIVE, prompt_len=16))
    scheduler.admit()
    assert scheduler.plan().ids == ("now",)


def test_a_prefilling_bulk_row_is_served_under_steady_interactive_prefill() -> None:
    scheduler = make_scheduler(prefill_tokens=16)
    scheduler.submit(make_row("bulk", BULK, prompt_len=32))
    scheduler.admit()
    steps_with_bulk = 0
    for n in range(2 * PATIENCE):
        scheduler.submit(make_row(f"i{n}", INTERACTIVE, prompt_len=16))
        scheduler.admit()
        plan = scheduler.plan()
        steps_with_bulk += "bulk" in plan.ids
        for happened in commit(scheduler, plan):
            scheduler.remove(happened.row.request.id)
    assert steps_with_bulk == 2


def test_a_row_error_removes_that_row_alone() -> None:
    scheduler = make_scheduler()
    submit(scheduler, STANDARD, 2)
    scheduler.admit()
    error = RowError("not_finite", "no finite numbers")
    broke, drew = scheduler.commit(scheduler.plan(), [error, 20])
    assert broke == Broke(broke.row, error)
    assert isinstance(drew, Drew)
    assert names(list(scheduler.running)) == ["standard-1"]
    scheduler.check_integrity()


def test_a_runner_that_draws_where_it_was_not_asked_is_caught() -> None:
    scheduler = make_scheduler(prefill_tokens=16)
    scheduler.submit(make_row("long", prompt_len=20))
    scheduler.admit()
    with pytest.raises(AssertionError, match="draw where asked"):
        scheduler.commit(scheduler.plan(), [20])


# -- the idle window


def test_an_idle_engine_waits_for_company_from_the_oldest_enqueue_time() -> None:
    assert idle_due_at([(STANDARD, 12.0), (BULK, 10.0)], 5.0, rows=4) == 15.0


def test_an_idle_engine_starts_at_once_with_full_rows_or_for_interactive() -> None:
    assert idle_due_at([(STANDARD, 10.0)] * 4, 5.0, rows=4) < 10.0
    assert idle_due_at([(STANDARD, 10.0), (INTERACTIVE, 11.0)], 5.0, rows=4) == 10.0


# -- everything at once

ROWS, RESERVED, BUDGET, CHUNK = 3, 2, 120, 8


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of submits, cancels, steps and row failures."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(ROWS, RESERVED, BUDGET, CHUNK)
        self.live: set[str] = set()
        self.ended: set[str] = set()
        self.count = 0

    @rule(priority=st.sampled_from(Priority), prompt_len=st.integers(1, 60), max_tokens=st.integers(1, 40))
    def submit(self, priority: Priority, prompt_len: int, max_tokens: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.scheduler.submit(make_row(name, priority, prompt_len, max_tokens))
        self.live.add(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        row = self.scheduler.remove(name)
        assert row is not None
        assert row.request.id == name
        self.end(name)

    @rule()
    def cancel_unknown(self) -> None:
        assert self.scheduler.remove("nobody") is None

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.turn(lambda: data.draw(st.integers(0, 9)) == 0)

    def turn(self, fails=lambda: False) -> None:  # type: ignore[no-untyped-def]
        bulk_is_due = not self.scheduler.running and any(row.request.priority is BULK for row in self.scheduler.waiting)
        self.scheduler.admit()
        running = self.scheduler.running_by_priority
        assert running.get(BULK, 0) + running.get(STANDARD, 0) <= ROWS
        assert sum(running.values()) <= ROWS + RESERVED
        if bulk_is_due:
            assert running.get(BULK, 0) >= BULK_MINIMUM
        plan = self.scheduler.plan()
        assert (not plan.works) == (not self.scheduler.running)
        assert len(set(plan.ids)) == len(plan.ids)
        assert {row.request.id for row in self.scheduler.running if not row.prefilling} == set(plan.ids[: plan.decode_rows])
        assert plan.prompt_tokens <= CHUNK
        assert (plan.prompt_tokens > 0) == any(row.prefilling for row in self.scheduler.running)
        for work in plan.works[plan.decode_rows :]:
            assert work.past % CHUNK == 0
        results = [RowError("x", "x") if fails() else (None if work.draw is None else 20) for work in plan.works]
        for happened in self.scheduler.commit(plan, results):
            row = happened.row
            assert row.past < row.room
            if isinstance(happened, Broke):
                self.end(row.request.id)
            elif len(row.output) == row.request.sampling.max_tokens:
                assert self.scheduler.remove(row.request.id) is row
                self.end(row.request.id)

    def end(self, name: str) -> None:
        self.live.remove(name)
        assert name not in self.ended
        self.ended.add(name)

    @invariant()
    def books_are_in_order(self) -> None:
        self.scheduler.check_integrity()
        here = names(self.scheduler.waiting) + names(list(self.scheduler.running))
        assert sorted(here) == sorted(self.live)

    def teardown(self) -> None:
        """Nobody starves: with no more arrivals, all end in bounded time."""
        for _ in range(self.count * 60):
            self.turn()
        assert not self.live
        assert self.scheduler.kv_bytes_used == 0
        self.scheduler.check_integrity()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
