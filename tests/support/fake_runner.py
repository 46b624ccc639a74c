"""A runner that computes with integers, and holds the loop to every word of the Runner's contract.

Its cache keeps, for each token, the id and the hash of the row up to it. It reads rows back through
their tables alone: a block in the wrong table does not continue the hash and is found at once; the
table of another row gives another text. Its logits are numbers made from that hash, a real
distribution, from which it draws, scores and lists candidates as a model would.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.grammar import GrammarError
from batching.runner import BLOCK_TOKENS, Draw, Drawn, OutOfMemory, RowError, RowOutput, RowResult, RowWork, Score
from batching.sampling import mix64
from promptmill.core.clock import Clock
from promptmill.core.engine import Capabilities
from promptmill.core.jobs import TokenLogprob
from tests.support.clock import FakeClock

EOS, START, WHOLE_STEP_FAILS, ROW_FAILS = 0, 1, 5, 6
VOCAB_SIZE = 364  # of the tiny tokenizer
EMPTY = -1
GAMMA = 0x9E3779B97F4A7C15

Floats = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]


class ContractBroken(BaseException):
    """The loop asked for what the Runner's contract forbids. No Exception: the loop must not take it for a failed step."""


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds of a step: base + token * T + context * L, T tokens computed, L tokens attended to by all rows
    together; ``noise`` 0.1 = up to a tenth more or less, the same in every run."""

    base_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    noise: float = 0.0

    def seconds(self, rows: Sequence[RowWork], number: int) -> float:
        tokens = sum(len(work.token_ids) for work in rows)
        context = sum(work.past + len(work.token_ids) for work in rows)
        off = self.noise * (2 * mix64(number) / 2**64 - 1)
        return (self.base_s + self.token_s * tokens + self.context_s * context) * (1 + off)


class FakeRunner:
    """All capabilities. A draw depends on the row's tokens, and unless greedy on seed, choice and position.

    It fails on demand: a step that runs the token WHOLE_STEP_FAILS raises, as all do with ``fail_always``;
    a row with ROW_FAILS has from there on a cache full of NaN, and fails when it is to draw, as does any
    row in whose blocks such values are left; a step of more than ``max_step_tokens`` is out of memory.
    Time passes by ``law`` on a FakeClock. ``steps`` are those that went well.
    """

    block_bytes = 10 * BLOCK_TOKENS

    def __init__(
        self,
        rows: int = 4,
        reserved: int = 2,
        *,
        blocks: int = 64,
        context_length: int = 128,
        vocab_size: int = VOCAB_SIZE,
        max_step_tokens: int | None = None,
        law: StepLaw = StepLaw(),
        clock: Clock | None = None,
        caps: Capabilities | None = None,
    ):
        self.rows = rows
        self.reserved = reserved
        self.blocks = blocks
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.caps = caps or Capabilities(batch_invariant=True)
        self.max_step_tokens = max_step_tokens
        self.fail_always = False
        self.steps: list[list[RowWork]] = []
        self.copies = 0
        self._law = law
        self._clock = clock
        self._calls = 0
        self._ids = np.full((blocks, BLOCK_TOKENS), EMPTY, np.int64)
        self._hashes = np.zeros((blocks, BLOCK_TOKENS), np.uint64)
        self._nan = np.zeros((blocks, BLOCK_TOKENS), np.bool_)

    # -- the port

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        self._check_step(rows)
        self._calls += 1
        if isinstance(self._clock, FakeClock):
            self._clock.advance(self._law.seconds(rows, self._calls))
        if self.max_step_tokens is not None and sum(len(work.token_ids) for work in rows) > self.max_step_tokens:
            raise OutOfMemory
        for work in rows:
            self._write(work)
        if self.fail_always or any(WHOLE_STEP_FAILS in work.token_ids for work in rows):
            raise RuntimeError("the forward failed")
        self.steps.append([replace(work, table=tuple(work.table), token_ids=tuple(work.token_ids)) for work in rows])
        return [self._result(work) for work in rows]

    def copy(self, source: int, target: int) -> None:
        self._check_blocks((source, target))
        _require(self._ids[source, 0] != EMPTY, "copy: the source holds nothing")
        self.copies += 1
        for cells in (self._ids, self._hashes, self._nan):
            cells[target] = cells[source]

    def wipe(self, blocks: Sequence[int]) -> None:
        self._check_blocks(blocks)
        self._ids[list(blocks)] = EMPTY
        self._hashes[list(blocks)] = 0
        self._nan[list(blocks)] = False

    # -- the contract

    def _check_step(self, rows: Sequence[RowWork]) -> None:
        _require(0 < len(rows) <= self.rows + self.reserved, "a step has at least one row and at most as many as there are")
        for work in rows:
            self._check_row(work)
        holders = Counter(block for work in rows for block in work.table)
        for work in rows:
            _require(all(holders[block] == 1 for block in _written(work)), "a block that is written stands in another table too")

    def _check_row(self, work: RowWork) -> None:
        end = work.past + len(work.token_ids)
        _require(len(work.token_ids) > 0, "a row runs at least one token")
        _require(all(0 <= token < self.vocab_size for token in work.token_ids), "a token id is out of range")
        _require(work.past >= 0 and end <= self.context_length, "a row is longer than the context")
        _require(end <= len(work.table) * BLOCK_TOKENS, "the table has no room for the row")
        self._check_blocks(work.table)
        self._check_past(work)
        if work.score is not None:
            self._check_score(work, work.score)
        tokens = self._read(self._ids, work, work.past).tolist() + list(work.token_ids)
        for draw in work.draws:
            self._check_draw(draw, tokens)
        _require(len({draw.choice for draw in work.draws}) == len(work.draws), "a choice is drawn twice")

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        _require(all(0 <= block < self.blocks for block in blocks), "a block that there is not")
        _require(len(set(blocks)) == len(blocks), "a block stands twice in one table")

    def _check_past(self, work: RowWork) -> None:
        ids, hashes = self._read(self._ids, work, work.past), self._read(self._hashes, work, work.past)
        _require(bool(np.all(ids != EMPTY)), "the cache does not hold all tokens of the row's past")
        before = np.concatenate([np.zeros(1, np.uint64), hashes[:-1]])[: work.past]
        _require(np.array_equal(_hash_next(before, ids), hashes), "the row's blocks are not of one row")

    def _check_score(self, work: RowWork, score: Score) -> None:
        known = list(work.token_ids[score.first + 1 :])
        _require(score.first >= 0 and score.first + len(score.targets) <= len(work.token_ids), "a score outside the step")
        _require(len(score.targets) > 0 and 0 <= score.top <= 20, "a score of nothing, or with too many alternatives")
        _require(list(score.targets[: len(known)]) == known[: len(score.targets)], "a target is not the token that follows")

    def _check_draw(self, draw: Draw, tokens: Sequence[int]) -> None:
        _require(0 <= draw.position < len(tokens), "a draw at no position of the output")
        _require((draw.candidates > 0) == (draw.sampling.beam is not None), "candidates are for beam search")
        if draw.history is None:
            _require(not draw.sampling.penalised, "penalties need the history")
        else:
            prompt = len(tokens) - draw.position
            _require(draw.history.prompt == frozenset(tokens[:prompt]), "the history has another prompt")
            _require(draw.history.output == Counter(tokens[prompt:]), "the history has another output")

    # -- the cache

    def _read(self, cells: npt.NDArray[Any], work: RowWork, count: int) -> npt.NDArray[Any]:
        return cells[list(work.table)].reshape(-1)[:count]

    def _write(self, work: RowWork) -> None:
        state = int(self._read(self._hashes, work, work.past)[-1]) if work.past else 0
        nan = bool(self._read(self._nan, work, work.past).any())
        for position, token in enumerate(work.token_ids, work.past):
            state = mix64(state + (token + 1) * GAMMA)
            nan = nan or token == ROW_FAILS
            block, offset = divmod(position, BLOCK_TOKENS)
            cell = work.table[block], offset
            self._ids[cell], self._hashes[cell], self._nan[cell] = token, state, nan
            self._ids[work.table[block], offset + 1 :] = EMPTY  # of the block's former owner

    # -- the model

    def _result(self, work: RowWork) -> RowResult:
        end = work.past + len(work.token_ids)
        used = list(work.table[: -(-end // BLOCK_TOKENS)])
        if (work.draws or work.score) and self._nan[used].any():
            return RowError("non_finite_logits", "the model produced values that are not numbers for this request", tainted=True)
        states = [int(state) for state in self._read(self._hashes, work, end)[work.past :]]
        try:
            drawn = tuple(self._draw(draw, states[-1]) for draw in work.draws)
        except GrammarError as error:
            return RowError("grammar_error", str(error))
        scores: list[TokenLogprob] = []
        if work.score is not None:
            for state, target in zip(states[work.score.first :], work.score.targets, strict=False):
                scores.append(_logprob(_log_softmax(self._logits(state)), target, work.score.top))
        return RowOutput(drawn, tuple(scores))

    def _draw(self, draw: Draw, state: int) -> Drawn:
        sampling, raw = draw.sampling, self._logits(state)
        logprobs = _log_softmax(self._processed(draw, raw))
        if draw.candidates:
            order = _best(logprobs, draw.candidates)
            return Drawn(order[0] if order else EOS, None, tuple((token, float(logprobs[token])) for token in order))
        if sampling.greedy:
            token = int(np.argmax(logprobs))
        else:
            number = mix64(mix64(mix64(state ^ mix64(draw.seed)) + draw.choice) + draw.position) / 2**64
            mass = np.cumsum(np.exp(logprobs))
            token = int(np.searchsorted(mass, number * mass[-1], side="right"))
        return Drawn(token, None if sampling.logprobs is None else _logprob(_log_softmax(raw), token, sampling.logprobs))

    def _logits(self, state: int) -> Floats:
        """The end token in one state of thirty; hardly ever one that makes the fake fail."""
        ids = np.arange(self.vocab_size)
        logits = 6 * (_hash_next(np.full(len(ids), state, np.uint64), ids) / np.float64(2**64))
        logits[[START, WHOLE_STEP_FAILS, ROW_FAILS]] = -40.0
        if state % 30 == 0:
            logits[EOS] = 12.0
        return logits

    def _processed(self, draw: Draw, raw: Floats) -> Floats:
        """Raises GrammarError when nothing may be drawn."""
        sampling, logits = draw.sampling, raw.copy()
        logits[list(draw.banned)] = -np.inf
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        if draw.history is not None:
            for token, count in draw.history.output.items():
                logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
            for token in draw.history.prompt | draw.history.output.keys():
                logits[token] -= sampling.repetition_penalty - 1
        if draw.mask is not None:
            bits = np.unpackbits(draw.mask().view(np.uint8), bitorder="little")[: self.vocab_size]
            _require(len(bits) == self.vocab_size, "a mask too short for the vocabulary")
            logits[bits == 0] = -np.inf
        if not draw.candidates and not np.isfinite(logits).any():
            raise GrammarError("the grammar allows no token")
        return logits if sampling.greedy else logits / sampling.temperature


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ContractBroken(message)


def _written(work: RowWork) -> Sequence[int]:
    """The blocks that a step writes for the row."""
    return work.table[work.past // BLOCK_TOKENS : (work.past + len(work.token_ids) - 1) // BLOCK_TOKENS + 1]


def _hash_next(states: Hashes, ids: npt.NDArray[np.int64]) -> Hashes:
    """The hashes of rows of tokens, each with one more id: mix64 of many."""
    z = states + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _log_softmax(logits: Floats) -> Floats:
    top = logits.max()
    if not np.isfinite(top):
        return logits
    return logits - top - np.log(np.exp(logits - top).sum())


def _best(logprobs: Floats, count: int) -> list[int]:
    """The ids that are possible, by (logprob descending, id ascending)."""
    order = np.lexsort((np.arange(len(logprobs)), -logprobs))[:count]
    return [int(token) for token in order if np.isfinite(logprobs[token])]


def _logprob(logprobs: Floats, token: int, top: int) -> TokenLogprob:
    return TokenLogprob(float(logprobs[token]), tuple((best, float(logprobs[best])) for best in _best(logprobs, top)))
