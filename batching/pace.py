"""How much a step may hold: rows and prompt tokens, from the target latency and from what memory bore.

The target is an inter-token latency, so it binds only steps in which rows decode. After a step that
ran out of memory the steps are held to half its tokens, and grow again by a tenth every GOOD_STEPS.
"""

from batching.group import Group
from batching.row import Row
from batching.scheduler import Plan
from batching.steptime import StepTime

GOOD_STEPS = 50


class Pace:
    """``target_s`` 0 = throughput only. ``rows``, ``prefill``: the most a step may hold of either."""

    def __init__(self, target_s: float, *, rows: int, prefill: int):
        self._target_s = target_s
        self._rows = rows
        self._prefill = prefill
        self._times = StepTime()
        self._borne = rows + prefill  # tokens of a step that memory bears
        self._good_steps = 0
        self._context = 0.0  # tokens that a row of the last step is expected to attend to

    @property
    def row_limit(self) -> int:
        """Rows that may run together."""
        rows = min(self._rows, self._borne)
        if not self._target_s:
            return rows
        return min(rows, self._times.rows_within(self._target_s, self._context, rows))

    def prefill_budget(self, decode_rows: int, context: int) -> int:
        """Prompt tokens that may run beside ``decode_rows``, which attend to ``context`` tokens together."""
        most = max(1, min(self._prefill, self._borne - decode_rows))
        return self._times.prefill_within(self._target_s, decode_rows, context, most)

    def learn(self, tokens: int, context: int, seconds: float) -> None:
        """A step of a trial took so long."""
        self._times.observe(tokens, context, seconds)

    def observe(self, plan: Plan, seconds: float) -> None:
        """A step went well."""
        self._times.observe(plan.tokens, plan.context, seconds)
        self._context = sum(_expected(group, row) for group, row in plan.rows) / len(plan.rows)
        self._good_steps += 1
        if self._good_steps % GOOD_STEPS == 0:
            self._borne = min(self._rows + self._prefill, self._borne + self._borne // 10 + 1)

    @property
    def memory_rows(self) -> int:
        """Rows that memory bears; the rest of those that run are to be paused."""
        return self._borne

    def out_of_memory(self, tokens: int) -> None:
        """A step of so many tokens did not fit."""
        self._borne = min(self._borne, max(1, tokens // 2))
        self._good_steps = 0


def _expected(group: Group, row: Row) -> float:
    """Tokens of the row about the middle of its answer: rows that begin together grow together."""
    return max(row.past, row.prompt + group.sampling.max_tokens / 2)
