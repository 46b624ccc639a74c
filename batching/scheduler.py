"""The scheduler: which requests run, and what the next step computes. No clock, lock or tensor.

A request waits, is admitted, computes its prompt in chunks, decodes, and is removed; on the way it may
be paused, keeping its blocks or losing them. The unit of admission and pause is the group (a request
with all its rows), the unit of work is the row.

* **Admission** is optimistic: the free blocks must cover what the group and those that run have yet to
  compute, and one block for each row that runs. A group that does not fit *yet* blocks those behind it
  of the same or a lower rank, so that a big one is not overtaken for ever by small ones.
* **A step** is all decodes first, then prefill chunks within a budget of tokens. Chunks end at block
  boundaries where they can, so that the blocks can be shared.
* **Sharing**: a row adopts blocks that the prefix cache knows. A row whose next block is being computed
  by another row of the same step leaves it to that one and adopts it in the next step: requests that
  come together with one beginning compute it once.
* **Shortage**: blocks are taken from what only the prefix cache holds (the pool does that by itself),
  then from groups that do not run, oldest first, then from the running group of the lowest rank that
  came last, which waits again and computes its tokens anew. The first group of the highest rank always
  goes on, and alone it fits: that is checked at submit.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from batching.group import Group
from batching.policy import RANK, Candidate, admission_order, choose, has_row, prefill_key
from batching.row import Row
from batching.runner import BLOCK_TOKENS, RowError, RowOutput, RowResult, RowWork, Score
from batching.tables import Tables
from promptmill.core.jobs import Priority

LOOKED_AT = 32  # of a queue, at each admission


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. ``rows``: whose work each is; the first ``decode_rows`` are decodes. ``context``: tokens in
    the cache that all rows together attend to, the step's own included."""

    works: tuple[RowWork, ...]
    rows: tuple[tuple[Group, Row], ...]
    decode_rows: int
    prompt_tokens: int
    context: int

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Lost:
    """A group was paused for want of blocks, or of memory for its steps, and waits again. ``kept``: it still has its blocks."""

    group: Group
    kept: bool


