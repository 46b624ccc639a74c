from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batching.blocks import BlockPool
from batching.choices import Choices
from batching.group import Group
from batching.policy import BULK_MINIMUM, PATIENCE
from batching.prefix import PrefixCache
from batching.runner import BLOCK_TOKENS, Drawn, RowError, RowOutput
from batching.scheduler import Plan, Scheduler
from batching.tables import Tables
from promptmill.core.jobs import Priority
from tests.support.engine import make_request, tiny_model

INTERACTIVE, STANDARD, BULK = Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK
MODEL = tiny_model(eos=(), context_length=1000)
NOW = 50.0


class Bench:
    """A scheduler with nothing behind it: draws are always 20."""

    def __init__(self, rows: int = 4, reserved: int = 2, blocks: int = 100, prefill: int = 16, prefix_cache: bool = True):
        self.copies: list[tuple[int, int]] = []
        self.wiped: list[int] = []
        pool = BlockPool(blocks)
        self.tables = Tables(
            pool, PrefixCache(pool, enabled=prefix_cache), copy=lambda *pair: self.copies.append(pair), wipe=self.wiped.extend
        )
        self.scheduler = Scheduler(self.tables, rows=rows, reserved=reserved)
        self.rows = rows
        self.prefill = prefill
        self.now = NOW

    def submit(
        self, name: str, priority: Priority = STANDARD, *, prompt: int | Sequence[int] = 3, max_tokens: int = 4, n: int = 1
    ) -> Group:
        ids = [10] * prompt if isinstance(prompt, int) else prompt
        group = Choices(make_request(name, ids, priority, max_tokens=max_tokens, n=n), MODEL, None)
        self.scheduler.submit(group)
        return group

    def submit_many(self, priority: Priority, count: int, prefix: str = "", **size: int) -> None:
        for n in range(count):
            self.submit(f"{prefix or priority}-{n}", priority, **size)

    def admit(self) -> list[str]:
        return [group.id for group in self.scheduler.admit(self.now, self.rows)]

    def plan(self) -> Plan:
        return self.scheduler.plan(lambda decodes, context: self.prefill)

    def commit(self, plan: Plan) -> list[str]:
        """Commit what was planned and let the groups go on; the ids of those that ended."""
        ended = []
        results = [RowOutput(tuple(Drawn(20) for _ in work.draws)) for work in plan.works]
        for group, row, result in self.scheduler.commit(plan, results):
            assert isinstance(result, RowOutput)
            if row.pending == 0:
                group.take(row, result.drawn, self.tables)
            if group.done:
                self.scheduler.remove(group)
                ended.append(group.id)
        return ended

    def step(self) -> list[str]:
        self.admit()
        return self.commit(self.plan())

    def remove(self, name: str) -> None:
        group = self.scheduler.find(name)
        assert group is not None
        self.scheduler.remove(group)


def names(plan: Plan) -> list[str]:
    return [group.id for group, _ in plan.rows]


# -- admission


def test_interactive_goes_before_standard_before_bulk_once_bulk_has_its_minimum() -> None:
    bench = Bench()
    for priority in (BULK, STANDARD, INTERACTIVE):
        bench.submit_many(priority, 2)
    assert bench.admit() == ["bulk-0", "interactive-0", "interactive-1", "standard-0", "standard-1", "bulk-1"]


def test_bulk_and_standard_leave_the_reserved_rows_to_interactive() -> None:
    bench = Bench(rows=4, reserved=2)
    bench.submit_many(BULK, 9)
    bench.submit_many(STANDARD, 9)
    assert len(bench.admit()) == 4
    bench.submit_many(INTERACTIVE, 3)
    assert bench.admit() == ["interactive-0", "interactive-1"]


def test_a_row_that_bulk_has_lost_goes_back_to_bulk_before_interactive() -> None:
    bench = Bench(rows=2, reserved=1)
    bench.submit_many(BULK, 3)
    bench.submit_many(INTERACTIVE, 9)
    assert bench.admit() == ["bulk-0", "interactive-0", "interactive-1"]
    bench.remove("bulk-0")
    assert bench.admit() == ["bulk-1"]
    bench.remove("interactive-0")
    assert bench.admit() == ["interactive-2"]


def test_a_request_takes_as_many_rows_as_it_has_choices() -> None:
    bench = Bench(rows=4, reserved=0)
    bench.submit("one")
    bench.submit("four", n=4)
    bench.submit("other")
    assert bench.admit() == ["one"]  # four must wait for four rows, and is not overtaken
    bench.remove("one")
    assert bench.admit() == ["four"]


