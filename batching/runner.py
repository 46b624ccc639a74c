"""The port between the engine loop, which decides, and a runner, which computes.

A *step* is one forward pass over a packed batch: rows that decode bring one token each, rows that
prefill bring a chunk of their prompt. The loop knows rows, positions and token ids; only the
runner knows tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from promptmill.core.jobs import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw the next token of a row from its last logits.

    ``position``: index of that token in the output, 0 for the first. With ``seed`` it is all the
    randomness there is: the same (seed, position) and logits give the same token in any batch.
    """

    sampling: SamplingParams
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row's share of a step.

    ``slot``: the row's place in the KV cache. ``past``: tokens of it that are already there.
    ``token_ids``: the tokens to run now, at positions past, past + 1, …. ``draw`` is None while
    more of the prompt is to come. ``model``: the served name, for runners that serve several.
    """

    slot: int
    past: int
    token_ids: Sequence[int]
    draw: Draw | None
    model: str = ""


@dataclass(frozen=True, slots=True)
class RowError:
    """This row failed; the others of the step did not."""

    code: str
    message: str


RowResult = int | RowError | None  # the token drawn | failure | nothing to draw


class Runner(Protocol):
    """The model. Called from the engine thread alone, but for its attributes."""

    context_length: int
    vocab_size: int
    batch_invariant: bool  # a row's tokens do not depend on the rows beside it, by a self-check at load
    rows: int  # for all priorities; slots are 0 .. rows + reserved - 1
    kv_budget_bytes: int  # what kv_bytes of all open rows may sum up to

    def kv_bytes(self, tokens: int) -> int:
        """KV bytes of one row that may grow to ``tokens`` tokens."""

    def open(self, slot: int, tokens: int) -> None:
        """Give the free ``slot`` room for ``tokens`` tokens."""

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        """Run one step; results in the order of ``rows``. Raises only if the whole step failed."""

    def close(self, slot: int) -> None:
        """Free the slot's room."""
