"""The sampler's definition (docs/sampling.md) as plain NumPy over the whole, sorted vocabulary.

Slow, and written without a look at the real one. Logits are float32, and so is every change to them;
probabilities are float64.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batching.runner import Draw
from batching.sampling import uniform

FLOOR = -9999.0

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """``tokens``: those that the draw may give. Several where rounding decides. Or the ``error``'s code."""

    tokens: frozenset[int] = frozenset()
    error: str = ""


def in_order(logits: Floats) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))


def log_softmax(logits: Floats) -> Doubles:
    wide = logits.astype(np.float64)
    best = wide.max()
    return wide - best - math.log(math.fsum(np.exp(wide - best)))


def top(logits: Floats, count: int) -> list[tuple[int, float]]:
    logprobs = np.maximum(log_softmax(logits), FLOOR)
    return [(token, float(logprobs[token])) for token in in_order(logits)[:count]]


def is_broken(logits: Floats) -> bool:
    return bool(np.isnan(logits).any() or (logits == np.inf).any() or (logits == -np.inf).all())


def processed(logits: Floats, draw: Draw) -> Floats:
    """Steps 3 to 6: ban, bias, penalties, mask."""
    params, size = draw.sampling, len(logits)
    values = logits.astype(np.float32).copy()
    words = None if draw.mask is None else draw.mask()
    allowed = {token for token in range(size) if words is None or (int(words[token // 32]) >> (token % 32)) & 1}
    if draw.mask is None or allowed - set(draw.banned):
        for token in draw.banned:
            values[token] = -np.inf
    for token, bias in params.logit_bias:
        values[token] += np.float32(bias)
    if draw.history is not None:
        for token in set(draw.history.prompt) | set(draw.history.output):
            penalty = np.float32(params.repetition_penalty)
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        for token, count in draw.history.output.items():
            values[token] -= np.float32(params.presence_penalty + params.frequency_penalty * count)
    for token in set(range(size)) - allowed:
        values[token] = -np.inf
    return values


def expected(logits: Floats, draw: Draw, slack: float = 3e-6) -> Expected:
    """``slack``: of the cumulative mass, within which rounding may decide."""
    if is_broken(logits):
        return Expected(error="non_finite_logits")
    values = processed(logits, draw)
    if (values == -np.inf).all():
        return Expected(error="no_token_allowed" if draw.mask is None else "grammar_dead_end")
    order = [token for token in in_order(values) if values[token] > -np.inf]
    if draw.sampling.temperature < 1e-5:
        return Expected(frozenset(order[:1]))
    u = uniform(draw.seed, draw.position, draw.choice)
    tokens = set()
    for off in (-slack, 0.0, slack):
        for at in (-slack, 0.0, slack):
            tokens.add(drawn(values, order, draw, u + at, off))
    return Expected(frozenset(tokens))


def drawn(values: Floats, order: list[int], draw: Draw, u: float, off: float) -> int:
    """Steps 7 to 11. ``off`` is added to top_p."""
    params = draw.sampling
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp((float(values[token]) - float(values[order[0]])) / params.temperature) for token in order]
    whole = math.fsum(weights)
    if params.top_p < 1:
        kept, mass = 0, 0.0
        while kept < len(order) and (kept == 0 or mass < (params.top_p + off) * whole):
            mass += weights[kept]
            kept += 1
        order, weights = order[:kept], weights[:kept]
    kept = sum(weight >= params.min_p for weight in weights)
    order, weights = order[:kept], weights[:kept]
    whole, mass = math.fsum(weights), 0.0
    for token, weight in zip(order, weights, strict=True):
        mass += weight
        if mass > u * whole:
            return token
    return order[-1]


def best(logits: Floats, draw: Draw) -> list[tuple[int, float]]:
    """For beam search: the likeliest of the processed distribution."""
    values = processed(logits, draw)
    if (values == -np.inf).all():
        return []
    return [(token, logprob) for token, logprob in top(values, draw.candidates) if values[token] > -np.inf]