def test_a_wide_request_gets_its_rows_though_bulk_never_ends() -> None:
    bench = Bench(rows=2, reserved=0)
    bench.submit_many(BULK, 2, "first", max_tokens=3)
    bench.step()
    bench.submit("wide", n=2)
    bench.submit_many(BULK, 50, "more", max_tokens=3)
    ended = [name for _ in range(30) for name in bench.step()]
    assert ended.index("wide") <= 4


def test_a_big_request_is_not_overtaken_by_small_ones_of_its_rank_but_by_higher_ones() -> None:
    bench = Bench(blocks=5)
    bench.submit("first", prompt=2 * BLOCK_TOKENS)
    bench.step()
    bench.submit("big", prompt=list(range(100, 99 + 4 * BLOCK_TOKENS)))
    bench.submit("small")
    assert bench.admit() == []
    bench.submit("lower", BULK)
    bench.submit("higher", INTERACTIVE)
    assert bench.admit() == ["lower", "higher"]  # bulk's minimum is asked first
    for name in ("first", "lower", "higher"):
        bench.remove(name)
    assert bench.admit() == ["big", "small"]


def test_among_equals_one_that_shares_a_beginning_goes_first_but_nobody_is_overtaken_more_than_eight_times() -> None:
    bench = Bench(rows=1, reserved=0, prefill=1000)
    shared = list(range(100, 100 + 2 * BLOCK_TOKENS))
    bench.submit("first", prompt=[*shared, 1], max_tokens=1)
    bench.step()
    bench.submit("other", prompt=list(range(300, 300 + 2 * BLOCK_TOKENS)), max_tokens=1)
    for n in range(12):
        bench.submit(f"same-{n}", prompt=[*shared, n], max_tokens=1)
    order = [name for _ in range(13) for name in bench.step()]
    assert order[:8] == [f"same-{n}" for n in range(8)]
    assert order[8] == "other"


def test_nobody_is_overtaken_for_longer_than_200_ms() -> None:
    bench = Bench(rows=1, reserved=0, prefill=1000)
    shared = list(range(100, 100 + 2 * BLOCK_TOKENS))
    bench.submit("first", prompt=[*shared, 1], max_tokens=1)
    bench.step()
    bench.submit("other", prompt=list(range(300, 300 + 2 * BLOCK_TOKENS)), max_tokens=1)
    for n in range(3):
        bench.submit(f"same-{n}", prompt=[*shared, n], max_tokens=1)
    assert bench.step() == ["same-0"]
    bench.now += 0.25
    assert bench.step() == ["other"]


# -- steps


def test_a_step_is_all_decodes_then_prefill_chunks() -> None:
    bench = Bench()
    bench.submit_many(STANDARD, 2)
    bench.step()
    bench.submit_many(INTERACTIVE, 1)
    bench.admit()
    plan = bench.plan()
    assert names(plan) == ["standard-0", "standard-1", "interactive-0"]
    assert (plan.decode_rows, plan.prompt_tokens, plan.tokens, plan.context) == (2, 3, 5, 4 + 4 + 3)
    assert [tuple(work.token_ids) for work in plan.works] == [(20,), (20,), (10, 10, 10)]
    assert [work.past for work in plan.works] == [3, 3, 0]
    assert [draw.position for work in plan.works for draw in work.draws] == [1, 1, 0]


def test_several_prompts_share_the_prefill_budget_and_the_last_chunk_alone_draws() -> None:
    bench = Bench(prefill=16)
    for n in range(3):
        bench.submit(f"r{n}", prompt=[30 + n] * 6)
    bench.admit()
    plan = bench.plan()
    assert [len(work.token_ids) for work in plan.works] == [6, 6, 4]
    assert [len(work.draws) for work in plan.works] == [1, 1, 0]


def test_chunks_end_at_block_boundaries_where_they_can() -> None:
    bench = Bench(prefill=BLOCK_TOKENS + 20)
    bench.submit("long", prompt=3 * BLOCK_TOKENS)
    bench.admit()
    chunks = []
    for _ in range(4):
        plan = bench.plan()
        chunks += [(work.past, len(work.token_ids)) for work in plan.works if plan.prompt_tokens]
        bench.commit(plan)
    assert chunks == [(0, BLOCK_TOKENS), (BLOCK_TOKENS, BLOCK_TOKENS), (2 * BLOCK_TOKENS, BLOCK_TOKENS)]


def test_interactive_prompts_are_prefilled_before_bulk_ones_that_came_earlier() -> None:
    bench = Bench(prefill=16)
    bench.submit_many(BULK, 4, prompt=64)
    bench.step()
    bench.submit("now", INTERACTIVE, prompt=16)
    bench.admit()
    assert names(bench.plan()) == ["now"]


