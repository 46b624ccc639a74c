"""The C kernels for tests, built once and kept; and attention computed slowly, by its definition."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from batching.engines.torch.attention import Flavour, Span
from batching.engines.torch.kv import KVPool, KVShape

KERNELS_DIR = Path(__file__).resolve().parents[2] / "var" / "kernels"


def dense_attention(query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
    """One whole text: query [H, T, D], key [Hkv, T, D], value [Hkv, T, Dv] -> [T, H, Dv], in float64."""
    query, key, value = query.double(), key.double(), value.double()
    group, tokens = query.shape[0] // key.shape[0], query.shape[1]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.mT * (flavour.scaling if flavour.scaling is not None else query.shape[-1] ** -0.5)
    if flavour.softcap is not None:
        scores = torch.tanh(scores / flavour.softcap) * flavour.softcap
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    seen = (distance >= 0) & (distance < (flavour.window or tokens))
    scores = scores.masked_fill(~seen, float("-inf"))
    if flavour.sinks is not None:
        scores = torch.cat([scores, flavour.sinks.double().view(-1, 1, 1).expand(-1, tokens, 1)], -1)
    return (scores.softmax(-1)[..., :tokens] @ value).transpose(0, 1)


class Text:
    """Random queries, keys and values of one row, in every layer."""

    def __init__(self, shape: KVShape, heads: int, tokens: int, seed: int):
        random = torch.Generator().manual_seed(seed)

        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(shape.layers, heads, tokens, dim, generator=random).to(shape.dtype)

        self.tokens = tokens
        self.query, self.key, self.value = draw(heads, shape.key_dim), draw(shape.heads, shape.key_dim), draw(shape.heads, shape.value_dim)


def attend_packed(pool: KVPool, texts: Sequence[Text], spans: Sequence[Span], flavour: Flavour) -> list[Tensor]:
    """One step over rows of these texts: per row the result [layers, tokens, H, Dv]."""
    step = pool.step(spans)
    layers = []
    for layer in range(pool.shape.layers):

        def pack(name: str, layer: int = layer) -> Tensor:
            parts = [getattr(text, name)[layer, :, span.past : span.past + span.count] for text, span in zip(texts, spans, strict=True)]
            # As the models hand it over: a view of [1, T, H, D].
            return torch.cat(parts, 1).transpose(0, 1).contiguous()[None].transpose(1, 2)

        layers.append(step.attend(layer, pack("query"), pack("key"), pack("value"), flavour)[0])
    return list(torch.stack(layers).split([span.count for span in spans], 1))


def poison(pool: KVPool) -> None:
    """Leave NaN in every block, as an earlier owner whose values were no numbers."""
    shape, tokens = pool.shape, pool.blocks * 64
    step = pool.step([Span(range(pool.blocks), 0, tokens)])
    for layer in range(shape.layers):
        key, value = (torch.full((1, shape.heads, tokens, dim), torch.nan, dtype=shape.dtype) for dim in (shape.key_dim, shape.value_dim))
        step.attend(layer, torch.zeros(1, shape.heads, tokens, shape.key_dim, dtype=shape.dtype), key, value, Flavour(window=1))
