"""The attention of a packed step, plugged into the unchanged Hugging Face forward.

A step packs the tokens of all rows into one sequence [1, T]. Everything in a decoder is done token by
token but attention; so one function, registered with transformers' AttentionInterface, gives each row
its own attention: it writes the row's new keys and values into its slot and attends to exactly the
tokens the row has. The name is unknown to transformers' mask registry, so no mask is ever built there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from batching.engines.torch.kv import SlotKV

NAME = "promptmill"


@dataclass(frozen=True, slots=True)
class Flavour:
    """How a model family attends. ``window``: a token sees that many tokens, itself included; None = all.
    ``softcap``: scores become cap * tanh(score / cap). ``sinks`` [H]: one more logit per head that takes weight and gives nothing."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel knows this flavour."""
        return self.softcap is None and self.sinks is None


class Step(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, Dv]."""


_step: ContextVar[Step] = ContextVar("promptmill_step")


@contextmanager
def attending(step: Step) -> Iterator[None]:
    """Forward passes of this thread attend by ``step`` inside the block."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The signature of transformers' attention functions."""
    flavour = Flavour(scaling, sliding_window, softcap, s_aux)
    return _step.get().attend(int(module.layer_idx), query, key, value, flavour), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)


class PassCache:
    """All that a forward pass asks of a cache; keys and values are kept by the attention function."""

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Span:
    """A row's tokens in the step: ``count`` of them, after ``past`` that are in the slot."""

    slot: int
    past: int
    count: int


class PackedStep:
    """One step over the slots: views and masks are made once and serve all layers."""

    def __init__(self, spans: Sequence[Span], kv: SlotKV):
        self._spans = spans
        self._counts = [span.count for span in spans]
        self._decodes = all(span.count == 1 for span in spans)
        # [layer][row]: where the new keys and values go, and all that the row then has.
        self._key_homes = _by_layer([kv.keys(s.slot, s.past, s.past + s.count) for s in spans])
        self._value_homes = _by_layer([kv.values(s.slot, s.past, s.past + s.count) for s in spans])
        self._keys = _by_layer([kv.keys(s.slot, 0, s.past + s.count) for s in spans])
        self._values = _by_layer([kv.values(s.slot, 0, s.past + s.count) for s in spans])
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        for home, new in zip(self._key_homes[layer], key.split(self._counts, 2), strict=True):
            home.copy_(new)
        for home, new in zip(self._value_homes[layer], value.split(self._counts, 2), strict=True):
            home.copy_(new)
        heads, kv_heads = query.shape[1], key.shape[1]
        grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [1, Hkv, G, T, D]
        if self._decodes and flavour.fused and flavour.window is None:
            # The common step, free of all that it does not need: this loop is most of Python's share.
            scaling, attend = flavour.scaling, F.scaled_dot_product_attention
            decodes = zip(grouped.unbind(3), self._keys[layer], self._values[layer], strict=True)
            out = torch.cat([attend(q, k, v, scale=scaling) for q, k, v in decodes])  # [T, Hkv, G, Dv]
            return out.flatten(1, 2)[None]
        rows = zip(self._spans, grouped.split(self._counts, 3), self._keys[layer], self._values[layer], strict=True)
        return torch.cat([self._attend_row(span, q, k, v, flavour) for span, q, k, v in rows])[None]

    def _attend_row(self, span: Span, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        """query [1, Hkv, G, n, D], key and value [1, Hkv, past + n, D] -> [n, H, Dv]."""
        first = max(0, span.past + 1 - flavour.window) if flavour.window is not None else 0  # the oldest key that any of the n sees
        key, value = key[:, :, first:], value[:, :, first:]
        mask = self._mask(span, first, flavour.window)
        if not flavour.fused:
            return _attend_in_the_open(query, key, value, mask, flavour)
        if span.count == 1:
            # One query token: its heads of a group stand in the place of query tokens, so keys are read once per group.
            return F.scaled_dot_product_attention(query.squeeze(3), key, value, scale=flavour.scaling).flatten(1, 2)
        out = F.scaled_dot_product_attention(query.flatten(1, 2), key, value, attn_mask=mask, scale=flavour.scaling, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _mask(self, span: Span, first: int, window: int | None) -> Tensor | None:
        """Which of the keys from ``first`` on each of the row's tokens sees, [n, keys]; None = all."""
        if span.count == 1:
            return None
        wanted = (span.slot, first, window)
        if wanted not in self._masks:
            device = self._keys[0][0].device
            queries = torch.arange(span.past, span.past + span.count, device=device)[:, None]
            keys = torch.arange(first, span.past + span.count, device=device)[None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[wanted] = mask
        return self._masks[wanted]


def _by_layer(rows: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    return list(zip(*rows, strict=True))


def _attend_in_the_open(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, flavour: Flavour) -> Tensor:
    """Attention step by step, for the flavours that the fused kernel lacks; softmax in float32."""
    scaling = flavour.scaling if flavour.scaling is not None else query.shape[-1] ** -0.5
    scores = (query @ key.unsqueeze(2).mT).float() * scaling  # [1, Hkv, G, n, keys]
    if flavour.softcap is not None:
        scores = torch.tanh(scores / flavour.softcap) * flavour.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if flavour.sinks is not None:
        sinks = flavour.sinks.float().view(1, *query.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = weights.to(value.dtype) @ value.unsqueeze(2)
    return out[0].flatten(0, 1).transpose(0, 1)


class ShapeProbe:
    """A step that attends to nothing and notes what each layer brings: (Hkv, D, Dv) by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        self.layers[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
