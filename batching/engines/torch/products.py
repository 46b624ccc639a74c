"""Linear layers by our own kernel (native/products.c), for CPUs with AVX-512.

A decoding step reads every weight once and does little with it, so it is as fast as the memory is read.
oneDNN reads at about half of what the memory gives; the kernel has the weights in the order in which it
reads them, asks for them ahead, and lays them in large pages, across which the processor fetches ahead
on its own.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from batching.engines.torch.linears import Product
from batching.engines.torch.native import Native

_CHUNK_BYTES = 64 << 20
_ALIGNED = 64


class Pages:
    """Memory for packed weights, in large pages where the system gives some. Freed with the last tensor that lies in it."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._taken = 0

    def take(self, words: int) -> Tensor:
        """Room for so many 32-bit words: int32 [words], zeros."""
        size = -(-words * 4 // _ALIGNED) * _ALIGNED
        if self._chunk is None or self._taken + size > self._chunk.nbytes:
            self._chunk, self._taken = _map(max(size, _CHUNK_BYTES)), 0
        begin = self._taken // 4
        self._taken += size
        return self._chunk[begin : begin + words]


class NativeProduct(Product):
    """``gated``: ``weight`` [N, K] has gates in its first half, and the product is silu(gate) * up, [rows, N/2].
    ``wide``: the product is float32, as it was summed, whatever the weights are."""

    steady = True

    def __init__(self, weight: Tensor, bias: Tensor | None, native: Native, pages: Pages, *, gated: bool = False, wide: bool = False):
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], weight.shape[0] // (2 if gated else 1)
        room = pages.take(native.weight_words(weight.dtype, self.in_features, self.out_features, gated=gated))
        self.weights = native.pack(weight.contiguous(), bias, room, gated=gated, wide=wide)
        self._native = native

    def product(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        return self._native.product(self.weights, rows.contiguous(), into)


def _map(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without large pages, or another system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int32)
