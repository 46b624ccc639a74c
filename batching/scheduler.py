"""The scheduler: which rows run, and what the next step computes. No clock, lock or tensor.

A request waits, is admitted to a row, prefills its prompt in chunks, decodes, and is removed.

* **Admission** reserves the KV bytes of prompt + max_tokens for the row's whole life, so a running
  row can never lack room and nobody is ever preempted for bytes. A request that does not fit *yet*
  blocks those behind it of the same or a lower rank: a big one is not overtaken for ever by
  small ones of its own kind.
* **A step** is all decodes first, then prefill chunks. Chunks lie at multiples of
  ``prefill_tokens`` from the row's start whatever runs beside it, so that its bits do not depend
  on its neighbours. They are taken whole within a budget of ``prefill_tokens`` per step, one at
  least.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from batching.policy import RANK, admission_order, has_row, prefill_key
from batching.request import Row
from batching.runner import Draw, RowError, RowResult, RowWork
from batching.slots import Slots
from promptmill.core.jobs import Priority


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. ``ids``: the request of each piece of work; the first ``decode_rows`` are decodes."""

    works: tuple[RowWork, ...]
    ids: tuple[str, ...]
    decode_rows: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Drew:
    """The row got its next token, already in its ``output``."""

    row: Row
    token: int


@dataclass(frozen=True, slots=True)
class Broke:
    """The row failed alone."""

    row: Row
    error: RowError


class Scheduler:
    """Owns the waiting and the running requests, the slots and their bytes."""

    def __init__(self, *, rows: int, reserved: int, kv_budget: int, kv_bytes: Callable[[int], int], prefill_tokens: int):
        self._rows = rows
        self._reserved = reserved
        self._kv_bytes = kv_bytes
        self._chunk = prefill_tokens
        self._slots = Slots(rows + reserved, kv_budget)
        self._waiting: dict[Priority, OrderedDict[str, Row]] = {priority: OrderedDict() for priority in Priority}
        self._running: dict[str, Row] = {}
        self._admissions = 0
        self._prefill_steps = 0

    @property
    def waiting(self) -> list[Row]:
        return [row for queue in self._waiting.values() for row in queue.values()]

    @property
    def running(self) -> Collection[Row]:
        return self._running.values()

    @property
    def running_by_priority(self) -> Mapping[Priority, int]:
        return Counter(row.request.priority for row in self._running.values())

    @property
    def kv_bytes_used(self) -> int:
        return self._slots.used

    def submit(self, row: Row) -> None:
        """``row`` waits. Its id must be new, and its room must fit an empty engine."""
        self._waiting[row.request.priority][row.request.id] = row

    def remove(self, request_id: str) -> Row | None:
        """Take a request out, waiting or running, and free what it holds; None if it is not here."""
        if row := self._running.pop(request_id, None):
            self._slots.release(row.slot)
            return row
        for queue in self._waiting.values():
            if row := queue.pop(request_id, None):
                return row
        return None

    def admit(self) -> list[Row]:
        """Give rows to waiting requests, in policy order, as far as slots and bytes go."""
        admitted = []
        while row := self._next():
            del self._waiting[row.request.priority][row.request.id]
            row.slot = self._slots.take(self._kv_bytes(row.room))
            row.admitted = self._admissions
            self._admissions += 1
            self._running[row.request.id] = row
            admitted.append(row)
        return admitted

    def plan(self) -> Plan:
        """The next step; empty when nothing runs."""
        decodes = [row for row in self._running.values() if not row.prefilling]
        chunks = self._prefill_chunks([row for row in self._running.values() if row.prefilling])
        works = [self._decode(row) for row in decodes] + [work for _, work in chunks]
        ids = [row.request.id for row in decodes] + [row.request.id for row, _ in chunks]
        return Plan(tuple(works), tuple(ids), len(decodes), sum(len(work.token_ids) for _, work in chunks))

    def commit(self, plan: Plan, results: Sequence[RowResult]) -> list[Drew | Broke]:
        """Book what the step gave; rows that failed are removed. The caller ends the others."""
        happened: list[Drew | Broke] = []
        for request_id, work, result in zip(plan.ids, plan.works, results, strict=True):
            row = self._running[request_id]
            if isinstance(result, RowError):
                self.remove(request_id)
                happened.append(Broke(row, result))
                continue
            assert (result is None) == (work.draw is None), "the runner must draw where asked, and only there"
            row.past += len(work.token_ids)
            if result is not None:
                row.output.append(result)
                happened.append(Drew(row, result))
        self._prefill_steps += plan.prompt_tokens > 0
        return happened

    def check_integrity(self) -> None:
        """Slots, bytes and rows tell the same story. Raises AssertionError."""
        self._slots.check_integrity()
        assert sorted(row.slot for row in self._running.values()) == sorted(self._slots.held), "rows and slots differ"

    def _next(self) -> Row | None:
        running = self.running_by_priority
        blocked = len(RANK)  # ranks from here on must not overtake a request that waits for bytes
        for priority in admission_order(running.get(Priority.BULK, 0)):
            queue = self._waiting[priority]
            if not queue or RANK[priority] >= blocked or not has_row(priority, running, self._rows, self._reserved):
                continue
            head = next(iter(queue.values()))
            if self._slots.fits(self._kv_bytes(head.room)):
                return head
            blocked = RANK[priority]
        return None

    def _decode(self, row: Row) -> RowWork:
        draw = Draw(row.request.sampling, row.seed, len(row.output))
        return RowWork(row.slot, row.past, (row.output[-1],), draw, row.request.model)

    def _prefill_chunks(self, rows: list[Row]) -> list[tuple[Row, RowWork]]:
        rows.sort(key=lambda row: prefill_key(row.request.priority, row.admitted, self._prefill_steps))
        chunks: list[tuple[Row, RowWork]] = []
        left = self._chunk
        for row in rows:
            work = self._prefill(row)
            if len(work.token_ids) <= left:
                chunks.append((row, work))
                left -= len(work.token_ids)
        return chunks

    def _prefill(self, row: Row) -> RowWork:
        prompt = row.request.prompt_ids
        end = min(len(prompt), (row.past // self._chunk + 1) * self._chunk)
        draw = Draw(row.request.sampling, row.seed, 0) if end == len(prompt) else None
        return RowWork(row.slot, row.past, prompt[row.past : end], draw, row.request.model)
