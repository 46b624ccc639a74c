"""From logits to tokens. No row's draw depends on the rows beside it.

The definition; logits are the model's own, cast to float32:

1. guard: a row with NaN or +inf, or with nothing finite, fails alone
2. raw logprobs: log_softmax of the logits as they are here
3. ban: end tokens before min_tokens and under ignore_eos (unless the mask leaves only banned tokens)
4. logit_bias: added
5. repetition: logits of tokens of prompt and output are divided by it where positive, else multiplied
6. presence and frequency: presence + frequency * count is subtracted, for tokens of the output
7. mask: what the grammar does not allow goes
8. temperature: under 1e-5 the first of the largest logits is taken, else logits are divided by it
9. top_k: the k best stay; everywhere "best" is ordered by (logit descending, id ascending)
10. top_p: of those, renormalised, the shortest run from the best on whose mass reaches top_p
11. min_p: tokens stay whose probability is at least min_p times the best one's
12. draw: the first token at which the cumulative mass of what is left exceeds u times the whole, with
    one u = uniform(seed, position, choice)

Beam search takes the best tokens after step 7, with log_softmax of the logits there.

Steps up to 7 run on the logits' device over many rows at once, on a copy; rows that none of them touches are
read where they are. Then only the CANDIDATES best of each row come to the host, all in one transfer; a draw
that may reach beyond them (a flat distribution, a top_k above CANDIDATES) sorts the row's whole vocabulary there.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
from torch import Tensor

from batching.engines.torch.candidates import Floats, best, fetch, masses, ordered, padded, pick_rows, slices
from batching.engines.torch.logprobs import NOT_FINITE, RawLogprobs, score
from batching.engines.torch.nucleus import UNKNOWN, pick
from batching.engines.torch.processors import Limits, limits, process
from batching.grammar import GrammarError
from batching.runner import Draw, Drawn, RowError
from batching.sampling import uniform

__all__ = ["CANDIDATES", "sample", "score"]

CANDIDATES = 256

DEAD_END = RowError("grammar_dead_end", "the grammar allows no token that the model can give here")
NOTHING_ALLOWED = RowError("no_token_allowed", "min_tokens and ignore_eos leave no token that the model can give here")
TOO_GREAT = RowError("non_finite_logits", "the penalties of this request lead beyond the numbers that there are")


class Kernels(Protocol):
    """Faster ways on a CPU."""

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [rows, vocabulary] -> [rows]: the first id of the greatest value, -1 where a row holds NaN or +inf."""

    def shortlist(self, logits: Tensor, count: int, temperatures: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        """The best of each row, values and ids [rows, count], and its mass [rows] at a temperature > 0."""


def sample(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], kernels: Kernels | None = None) -> list[Drawn | RowError]:
    """One result per draw, from row ``rows[i]`` of ``logits`` [any, vocabulary]; several may draw from one."""
    logits = pick_rows(logits, rows)
    first, greatest = _first_best(logits, kernels)
    results = [_plain(token, value) for token, value in zip(*fetch(first, greatest), strict=True)]
    picky = [place for place, draw in enumerate(draws) if isinstance(results[place], Drawn) and not _is_plain(draw)]
    as_they_are = [place for place in picky if kernels is not None and not _is_changed(draws[place])]
    batches = [(as_they_are, pick_rows(logits, as_they_are))] if as_they_are else []
    changed = slices(sorted(set(picky).difference(as_they_are)), logits.device)
    for places, copy in chain(batches, ((places, padded(logits, places)) for places in changed)):
        batch = _Batch(copy, logits.shape[1], [draws[place] for place in places], kernels)
        for place, result in zip(places, batch.results(), strict=True):
            results[place] = result
    return results


def _is_plain(draw: Draw) -> bool:
    """Whether the draw is the first of the model's own best and nothing more."""
    return draw.sampling.greedy and not draw.candidates and not _is_changed(draw)


def _is_changed(draw: Draw) -> bool:
    """Whether the draw needs a copy of the logits, to change them or to take logprobs of all."""
    sampling = draw.sampling
    penalised = sampling.penalised and draw.history is not None
    return bool(draw.banned or draw.mask or draw.candidates or sampling.logit_bias or penalised or sampling.logprobs is not None)


def _first_best(logits: Tensor, kernels: Kernels | None) -> tuple[Tensor, Tensor]:
    """Of each row the first id of the greatest value, and that value: not finite where the row is bad."""
    if kernels is None:
        greatest, ids = logits.max(-1)  # of equal values the first; a NaN wins over all
        return ids, greatest
    ids = kernels.argmax(logits)
    greatest = logits.gather(1, ids.clamp_min(0)[:, None])[:, 0]
    return ids, greatest.masked_fill(ids < 0, float("nan"))


def _plain(token: float, value: float) -> Drawn | RowError:
    return Drawn(int(token)) if np.isfinite(value) else NOT_FINITE


