"""The port between the engine loop, which decides, and a runner, which computes.

A *step* is one forward pass over a packed batch: rows that decode bring one token each, rows that
prefill bring a chunk of their text. The loop knows rows, blocks, positions and token ids; only the
runner knows tensors.

The KV cache is a pool of blocks of BLOCK_TOKENS tokens. A row's *table* lists its blocks in order:
token p of the row lies in block ``table[p // BLOCK_TOKENS]`` at ``p % BLOCK_TOKENS``. Blocks may stand
in several tables; a block that does is whole and is never written to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from batching.history import History
from promptmill.core.engine import Capabilities
from promptmill.core.jobs import SamplingParams, TokenLogprob

BLOCK_TOKENS = 64


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


Words = npt.NDArray[np.uint32]  # a bit per token id, from the lowest bit of the first word on


class OutOfMemory(Exception):
    """A step did not fit the device's memory; the same rows in smaller steps may."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw the token that follows a row's last one, from the logits there.

    ``choice``, ``position``: which output and the index in it (0 = first); with ``seed`` they are all the
    randomness there is, so the same ones and the same logits give the same token in any batch.
    ``banned``: ids that must not be drawn. ``mask``: gives the ids that a grammar allows; called once,
    from the runner's thread; may wait for a computation and raises GrammarError. ``history``: the row's
    tokens so far, for penalties (None: no penalty applies); changes after the step.
    ``candidates`` > 0: do not draw, but give so many of the best, for beam search.
    """

    sampling: SamplingParams
    seed: int
    position: int
    choice: int = 0
    banned: tuple[int, ...] = ()
    mask: Callable[[], Words] | None = None
    history: History | None = None
    candidates: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """Score known tokens: ``targets[i]`` is the one that follows the row's token ``first + i`` of this step.
    ``top``: how many alternatives beside each."""

    first: int
    targets: Sequence[int]
    top: int


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row's share of a step.

    ``table``: blocks with room for ``past + len(token_ids)`` tokens. ``past``: tokens of the row that are
    in the cache already. ``token_ids``: the tokens to run now, at positions past, past + 1, …. ``draws``:
    what to draw after the last of them; empty while more of the text is to come; several when one prompt
    begins several choices. ``model``: the served name, for runners that serve several.
    """

    table: Sequence[int]
    past: int
    token_ids: Sequence[int]
    draws: tuple[Draw, ...] = ()
    score: Score | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class Drawn:
    """``logprob``: if the request asked for it. ``candidates``: (id, logprob) by (logprob descending, id
    ascending) of the processed distribution, fewer when fewer are possible; ``token`` is then the first."""

    token: int
    logprob: TokenLogprob | None = None
    candidates: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowOutput:
    """``drawn``: one per draw asked for. ``scores``: one per target asked for."""

    drawn: tuple[Drawn, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RowError:
    """This row failed; the others of the step did not. ``tainted``: its KV may hold values that are not numbers."""

    code: str
    message: str
    tainted: bool = False


RowResult = RowOutput | RowError


class Runner(Protocol):
    """The model. Called from the engine thread alone, but for its attributes."""

    context_length: int
    vocab_size: int
    caps: Capabilities
    rows: int  # for all priorities
    blocks: int  # of the pool; their ids are 0 .. blocks - 1
    block_bytes: int

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        """Run one step; results in the order of ``rows``. Running the same rows again after a failure gives
        what it would have given. Raises OutOfMemory, or anything else, only if the whole step failed."""

    def copy(self, source: int, target: int) -> None:
        """Copy a block: the first of a fork's own."""

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros, so that nothing of a tainted row can reach another."""
