"""Linear layers by oneDNN whose bits do not depend on how many rows stand beside a row, on CPU.

Plain ``F.linear`` picks its kernel by the number of rows, so a token's logits would depend on the
batch. oneDNN on weights packed once at load is as fast or faster, and has few ways of summing a row's
products. Which one it takes hangs on the CPU, the shape, the number of rows and of threads: on most
CPUs it is one way for any number of rows from 2 on; for bfloat16 with AMX there are two or more. So
each shape is tried at load: the numbers of rows that give the bits of ``_STANDARD`` rows are kept, and
others are padded to the next of these, or cut.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_PACKED_FOR_ROWS = 32  # the row count the layout is chosen for; it serves all
# Numbers of rows that are computed: few, since oneDNN keeps some 0.4 MB of code and plans for each of each shape, up to a thousand.
_SIZES = (*range(2, 9), *range(12, 33, 4), 33, 36, 40, *range(48, 129, 16), *range(160, 321, 32))
_STANDARD = 64  # measured to be computed the same way by any number of threads
_TRIED_VALUES = 1 << 18  # of each number of rows: two ways of summing differ in some 1e-4 to 1e-5 of the values
_MOST_VALUES = 1 << 21  # of a product; for heads, which are wide and see few rows


class Product(nn.Module):
    """In the place of a linear layer. ``steady``: a row has the same bits wherever it stands."""

    in_features: int
    out_features: int
    steady: bool

    def product(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Of [rows, in] values: [rows, out]. With ``into``, that is added to it in place."""
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Tensor:
        return self.product(hidden.reshape(-1, self.in_features)).view(*hidden.shape[:-1], self.out_features)


class PackedLinear(Product):
    """``nn.Linear``, or the ``Conv1D`` of gpt2, over a packed copy of its weight. Keeps nothing of the original.

    ``sizes``: the numbers of rows that it computes, ascending; empty = any. ``steady``: whether a row then has the same
    bits wherever it stands.
    """

    def __init__(self, linear: Any, sizes: Sequence[int] = (), *, steady: bool = False):
        super().__init__()
        weight, self._bias = weight_and_bias(linear)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.sizes, self.steady = sizes, steady
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)

    def product(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        count, sizes = rows.shape[0], self.sizes
        if not sizes:
            out = self._multiply(rows)
        elif count > sizes[-1]:
            out = torch.cat([self.product(piece) for piece in rows.split(sizes[-1])])
        elif (size := sizes[bisect_left(sizes, count)]) == count:
            out = self._multiply(rows)
        else:
            out = self._multiply(F.pad(rows, (0, 0, 0, size - count)))[:count]
        return out if into is None else into.add_(out)

    def _multiply(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out


def steady_sizes(product: PackedLinear) -> tuple[int, ...]:
    """The numbers of rows for which a row has the same bits wherever it stands; empty = there are none.

    After it oneDNN has its code for all of them, which costs each some milliseconds: better now than in a step that
    somebody waits for.
    """
    sizes = [size for size in _SIZES if size * product.out_features <= _MOST_VALUES] or [min(_SIZES)]
    standard = max(size for size in sizes if size <= _STANDARD)
    least = math.ceil(max(_TRIED_VALUES / product.out_features, sizes[-1]) / standard) * standard
    rows = torch.randn(least, product.in_features, generator=torch.Generator().manual_seed(0)).to(product.dtype)
    wanted = _in_pieces(product, rows, standard, least)
    shift = standard // 2 + 1  # each row stands elsewhere
    if not torch.equal(_in_pieces(product, rows.roll(shift, 0), standard, least), wanted.roll(shift, 0)):
        return ()
    enough = math.ceil(_TRIED_VALUES / product.out_features)
    tried = {size: _in_pieces(product, rows, size, enough) for size in sizes}
    return tuple(size for size, found in tried.items() if torch.equal(found, wanted[: len(found)]))


def _in_pieces(product: PackedLinear, rows: Tensor, size: int, enough: int) -> Tensor:
    """The products of at least ``enough`` rows, or of as many as there are in whole pieces."""
    count = min(math.ceil(enough / size), len(rows) // size)
    return torch.cat([product.product(piece) for piece in rows[: count * size].split(size)])


def weight_and_bias(linear: Any) -> tuple[Tensor, Tensor | None]:
    """The weight as [out, in], which ``Conv1D`` keeps the other way round."""
    weight, bias = linear.weight.detach(), linear.bias
    return (weight.t() if isinstance(linear, Conv1D) else weight), (None if bias is None else bias.detach())
