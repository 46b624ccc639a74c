"""From logits to a token, row by row: no row's draw depends on the rows beside it.

The definition, in this order:

1. guard: a row whose largest logit is not a finite number fails alone,
2. temperature: under 1e-5 the row is greedy and takes the largest logit, else logits are divided by it,
3. top_k: the k best stay, ordered by (logit descending, id ascending); 0 keeps all,
4. top_p: of those, renormalised, the shortest run from the best on whose mass reaches top_p,
5. draw: the first token at which the cumulative mass of what is left exceeds u times the whole, with
   one u = uniform(seed, position).

The vocabulary is not sorted: the 256 best are cut out, and only a draw that reaches beyond them
(a flat distribution, or a top_k above 256) orders all of it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from batching.runner import Draw, RowError, RowResult
from batching.sampling import uniform
from promptmill.core.jobs import SamplingParams

CANDIDATES = 256

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[RowResult]:
    """One token per row of ``logits`` [rows, vocabulary], or the row's RowError."""
    best, greedy_ids = logits.max(-1)  # of equal logits torch's max gives the first; a NaN wins over all
    finite = torch.isfinite(best).tolist()
    results: list[RowResult] = list(greedy_ids.tolist())
    for row, draw in enumerate(draws):
        if not finite[row]:
            results[row] = RowError("non_finite_logits", "the model produced values that are not numbers for this request")
        elif not draw.sampling.greedy:
            values = logits[row].float().cpu().numpy()
            results[row] = draw_token(values, draw.sampling, uniform(draw.seed, draw.position))
    return results


def draw_token(logits: npt.NDArray[np.float32], sampling: SamplingParams, u: float) -> int:
    """The token that ``u`` in [0, 1) draws from one row of finite or -inf logits."""
    size = len(logits)
    count = min(sampling.top_k or size, size)
    cut = min(CANDIDATES, size)
    if count <= cut:
        ids = best_ids(logits, count)
        weights = _weights(logits[ids], logits[ids[0]], sampling.temperature)
        return _pick(ids, weights, float(weights.sum()), sampling.top_p, u)
    if count == size:
        ids = best_ids(logits, cut)
        weights = _weights(logits[ids], logits[ids[0]], sampling.temperature)
        whole = float(_weights(logits, logits[ids[0]], sampling.temperature).sum())
        # Enough if the candidates hold the nucleus, or, without one, the point that u names.
        if weights.sum() > (sampling.top_p if sampling.top_p < 1 else u) * whole:
            return _pick(ids, weights, whole, sampling.top_p, u)
    ids = best_ids(logits, count)
    weights = _weights(logits[ids], logits[ids[0]], sampling.temperature)
    return _pick(ids, weights, float(weights.sum()), sampling.top_p, u)


def best_ids(logits: npt.NDArray[np.float32], count: int) -> Ids:
    """The ``count`` best ids, ordered by (logit descending, id ascending)."""
    # One integer per token holds both criteria, so that no two are equal and a partition is exact:
    # the float's bits, made to sort as integers do, above the id counted from the end.
    bits = (logits + np.float32(0)).view(np.int32)  # adding 0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    last = len(logits) - 1
    keys = (ordered.astype(np.int64) << 32) | np.arange(last, -1, -1, dtype=np.int64)
    if count < len(keys):
        keys = np.partition(keys, len(keys) - count)[len(keys) - count :]
    keys.sort()
    ids: Ids = last - (keys[::-1] & 0xFFFFFFFF)
    return ids


def _weights(logits: npt.NDArray[np.float32], best: np.float32, temperature: float) -> Floats:
    weights: Floats = np.exp((logits.astype(np.float64) - float(best)) / temperature)
    return weights


def _pick(ids: Ids, weights: Floats, whole: float, top_p: float, u: float) -> int:
    """``whole``: the mass that top_p is a share of; ``weights`` may be only its best part."""
    mass = np.cumsum(weights)
    kept = len(ids)
    if top_p < 1:
        kept = min(int(np.searchsorted(mass, top_p * whole, side="left")) + 1, len(ids))
        whole = float(mass[kept - 1])
    return int(ids[min(int(np.searchsorted(mass[:kept], u * whole, side="right")), kept - 1)])