def test_a_prefilling_bulk_row_is_served_under_steady_interactive_prefill() -> None:
    bench = Bench(prefill=16)
    bench.submit("bulk", BULK, prompt=[40] * 200)
    bench.admit()
    steps_with_bulk = 0
    for n in range(2 * PATIENCE):
        bench.submit(f"i{n}", INTERACTIVE, prompt=16, max_tokens=1)
        bench.admit()
        plan = bench.plan()
        steps_with_bulk += "bulk" in names(plan)
        bench.commit(plan)
    assert steps_with_bulk == 2


def test_work_that_did_not_run_is_planned_again() -> None:
    bench = Bench()
    bench.submit_many(STANDARD, 2)
    bench.admit()
    plan = bench.plan()
    assert len(bench.scheduler.commit(plan, [None, RowOutput((Drawn(20),))])) == 1
    assert [work.past for work in bench.plan().works if work.past == 0] == [0]


def test_a_runner_that_draws_where_it_was_not_asked_is_caught() -> None:
    bench = Bench(prefill=16)
    bench.submit("long", prompt=20)
    bench.admit()
    with pytest.raises(AssertionError, match="draw where asked"):
        bench.scheduler.commit(bench.plan(), [RowOutput((Drawn(20),))])


# -- blocks


def test_a_follower_waits_for_the_block_that_another_computes_and_shares_it() -> None:
    bench = Bench(prefill=1000)
    ids = list(range(100, 100 + BLOCK_TOKENS))
    leader = bench.submit("leader", prompt=[*ids, 1, 2])
    follower = bench.submit("follower", prompt=[*ids, 3, 4])
    bench.admit()
    plan = bench.plan()
    assert names(plan) == ["leader"]
    bench.commit(plan)
    plan = bench.plan()
    assert names(plan) == ["leader", "follower"]
    assert follower.rows[0].table[0] == leader.rows[0].table[0]
    assert (plan.works[1].past, follower.cached_tokens) == (BLOCK_TOKENS, BLOCK_TOKENS)


def test_without_the_prefix_cache_nobody_waits_and_nothing_is_shared() -> None:
    bench = Bench(prefill=1000, prefix_cache=False)
    for name in ("a", "b"):
        bench.submit(name, prompt=BLOCK_TOKENS + 2)
    bench.admit()
    assert names(bench.plan()) == ["a", "b"]


def test_a_fork_shares_whole_blocks_and_copies_the_last() -> None:
    bench = Bench(prefill=1000)
    group = bench.submit("a", prompt=BLOCK_TOKENS + 5, n=3)
    bench.step()
    first, *others = [row.table for row in group.rows]
    assert all(table[0] == first[0] for table in others)
    assert bench.copies == [(first[1], table[1]) for table in others]
    bench.remove("a")
    assert bench.scheduler.blocks_used == 0


def test_a_fork_without_a_free_block_computes_its_last_tokens_again() -> None:
    bench = Bench(blocks=3, prefill=1000)
    group = bench.submit("a", prompt=[7] * (BLOCK_TOKENS + 5), n=2, max_tokens=2)
    bench.submit("b", prompt=1, max_tokens=9)
    bench.admit()
    bench.commit(bench.plan())
    assert [row.past for row in group.rows] == [BLOCK_TOKENS + 5, BLOCK_TOKENS]
    assert bench.copies == []
    ended = [name for _ in range(20) for name in bench.step()]
    assert sorted(ended) == ["a", "b"]


def test_when_blocks_run_out_the_last_of_the_lowest_rank_loses_its_own_and_waits_again() -> None:
    bench = Bench(blocks=3, prefill=1000, prefix_cache=False)
    for name, priority in (("bulk", BULK), ("standard", STANDARD), ("now", INTERACTIVE)):
        bench.submit(name, priority, prompt=[ord(name[0])] * (BLOCK_TOKENS - 1), max_tokens=9)
    bench.step()
    bench.step()
    assert bench.scheduler.blocks_used == 3
    plan = bench.plan()  # the next token of each stands in a new block
    assert names(plan) == ["now"]
    assert [(item.group.id, item.kept) for item in bench.scheduler.take_lost()] == [("bulk", False), ("standard", False)]
    bench.commit(plan)
    ended = [name for _ in range(60) for name in bench.step()]
    assert sorted(ended) == ["bulk", "now", "standard"]
    assert ended.index("now") == 0


def test_blocks_of_a_tainted_group_are_wiped_and_forgotten() -> None:
    bench = Bench(prefill=1000)
    group = bench.submit("bad", prompt=[7] * (BLOCK_TOKENS + 5))
    bench.step()
    blocks = sorted(group.rows[0].table)
    bench.scheduler.remove(group, tainted=True)
    assert sorted(bench.wiped) == blocks
    bench.submit("same", prompt=[7] * (BLOCK_TOKENS + 5))
    bench.admit()
    assert bench.plan().works[0].past == 0