class Scheduler:
    """Owns the groups, waiting, running and paused, and the blocks that their rows hold.

    ``rows`` serve everybody, ``reserved`` further ones interactive requests only.
    """

    def __init__(self, tables: Tables, *, rows: int, reserved: int):
        self._tables = tables
        self._rows = rows
        self._reserved = reserved
        self._waiting: dict[Priority, OrderedDict[str, Group]] = {priority: OrderedDict() for priority in Priority}
        self._running: dict[str, Group] = {}
        self._paused: dict[str, Group] = {}  # by name; in the order of their pauses
        self._submitted = 0
        self._admissions = 0
        self._prefill_steps = 0
        self._lost: list[Lost] = []  # since they were last asked for

    # -- what is here

    @property
    def waiting(self) -> list[Group]:
        return [group for queue in self._waiting.values() for group in queue.values()]

    @property
    def running(self) -> Collection[Group]:
        return self._running.values()

    @property
    def paused(self) -> Collection[Group]:
        return self._paused.values()

    @property
    def rows_running(self) -> Mapping[Priority, int]:
        counts: Counter[Priority] = Counter()
        for group in self._running.values():
            counts[group.priority] += group.width
        return counts

    @property
    def blocks_used(self) -> int:
        return self._tables.used

    def find(self, group_id: str) -> Group | None:
        for holder in (self._running, self._paused, *self._waiting.values()):
            if group := holder.get(group_id):
                return group
        return None

    # -- coming and going

    def submit(self, group: Group) -> None:
        """``group`` waits. Its id must be new, and alone it must fit the pool."""
        group.number = self._submitted
        self._submitted += 1
        self._waiting[group.priority][group.id] = group

    def remove(self, group: Group, *, tainted: bool = False) -> None:
        """Take the group out, whatever it does, and free what it holds. ``tainted``: no other row may ever
        read what it computed."""
        for holder in (*self._waiting.values(), self._running, self._paused):
            holder.pop(group.id, None)
        if tainted:
            self._tables.taint(group.rows)
        self._forget_cache(group)

    def pause(self, group: Group, *, keep: bool) -> None:
        """Stop the group until ``resume``; without ``keep`` its blocks are freed."""
        for holder in (*self._waiting.values(), self._running):
            holder.pop(group.id, None)
        self._paused[group.id] = group
        if not keep:
            self._forget_cache(group)

    def resume(self, group: Group) -> None:
        """Let the paused group wait for its turn, as the first of its priority."""
        del self._paused[group.id]
        self._wait_again(group)

    def shrink(self, rows: int) -> None:
        """Stop groups, the last ones of the lowest rank, until at most ``rows`` rows run (one group at least);
        they keep their blocks and wait."""
        while len(self._running) > 1 and sum(self.rows_running.values()) > rows:
            victim = max(self._running.values(), key=_order)
            del self._running[victim.id]
            self._wait_again(victim)
            self._lost.append(Lost(victim, kept=True))

    def admit(self, now: float, rows: int, most: int | None = None) -> list[Group]:
        """Let waiting groups run, in policy order, as far as rows and blocks go; ``rows``: the most that may
        run now, beside the reserved ones; ``most``: with them."""
        admitted = []
        rows = min(rows, self._rows)
        reserved = self._reserved if most is None else max(0, min(self._reserved, most - rows))
        while (group := self._next(now, rows, reserved)) is not None:
            del self._waiting[group.priority][group.id]
            if group.admitted is None:
                group.admitted = self._admissions
                self._admissions += 1
            self._running[group.id] = group
            for row in group.rows:
                self._adopt(group, row)
            admitted.append(group)
        return admitted

    def take_lost(self) -> list[Lost]:
        """The groups that were paused for want of something since the last call."""
        lost, self._lost = self._lost, []
        return lost

    # -- a step

    def plan(self, prefill_budget: Callable[[int, int], int]) -> Plan:
        """The next step; empty when nothing can run. ``prefill_budget(decode_rows, context)``: prompt tokens that
        may run beside so many decoding rows; ``context`` is what they and the first row that prefills attend to."""
        planned = list(self._plan_decodes())
        decodes, context = len(planned), sum(row.past + 1 for _, row, _ in planned)
        prefilling = self._prefilling()
        first = prefilling[0][1].past if prefilling else 0
        chunks = list(self._plan_prefill(prefilling, prefill_budget(decodes, context + first)))
        while not planned and not chunks and self._relieve():
            chunks = list(self._plan_prefill(self._prefilling(), prefill_budget(0, 0)))
        planned += chunks
        prompt_tokens = sum(count for _, _, count in chunks)
        context += sum(row.past + count for _, row, count in chunks)
        works = tuple(self._work(group, row, count) for group, row, count in planned)
        self._prefill_steps += bool(chunks)
        return Plan(works, tuple((group, row) for group, row, _ in planned), decodes, prompt_tokens, context)

    def commit(self, plan: Plan, results: Sequence[RowResult | None]) -> list[tuple[Group, Row, RowOutput | RowError]]:
        """Book what the step gave; None = this row's share did not run. The caller deals with the outputs."""
        happened: list[tuple[Group, Row, RowOutput | RowError]] = []
        for (group, row), work, result in zip(plan.rows, plan.works, results, strict=True):
            if isinstance(result, RowOutput):
                assert len(result.drawn) == len(work.draws), "the runner must draw where asked, and only there"
                row.past += len(work.token_ids)
                self._tables.register(row)
            if result is not None:
                happened.append((group, row, result))
        return happened

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong."""
        self._tables.check_integrity(row for group in self._all() for row in group.rows)

    def _all(self) -> Iterator[Group]:
        yield from self._running.values()
        yield from self._paused.values()
        for queue in self._waiting.values():
            yield from queue.values()

    # admission

    def _next(self, now: float, rows: int, reserved: int) -> Group | None:
        running = self.rows_running
        blocked = len(RANK)  # ranks from here on must not overtake a group that waits for blocks
        for priority in admission_order(running.get(Priority.BULK, 0), wide_waits=self._wide_waits()):
            queue = self._waiting[priority]
            if not queue or RANK[priority] >= blocked or not has_row(priority, running, rows, reserved):
                continue
            group = self._choose(list(queue.values()), now)
            if has_row(priority, running, rows, reserved, group.width) and self._has_blocks(group):
                self._note_overtaken(queue, group, now)
                return group
            blocked = RANK[priority]
        return None

    def _wide_waits(self) -> bool:
        """Whether one that wants several rows came before all bulk that waits."""
        bulk = next(iter(self._waiting[Priority.BULK].values()), None)
        others = (next(iter(self._waiting[priority].values()), None) for priority in Priority if priority is not Priority.BULK)
        return bulk is not None and any(head is not None and head.width > 1 and head.number < bulk.number for head in others)

    def _choose(self, queue: Sequence[Group], now: float) -> Group:
        lengths = [len(row.tokens) for _, row in self._rows_running()]
        mean = sum(lengths) / len(lengths) if lengths else None
        candidates = [
            Candidate(self._tables.known(group.rows[0]), group.length, group.overtaken, group.overtaken_at) for group in queue[:LOOKED_AT]
        ]
        return queue[choose(candidates, mean, now)]

    def _has_blocks(self, group: Group) -> bool:
        if not self._running:
            return True
        promised = sum(max(1, self._tables.need(row)) for _, row in self._rows_running())
        while self._need(group) + promised > self._tables.free:
            if not self._drop_one_idle(but=group):
                return False
        return True

    def _need(self, group: Group) -> int:
        return sum(self._tables.need(row) for row in group.rows) + group.width - len(group.rows)

    # a step

    def _rows_running(self) -> list[tuple[Group, Row]]:
        return [(group, row) for group in self._running.values() for row in group.rows]

    def _plan_decodes(self) -> Iterator[tuple[Group, Row, int]]:
        for group in sorted(self._running.values(), key=_order):
            rows = [row for row in group.rows if row.decoding and not row.waits]
            # A group may have lost its blocks to one before it, or in the end to itself; never to one behind it.
            if group.id in self._running and all(self._grow(group, row) for row in rows):
                yield from ((group, row, 1) for row in rows)

    def _grow(self, group: Group, row: Row) -> bool:
        """Room for one more token, at the cost of others if need be. False: the group lost its own blocks."""
        while not self._tables.grow(row, 1):
            self._reclaim()
            if group.id not in self._running:
                return False
        return True

    def _prefilling(self) -> list[tuple[Group, Row]]:
        """The rows that have more to compute than their last token, in the order of their turns."""
        rows = [(group, row) for group, row in self._rows_running() if not row.decoding and not row.waits]
        return sorted(rows, key=lambda pair: prefill_key(pair[0].priority, pair[0].admitted or 0, self._prefill_steps))

    def _plan_prefill(self, rows: Sequence[tuple[Group, Row]], budget: int) -> Iterator[tuple[Group, Row, int]]:
        computing: set[bytes] = set()  # blocks that a row of this step computes
        for group, row in rows:
            if budget <= 0:
                return
            self._adopt(group, row)
            if self._tables.next_adoptable(row) in computing:
                continue
            count = self._tables.grow(row, _chunk(row, budget))
            if count:
                budget -= count
                computing.update(self._tables.made_by(row, count))
                yield group, row, count

    def _adopt(self, group: Group, row: Row) -> None:
        before = row.past
        self._tables.adopt(row)
        if group.first_token_at is None and row is group.rows[0]:
            group.cached_tokens = min(row.prompt, group.cached_tokens + row.past - before)

    def _work(self, group: Group, row: Row, count: int) -> RowWork:
        end = row.past + count
        draws = group.draws(row) if end == len(row.tokens) else ()
        return RowWork(tuple(row.table), row.past, row.tokens[row.past : end], draws, _score(row, end), group.request.model)

    # shortage

    def _relieve(self) -> bool:
        """Nothing could be planned: free blocks for those that wait for some. False: that cannot help."""
        if all(row.waits for _, row in self._rows_running()):
            return False
        if self._drop_one_idle():
            return True
        if len(self._running) < 2:
            return False
        self._reclaim()
        return True

    def _reclaim(self) -> None:
        """Free the blocks of one group."""
        if self._drop_one_idle():
            return
        victim = max(self._running.values(), key=_order)
        del self._running[victim.id]
        self._forget_cache(victim)
        self._wait_again(victim)
        self._lost.append(Lost(victim, kept=False))

    def _drop_one_idle(self, but: Group | None = None) -> bool:
        """Take the blocks of the oldest group that holds some and does not run, ``but`` one."""
        holders = (group for group in (*self._paused.values(), *self.waiting) if any(row.table for row in group.rows))
        idle = [group for group in holders if group is not but]
        if not idle:
            return False
        self._forget_cache(min(idle, key=lambda group: group.admitted or 0))
        return True

    def _forget_cache(self, group: Group) -> None:
        for row in group.rows:
            self._tables.drop(row)

    def _wait_again(self, group: Group) -> None:
        queue = self._waiting[group.priority]
        queue[group.id] = group
        queue.move_to_end(group.id, last=False)

    def _note_overtaken(self, queue: Mapping[str, Group], chosen: Group, now: float) -> None:
        for group in queue.values():
            if group is chosen:
                return
            group.overtaken += 1
            if group.overtaken_at is None:
                group.overtaken_at = now


def _order(group: Group) -> tuple[int, int]:
    return RANK[group.priority], group.admitted or 0


def _chunk(row: Row, budget: int) -> int:
    """All that the row has to compute, or what the budget leaves of it, up to a block's end where it can be."""
    if row.pending <= budget:
        return row.pending
    to_boundary = (row.past + budget) // BLOCK_TOKENS * BLOCK_TOKENS - row.past
    return to_boundary if to_boundary > 0 else budget


def _score(row: Row, end: int) -> Score | None:
    """The logits at a position score the token behind it."""
    until = min(end + 1, row.score_until)
    if row.scored >= until:
        return None
    return Score(row.scored - 1 - row.past, row.tokens[row.scored : until], row.top)
