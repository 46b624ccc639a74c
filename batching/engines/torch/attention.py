"""The attention of a packed step, plugged into the unchanged Hugging Face forward.

A step packs the tokens of all rows into one sequence [1, T]. Everything in a decoder is done token by
token but attention; so one function, registered with transformers' AttentionInterface, gives each row
its own attention: it writes the row's new keys and values into the row's blocks and attends to exactly
the tokens the row has. The name is unknown to transformers' mask registry, so no mask is ever built
there. What a step does is the KV pool's affair (kv.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "promptmill"


@dataclass(frozen=True, slots=True)
class Flavour:
    """How a model family attends. ``scaling`` None: 1 / sqrt(D). ``window``: a token sees that many tokens, itself
    included; None = all. ``softcap``: scores become cap * tanh(score / cap). ``sinks`` [H]: one more logit per
    head that takes weight and gives nothing."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A row's tokens in the step: ``count`` of them, after ``past`` that are in the cache. ``table``: the row's
    blocks in order, with room for all of them."""

    table: Sequence[int]
    past: int
    count: int


class Step(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        """query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv]."""


_step: ContextVar[Step] = ContextVar("promptmill_step")


@contextmanager
def attending(step: Step) -> Iterator[None]:
    """Forward passes of this thread attend by ``step`` inside the block."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_step() -> Step:
    """The step of the forward pass that runs on this thread."""
    return _step.get()


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
    return current_step().attend(int(module.layer_idx), query, key, value, flavour), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)


class PassCache:
    """All that a forward pass asks of a cache; keys and values are kept by the attention function."""

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0


class ShapeProbe:
    """A step that attends to nothing and notes what each layer brings: (Hkv, D, Dv) by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        self.layers[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