def test_rows_that_memory_does_not_bear_are_paused_keeping_their_blocks() -> None:
    bench = Bench(rows=4)
    bench.submit_many(STANDARD, 3)
    bench.submit("bulk", BULK)
    bench.step()
    bench.scheduler.shrink(2)
    assert [(item.group.id, item.kept) for item in bench.scheduler.take_lost()] == [("bulk", True), ("standard-2", True)]
    assert bench.scheduler.blocks_used == 4
    assert names(bench.plan()) == ["standard-0", "standard-1"]


# -- everything at once

ROWS, RESERVED, BLOCKS, CHUNK = 3, 2, 9, 70


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of submits, cancels, pauses, steps and row failures."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(ROWS, RESERVED, BLOCKS, CHUNK)
        self.live: set[str] = set()
        self.paused: set[str] = set()
        self.count = 0

    @rule(
        priority=st.sampled_from(Priority),
        beginning=st.integers(0, 2),
        prompt=st.integers(1, 150),
        max_tokens=st.integers(1, 100),
        n=st.integers(1, 2),
    )
    def submit(self, priority: Priority, beginning: int, prompt: int, max_tokens: int, n: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.bench.submit(name, priority, prompt=[beginning] * prompt, max_tokens=max_tokens, n=n)
        self.live.add(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.bench.remove(name)
        self.end(name)

    @precondition(lambda self: self.live - self.paused)
    @rule(data=st.data(), keep=st.booleans())
    def pause(self, data: st.DataObject, keep: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live - self.paused)))
        self.bench.scheduler.pause(self.bench.scheduler.find(name), keep=keep)  # type: ignore[arg-type]
        self.paused.add(name)

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.paused)))
        self.bench.scheduler.resume(self.bench.scheduler.find(name))  # type: ignore[arg-type]
        self.paused.remove(name)

    @rule(rows=st.integers(1, ROWS))
    def shrink(self, rows: int) -> None:
        self.bench.scheduler.shrink(rows)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.turn(lambda: data.draw(st.integers(0, 9)) == 0)

    def turn(self, fails=lambda: False) -> None:  # type: ignore[no-untyped-def]
        bench, scheduler = self.bench, self.bench.scheduler
        bulk_waits = any(group.priority is BULK for group in scheduler.waiting)
        wide_waits = any(group.width > 1 for group in scheduler.waiting)
        bulk_is_due = not scheduler.running and bulk_waits and not wide_waits
        bench.admit()
        running = scheduler.rows_running
        assert running.get(BULK, 0) + running.get(STANDARD, 0) <= ROWS
        assert sum(running.values()) <= ROWS + RESERVED
        if bulk_is_due:
            assert running.get(BULK, 0) >= BULK_MINIMUM
        plan = bench.plan()
        assert bool(plan.works) == bool(scheduler.running)
        assert plan.prompt_tokens <= CHUNK
        assert len({id(row) for _, row in plan.rows}) == len(plan.rows)
        assert not self.paused & set(names(plan))
        for (_, row), work in zip(plan.rows, plan.works, strict=True):
            assert list(work.token_ids) == row.tokens[work.past : work.past + len(work.token_ids)]
            assert len(work.table) * BLOCK_TOKENS >= work.past + len(work.token_ids)
        results = [RowError("x", "x", tainted=True) if fails() else RowOutput(tuple(Drawn(20) for _ in work.draws)) for work in plan.works]
        for group, row, result in scheduler.commit(plan, results):
            if group.id not in self.live:
                continue
            if isinstance(result, RowError):
                scheduler.remove(group, tainted=True)
                self.end(group.id)
                continue
            if row.pending == 0:
                group.take(row, result.drawn, bench.tables)
            if group.done:
                scheduler.remove(group)
                self.end(group.id)

    def end(self, name: str) -> None:
        self.live.remove(name)
        self.paused.discard(name)

    @invariant()
    def books_are_in_order(self) -> None:
        self.bench.scheduler.check_integrity()
        scheduler = self.bench.scheduler
        here = [group.id for groups in (scheduler.waiting, scheduler.running, scheduler.paused) for group in groups]
        assert sorted(here) == sorted(self.live)

    def teardown(self) -> None:
        """Nobody starves: with no more arrivals, all end in bounded time."""
        for name in list(self.paused):
            self.bench.scheduler.resume(self.bench.scheduler.find(name))  # type: ignore[arg-type]
            self.paused.remove(name)
        for _ in range(self.count * 400):
            if not self.live:
                break
            self.turn()
        assert not self.live
        assert self.bench.scheduler.blocks_used == 0
        self.bench.scheduler.check_integrity()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
