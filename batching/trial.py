"""Steps that an engine with a latency target runs before it takes requests, to learn how long steps take.

Without them its first requests would be held to steps far smaller or far greater than the target allows.
"""

from collections.abc import Iterator, Sequence

from batching.runner import BLOCK_TOKENS, Draw, RowWork, Runner, blocks_for
from promptmill.core.jobs import SamplingParams

ROUNDS = 3  # the first one is slow for reasons of its own: code is built, memory is touched
_GREEDY = (Draw(SamplingParams(max_tokens=1, temperature=0.0), seed=0, position=0),)


def trial_steps(runner: Runner, model: str, prefill: int) -> Iterator[Sequence[RowWork]]:
    """One round: few and many rows that decode, short and long prompts. They write to blocks that nobody holds yet."""
    most_rows = min(runner.rows, runner.blocks)
    for rows in sorted({1, max(1, most_rows // 4), most_rows}):
        yield [_work(model, range(row, row + 1), 1) for row in range(rows)]
    most = min(prefill, runner.context_length - 1, runner.blocks * BLOCK_TOKENS)
    for length in sorted({max(1, most // 4), most}):
        yield [_work(model, range(blocks_for(length)), length)]


def _work(model: str, table: range, length: int) -> RowWork:
    return RowWork(tuple(table), 0, [0] * length, _GREEDY, None, model)
