"""What the model itself gives a token: log_softmax of its own logits cast to float32, before any processing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from batching.engines.torch.candidates import Floats, best, fetch, padded, pick_rows, slices
from batching.runner import Drawn, RowError
from promptmill.core.jobs import TokenLogprob

LEAST = -9999.0  # stands for -inf, as in vLLM

NOT_FINITE = RowError("non_finite_logits", "the model produced values that are not numbers for this request", tainted=True)


class RawLogprobs:
    """Of some rows of ``padded`` logits, taken before they are processed. ``tops``: row -> how many alternatives."""

    def __init__(self, logits: Tensor, tops: Mapping[int, int]):
        self._tops = tops
        if tops:
            rows = pick_rows(logits, list(tops))
            self._logprobs = rows.log_softmax(-1)
            self._ids = best(rows, max(tops.values()))[1]

    def beside(self, results: Sequence[Drawn | RowError]) -> list[Drawn | RowError]:
        """The results, each with the logprob of its token if it is to have one."""
        given = list(results)
        if not self._tops:
            return given
        tokens = [item.token if isinstance(item, Drawn) else 0 for item in map(given.__getitem__, self._tops)]
        index = torch.tensor(tokens, device=self._ids.device)[:, None]
        own, tops, ids = fetch(self._logprobs.gather(1, index)[:, 0], self._logprobs.gather(1, self._ids), self._ids)
        for place, (row, count) in enumerate(self._tops.items()):
            if isinstance(item := given[row], Drawn):
                given[row] = replace(item, logprob=_token_logprob(own[place], tops[place, :count], ids[place, :count]))
        return given


def _token_logprob(own: float, top: Floats, ids: Floats) -> TokenLogprob:
    """``top``: logprobs of the ``ids``, the best ones in order."""
    pairs = zip(ids.astype(np.int64).tolist(), np.maximum(top, LEAST).tolist(), strict=True)
    return TokenLogprob(max(float(own), LEAST), tuple(pairs))


def score(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob] | RowError:
    """One TokenLogprob per row of ``logits`` [targets, vocabulary], of that row's target, with the ``top`` best beside.
    They are of one text, so a single row that is not finite fails all."""
    top = min(top, logits.shape[1])
    parts: list[tuple[Tensor, ...]] = []
    for rows in slices(range(len(targets)), logits.device):
        values = padded(logits, rows)
        logprobs = values.log_softmax(-1)
        index = torch.tensor([targets[row] for row in rows], dtype=torch.long, device=logits.device)[:, None]
        ids = best(values, top)[1] if top else index[:, :0]
        parts.append((values.amax(-1), logprobs.gather(1, index)[:, 0], logprobs.gather(1, ids), ids))
    if not parts:
        return []
    greatest, own, tops, ids_of = fetch(*(torch.cat(column) for column in zip(*parts, strict=True)))
    if not np.isfinite(greatest).all():
        return NOT_FINITE
    return [_token_logprob(*row) for row in zip(own, tops, ids_of, strict=True)]
