"""Linear layers whose bits do not depend on how many rows stand beside a row, on CPU.

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

from promptmill.core.logs import get_logger

_log = get_logger(__name__)
_LINEARS = (nn.Linear, Conv1D)  # these and no subclass: it may compute something else
_PACKED_FOR_ROWS = 32  # the row count the layout is chosen for; it serves all
# Numbers of rows that are computed: few, since oneDNN keeps some 0.4 MB of code and plans for each of each shape, up to a thousand.
_SIZES = (*range(2, 9), *range(12, 33, 4), 33, 36, 40, *range(48, 129, 16), *range(160, 321, 32))
_STANDARD = 64  # measured to be computed the same way by any number of threads
_TRIED_VALUES = 1 << 18  # of each number of rows: two ways of summing differ in some 1e-4 to 1e-5 of the values
_MOST_VALUES = 1 << 21  # of a product; for heads, which are wide and see few rows


class PackedLinear(nn.Module):
    """``nn.Linear``, or the ``Conv1D`` of gpt2, over a packed copy of its weight. Keeps nothing of the original.

    ``sizes``: the numbers of rows that it computes, ascending; empty = any. ``steady``: whether a row then has the same
    bits wherever it stands.
    """

    def __init__(self, linear: Any, sizes: Sequence[int] = (), *, steady: bool = False):
        super().__init__()
        weight, self._bias = _weight_and_bias(linear)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.sizes, self.steady = sizes, steady
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.product(hidden.reshape(-1, self.in_features)).view(*hidden.shape[:-1], self.out_features)

    def product(self, rows: Tensor) -> Tensor:
        """Of [rows, in] values: [rows, out]."""
        count, sizes = rows.shape[0], self.sizes
        if not sizes:
            return self._multiply(rows)
        if count > sizes[-1]:
            return torch.cat([self.product(piece) for piece in rows.split(sizes[-1])])
        size = sizes[bisect_left(sizes, count)]
        if size == count:
            return self._multiply(rows)
        return self._multiply(F.pad(rows, (0, 0, 0, size - count)))[:count]

    def _multiply(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out


class Unpackable(Exception):
    """This build of torch lacks the operation, or computes it wrongly."""


class Packer:
    """Packs linear layers. Each shape is tried once."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def pack(self, linear: Any) -> PackedLinear:
        """Raises Unpackable."""
        shape = _shape(linear)
        try:
            if shape not in self._sizes:
                self._sizes[shape] = _tried(linear)
            return PackedLinear(linear, self._sizes[shape], steady=bool(self._sizes[shape]))
        except (AttributeError, RuntimeError) as error:
            raise Unpackable(str(error).splitlines()[0]) from error

    def pack_all(self, model: nn.Module) -> None:
        """Replace every linear layer of ``model`` in place; a tied head leaves the embedding's rows as they are.
        Raises Unpackable, the model unchanged."""
        children = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
        linears = [(parent, name, child) for parent, name, child in children if type(child) in _LINEARS]
        for shape, child in {_shape(child): child for *_, child in linears}.items():
            if shape not in self._sizes:
                self.pack(child)
        for parent, name, child in linears:
            setattr(parent, name, self.pack(child))


def join(linears: Sequence[nn.Linear]) -> nn.Linear | None:
    """One layer whose outputs are those of ``linears``, which read the same input, side by side; None where they do not
    fit together."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    inputs, biased = {linear.in_features for linear in linears}, {linear.bias is not None for linear in linears}
    if len(inputs) != 1 or len(biased) != 1:
        return None
    with torch.device("meta"):
        joint = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=biased.pop())
    joint.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        joint.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return joint


def common_sizes(model: nn.Module, *, but: nn.Module | None) -> tuple[int, ...]:
    """The numbers of rows that all packed linears of ``model`` compute as they are, ``but`` one (the head, which sees
    other rows); ascending. A step of one of these needs no padding further on."""
    products = [module for module in model.modules() if isinstance(module, PackedLinear) and module is not but]
    if not products:
        return ()
    return tuple(sorted(set(products[0].sizes).intersection(*(product.sizes for product in products))))


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


def _tried(linear: Any) -> tuple[int, ...]:
    """Raises Unpackable."""
    _, out, width, _ = _shape(linear)
    if not _agrees(linear):
        raise Unpackable(f"a packed product of {out} x {width} is not the plain one")
    with torch.inference_mode():
        sizes = steady_sizes(PackedLinear(linear))
    if not sizes:
        _log.warning("packed_linear_unsteady", out_features=out, in_features=width)
    return sizes


def _in_pieces(product: PackedLinear, rows: Tensor, size: int, enough: int) -> Tensor:
    """The products of at least ``enough`` rows, or of as many as there are in whole pieces."""
    count = min(math.ceil(enough / size), len(rows) // size)
    return torch.cat([product.product(piece) for piece in rows[: count * size].split(size)])


def _shape(linear: Any) -> tuple[Any, int, int, bool]:
    weight, bias = _weight_and_bias(linear)
    return type(linear), weight.shape[0], weight.shape[1], bias is not None


def _weight_and_bias(linear: Any) -> tuple[Tensor, Tensor | None]:
    """The weight as [out, in], which ``Conv1D`` keeps the other way round."""
    weight, bias = linear.weight.detach(), linear.bias
    return (weight.t() if isinstance(linear, Conv1D) else weight), (None if bias is None else bias.detach())


def _agrees(linear: Any) -> bool:
    """Whether the packed product equals the plain one but for rounding."""
    weight, bias = _weight_and_bias(linear)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator).to(weight.dtype)
    wanted = F.linear(x, weight, bias).float()
    tolerance = 0.02 if weight.dtype is torch.bfloat16 else 1e-4
    error = (PackedLinear(linear)(x).float() - wanted).abs().max()
    return bool(error <= tolerance * wanted.abs().max() + 1e-6)
