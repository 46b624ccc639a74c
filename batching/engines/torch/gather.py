"""Attention by torch's own operations, on any device: each row's tokens are gathered out of its blocks.

What is gathered is exactly what a row sees. Where rows are padded to one length, the places too many
repeat a token that the query sees anyway, masked: what an earlier owner left in a block, NaN included, is
never read. All indices are made once a step from numbers that the host knows, so nothing waits for the
device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batching.engines.torch.attention import Flavour, Span
from batching.runner import BLOCK_TOKENS

_GATHERED_TOKENS = 1 << 14  # at once, so that the copies stay small beside the pool


@dataclass(frozen=True, slots=True)
class _Bunch:
    """Rows of equal count that attend together. ``packed`` [B * n]: their tokens in the step. ``tokens`` [B, L]:
    places in the pool. ``mask`` [B, 1, n, L]: who sees what."""

    packed: Tensor
    tokens: Tensor
    mask: Tensor


class GatheredStep:
    """``keys``, ``values``: [layers, tokens of the pool, Hkv, D]."""

    def __init__(self, keys: Tensor, values: Tensor, spans: Sequence[Span]):
        self._keys, self._values = keys, values
        self._spans = spans
        self._homes = self._tensor([_place(span, position) for span in spans for position in range(span.past, span.past + span.count)])
        self._bunches: dict[int | None, list[_Bunch]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, self._homes, key[0].transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, self._homes, value[0].transpose(0, 1).to(values.dtype))
        if flavour.window not in self._bunches:
            self._bunches[flavour.window] = list(self._bunch(flavour.window))
        heads, kv_heads = query.shape[1], key.shape[1]
        grouped = query[0].transpose(0, 1).to(keys.dtype).unflatten(1, (kv_heads, heads // kv_heads))  # [T, Hkv, G, D]
        out = query.new_empty(query.shape[2], heads, value.shape[3])
        for bunch in self._bunches[flavour.window]:
            rows = bunch.tokens.shape[0]
            asked = grouped[bunch.packed].unflatten(0, (rows, -1)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, n, D]
            seen_keys, seen_values = (held[bunch.tokens].transpose(1, 2) for held in (keys, values))  # [B, Hkv, L, D]
            got = _attend(asked, seen_keys, seen_values, bunch.mask, flavour)
            out.index_copy_(0, bunch.packed, got.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2).to(out.dtype))
        return out[None]

    def _bunch(self, window: int | None) -> Iterator[_Bunch]:
        """Decodes stand together, those of like length beside each other; a prefill stands alone."""
        starts: list[int] = []
        packed = 0
        for span in self._spans:
            starts.append(packed)
            packed += span.count
        decodes = sorted((n for n, span in enumerate(self._spans) if span.count == 1), key=lambda n: self._spans[n].past, reverse=True)
        while decodes:
            fit = max(1, _GATHERED_TOKENS // (self._spans[decodes[0]].past + 1))
            yield self._join(decodes[:fit], starts, window)
            decodes = decodes[fit:]
        for n, span in enumerate(self._spans):
            if span.count > 1:
                yield self._join([n], starts, window)

    def _join(self, members: Sequence[int], starts: Sequence[int], window: int | None) -> _Bunch:
        spans = [self._spans[n] for n in members]
        count = spans[0].count
        # The oldest token that any of a row's queries sees; then all up to its last.
        firsts = [max(0, span.past + 1 - window) if window is not None else 0 for span in spans]
        length = max(span.past + count - first for span, first in zip(spans, firsts, strict=True))
        blocks = max(len(span.table) for span in spans)
        table = self._tensor([[*span.table, *(span.table[0],) * (blocks - len(span.table))] for span in spans])
        past = self._tensor([span.past for span in spans])[:, None]
        positions = self._tensor(firsts)[:, None] + torch.arange(length, device=table.device)
        positions = torch.minimum(positions, past + count - 1)  # places too many repeat the row's last token
        queries = past + torch.arange(count, device=table.device)
        unique = torch.arange(length, device=table.device) < (past + count - self._tensor(firsts)[:, None])
        mask = unique[:, None] & (positions[:, None] <= queries[:, :, None])
        if window is not None:
            mask &= positions[:, None] > queries[:, :, None] - window
        tokens = table.gather(1, positions // BLOCK_TOKENS) * BLOCK_TOKENS + positions % BLOCK_TOKENS
        packed = self._tensor([starts[n] + index for n in members for index in range(count)])
        return _Bunch(packed, tokens, mask[:, None])

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(self._keys.device, non_blocking=True)


def _place(span: Span, position: int) -> int:
    return span.table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, flavour: Flavour) -> Tensor:
    """query [B, Hkv, G, n, D], key and value [B, Hkv, L, D], mask [B, 1, n, L] -> [B, Hkv, G, n, Dv]."""
    group, count = query.shape[2:4]
    if flavour.softcap is None and flavour.sinks is None:
        # A group's heads stand in the place of query tokens: keys are read once for all, by any of torch's kernels.
        out = F.scaled_dot_product_attention(query.flatten(2, 3), key, value, attn_mask=mask.repeat(1, 1, group, 1), scale=flavour.scaling)
        return out.unflatten(2, (group, count))
    # Flavours that the fused kernels lack: step by step, softmax in float32.
    scaling = flavour.scaling if flavour.scaling is not None else query.shape[-1] ** -0.5
    scores = (query @ key.unsqueeze(2).mT).float() * scaling  # [B, Hkv, G, n, L]
    if flavour.softcap is not None:
        scores = torch.tanh(scores / flavour.softcap) * flavour.softcap
    scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
    if flavour.sinks is not None:
        sinks = flavour.sinks.float().view(1, *query.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value.unsqueeze(2)