class _Batch:
    """Draws that need more than the first of the best. ``logits``: one row per draw, ``padded`` unless no draw changes
    them and there are kernels; ``size``: the vocabulary."""

    def __init__(self, logits: Tensor, size: int, draws: Sequence[Draw], kernels: Kernels | None):
        self._logits = logits
        self._kernels = kernels
        self._size = size
        self._draws = draws
        tops = {row: min(draw.sampling.logprobs, size) for row, draw in enumerate(draws) if draw.sampling.logprobs is not None}
        self._raw = RawLogprobs(logits, tops)
        self._limits = [_limits(draw) for draw in draws]
        process(logits, draws, [item if isinstance(item, Limits) else Limits() for item in self._limits])
        self._random = [row for row, draw in enumerate(draws) if not draw.sampling.greedy and not draw.candidates]
        self._beams = [row for row, draw in enumerate(draws) if draw.candidates]
        self._left = [min(draw.sampling.top_k or size, size) for draw in draws]  # tokens that top_k leaves
        self._lengths = [min(_length(draw), size) for draw in draws]
        # Rows drawn from the whole vocabulary by its best tokens: the mass of the others counts too.
        self._open = [row for row in self._random if self._lengths[row] < self._left[row] == size]

    def results(self) -> list[Drawn | RowError]:
        top, ids, mass, logprobs = fetch(*self._shortlist())
        whole_of = dict(zip(self._open, mass.tolist(), strict=True))
        beams = dict(zip(self._beams, logprobs, strict=True))
        results: list[Drawn | RowError] = []
        far: list[int] = []
        for row, draw in enumerate(self._draws):
            place: int | None = 0
            if error := self._error(row, top[row, 0]):
                results.append(error)
            elif draw.candidates:
                results.append(_beam(top[row, : draw.candidates], ids[row], beams[row]))
            else:
                if not draw.sampling.greedy:
                    values = top[row, : self._lengths[row]]
                    whole = None if self._lengths[row] == self._left[row] else whole_of.get(row, UNKNOWN)
                    place = pick(values, whole, draw.sampling, _u(draw))
                if place is None:
                    far.append(row)
                results.append(Drawn(int(ids[row, place or 0])))
        self._draw_far(far, results)
        return self._raw.beside(results)

    def _shortlist(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The best logits and their ids, masses of open rows, logprobs of beams."""
        logits, count = self._logits, max(self._lengths)
        heat = {row: self._draws[row].sampling.temperature for row in self._open}
        if self._kernels is not None:
            top, ids, mass = self._kernels.shortlist(logits, count, [heat.get(row, 0.0) for row in range(len(self._draws))])
            mass = pick_rows(mass, self._open)
        else:
            top, ids = best(logits, count)
            mass = logits.new_ones(0)
            if heat:
                mass = masses(logits, self._open, pick_rows(top, self._open)[:, 0], list(heat.values()))
        logprobs = logits.new_ones(0)
        if self._beams:
            logprobs = pick_rows(logits, self._beams).log_softmax(-1).gather(1, pick_rows(ids, self._beams))
        return top, ids, mass, logprobs

    def _error(self, row: int, greatest: float) -> RowError | None:
        item = self._limits[row]
        if isinstance(item, RowError):
            return item
        if greatest == -np.inf and not self._draws[row].candidates:  # a beam without candidates just ends
            return DEAD_END if item.allowed is not None else NOTHING_ALLOWED
        return None if greatest < np.inf else TOO_GREAT

    def _draw_far(self, rows: Sequence[int], results: list[Drawn | RowError]) -> None:
        """Draw from the whole vocabulary."""
        if not rows:
            return
        for row, logits in zip(rows, pick_rows(self._logits, rows).float().cpu(), strict=True):
            draw = self._draws[row]
            values, ids = ordered(logits[: self._size])
            place = pick(values[: draw.sampling.top_k or None], None, draw.sampling, _u(draw))
            assert place is not None
            results[row] = Drawn(int(ids[place]))


def _length(draw: Draw) -> int:
    """How many of the best tokens are wanted."""
    if draw.candidates:
        return draw.candidates
    if draw.sampling.greedy:
        return 1
    return draw.sampling.top_k if 0 < draw.sampling.top_k <= CANDIDATES else CANDIDATES


def _beam(values: Floats, ids: Floats, logprobs: Floats) -> Drawn:
    count = int(np.count_nonzero(values > -np.inf))
    pairs = tuple(zip(ids[:count].astype(np.int64).tolist(), logprobs[:count].tolist(), strict=True))
    return Drawn(pairs[0][0] if pairs else 0, candidates=pairs)


def _limits(draw: Draw) -> Limits | RowError:
    try:
        return limits(draw)
    except GrammarError as error:
        return RowError("grammar_error", error.message)


def _u(draw: Draw) -> float:
    return uniform(draw.seed, draw.position, draw.choice)
