"""The keys and values of all rows: a pool of blocks of BLOCK_TOKENS tokens, allocated once.

Who owns which block is decided elsewhere (batching/blocks.py). Here a block is memory, in a layout that
only the pool and the attention of its steps know. Memory is touched when it is first written to, so a
pool costs what has been used of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batching.engines.torch.attention import Flavour, Span, Step
from batching.engines.torch.gather import GatheredStep
from batching.engines.torch.native import Native
from batching.engines.torch.native.structures import LANES, LayerPlan, Tiles
from batching.engines.torch.native.tiling import cut
from batching.runner import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a token keeps: the same in every layer. ``heads``: kv heads."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVPool(Protocol):
    """``exact``: a row's attention has the same bits in any company, chunks, blocks and number of threads."""

    shape: KVShape
    blocks: int
    block_bytes: int
    exact: bool

    def step(self, spans: Sequence[Span]) -> Step:
        """The attention of one step; ``spans`` in the order of the packed tokens."""

    def copy(self, source: int, target: int) -> None:
        """Copy a block in all layers."""

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros in all layers."""


def create_pool(shape: KVShape, blocks: int, device: torch.device, native: Native | None) -> KVPool:
    """A pool of ``blocks`` blocks for the best attention there is on ``device``. Raises RuntimeError or
    torch.OutOfMemoryError when the device has no room for it."""
    if native is not None and device.type == "cpu":
        return NativeKV(shape, blocks, native)
    return TorchKV(shape, blocks, device)


def block_bytes(shape: KVShape, native: Native | None) -> int:
    """Bytes of a block in all layers, padding included: for as many blocks as a budget allows."""
    if native is None:
        return BLOCK_TOKENS * shape.token_bytes
    pair = 4 // shape.dtype.itemsize
    dims = _up(shape.key_dim, pair) + _up(shape.value_dim, LANES)
    return BLOCK_TOKENS * shape.layers * shape.heads * dims * shape.dtype.itemsize


class _Blocks:
    """Keys and values as two tensors [layers, blocks, what a block holds …]."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.blocks = keys.shape[1]
        self.block_bytes = (keys.nbytes + values.nbytes) // self.blocks
        self._keys, self._values = keys, values

    def copy(self, source: int, target: int) -> None:
        for held in (self._keys, self._values):
            held[:, target].copy_(held[:, source])

    def wipe(self, blocks: Sequence[int]) -> None:
        for held in (self._keys, self._values):
            held.index_fill_(1, torch.tensor(list(blocks), dtype=torch.long).to(held.device, non_blocking=True), 0)


class NativeKV(_Blocks):
    """Attention by the C kernels; the layout is drawn in native/attention.c."""

    exact = True

    def __init__(self, shape: KVShape, blocks: int, native: Native):
        pair = 4 // shape.dtype.itemsize  # values of a 32-bit word
        keys = (BLOCK_TOKENS // LANES, _up(shape.key_dim, pair) // pair, LANES, pair)
        values = (BLOCK_TOKENS // pair, _up(shape.value_dim, LANES), pair)
        super().__init__(*(torch.empty(shape.layers, blocks, shape.heads, *inner, dtype=shape.dtype) for inner in (keys, values)))
        self.shape = shape
        self._native = native

    def step(self, spans: Sequence[Span]) -> Step:
        return NativeStep(self.shape, self._keys, self._values, self._native, spans)


class NativeStep:
    """A step that also runs whole layers."""

    def __init__(self, shape: KVShape, keys: Tensor, values: Tensor, native: Native, spans: Sequence[Span]):
        self._shape = shape
        self._blocks = keys.shape[1]
        self._held = (keys, values)  # their addresses are of use only while they live
        self._keys, self._key_bytes = keys.data_ptr(), keys[0].nbytes
        self._values, self._value_bytes = values.data_ptr(), values[0].nbytes
        self._native = native
        self._spans = spans
        self._tiles: Tiles | None = None
        self._room: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        # Most families come in the pool's own number type; a norm in float32 may leave another.
        given, dtype = query.dtype, self._shape.dtype
        sinks = flavour.sinks
        if given is not dtype or key.dtype is not dtype or value.dtype is not dtype:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if sinks is not None:
            sinks = sinks.to(dtype)
        tiles = self._cut(query.shape[1], query.shape[2])
        scaling = flavour.scaling if flavour.scaling is not None else self._shape.key_dim**-0.5
        out = self._native.attend(
            tiles,
            self._keys + layer * self._key_bytes,
            self._values + layer * self._value_bytes,
            query,
            key,
            value,
            scaling,
            flavour.window,
            flavour.softcap,
            sinks,
        )
        return out if given is dtype else out.to(given)

    def run_layer(self, plan: LayerPlan, layer: int, x: Tensor, cosine: Tensor, sine: Tensor) -> None:
        """Run a whole decoder layer over x [T, E] in place; cosine, sine [T, rotary]."""
        if self._room is None:
            self._room = self._native.layer_room(plan, x.shape[0])
        keys, values = self._keys + layer * self._key_bytes, self._values + layer * self._value_bytes
        self._native.decoder_layer(plan, self._cut(plan.heads, x.shape[0]), keys, values, x, cosine, sine, self._room)

    def _cut(self, heads: int, tokens: int) -> Tiles:
        if self._tiles is None or self._tiles.step.heads != heads:
            shape = self._shape
            tile, table = cut(self._spans, heads // shape.heads)
            if not 0 <= int(table.min(initial=0)) <= int(table.max(initial=0)) < self._blocks:
                raise IndexError(f"a table names a block beyond the pool's {self._blocks}")
            self._tiles = self._native.tiles(shape.dtype, heads, shape.heads, shape.key_dim, shape.value_dim, tile, table, tokens)
        return self._tiles


class TorchKV(_Blocks):
    """Attention by torch over gathered tokens: keys and values [layers, blocks, BLOCK_TOKENS, Hkv, D]."""

    exact = False  # torch's kernels round differently with the length, the chunk and the company

    def __init__(self, shape: KVShape, blocks: int, device: torch.device):
        dims = (shape.key_dim, shape.value_dim)
        room = (shape.layers, blocks, BLOCK_TOKENS, shape.heads)
        super().__init__(*(torch.empty(*room, dim, dtype=shape.dtype, device=device) for dim in dims))
        self.shape = shape

    def step(self, spans: Sequence[Span]) -> Step:
        return GatheredStep(self._keys.flatten(1, 2), self._values.flatten(1, 2), spans)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
