"""The draw itself: temperature, top_k, top_p, min_p and the inverse CDF over ordered candidates, in float64 on the host."""

import numpy as np

from batching.engines.torch.candidates import Floats
from promptmill.core.jobs import SamplingParams

UNKNOWN = float("inf")


def pick(logits: Floats, whole: float | None, sampling: SamplingParams, u: float) -> int | None:
    """The place in ``logits`` (descending, the first one finite) that ``u`` in [0, 1) draws. top_k has been applied.

    ``whole``: None when the logits are all that there are; where they are only the best, the mass of
    all (the best token's is 1), UNKNOWN if nobody has added it up. Returns None when the draw may
    reach beyond them.
    """
    weights = np.exp((logits - logits[0]) / sampling.temperature)
    weights = weights[: int(np.count_nonzero(weights))]
    mass = np.cumsum(weights)
    kept = len(weights)
    ends = whole is None or kept < len(logits)  # whether what is kept ends inside of these logits
    total = float(mass[-1]) if ends or whole is None else whole
    if sampling.top_p < 1:
        if total == UNKNOWN:
            return None
        nucleus = int(np.searchsorted(mass, sampling.top_p * total, side="left")) + 1
        if nucleus <= kept:
            kept, ends = nucleus, True
    if sampling.min_p > 0:
        likely = int(np.count_nonzero(weights >= sampling.min_p))
        if likely < kept:
            kept, ends = likely, True
    if ends:
        total = float(mass[kept - 1])
    elif total == UNKNOWN or sampling.top_p < 1 or sampling.min_p > 0:
        return None
    place = int(np.searchsorted(mass[:kept], u * total, side="right"))
    if place < kept:
        return place
    return kept - 1 if ends else None
