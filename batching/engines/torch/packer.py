"""Which product stands for a linear layer on this CPU, and the exchange of all of a model's."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from batching.engines.torch.linears import PackedLinear, Product, steady_sizes, weight_and_bias
from batching.engines.torch.native import Native
from batching.engines.torch.products import NativeProduct, Pages
from promptmill.core.logs import get_logger

_log = get_logger(__name__)
_LINEARS = (nn.Linear, Conv1D)  # these and no subclass: it may compute something else


class Unpackable(Exception):
    """This build of torch lacks the operation, or computes it wrongly."""


class Packer:
    """Packs linear layers: for our own kernel where that is faster, else for oneDNN. Each shape is tried once.
    ``native`` None: oneDNN alone."""

    def __init__(self, native: Native | None = None):
        self._native = native
        self._pages = Pages()
        self._sizes: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._sound: dict[tuple[Any, ...], bool] = {}

    def pack(self, linear: Any, *, wide: bool = False) -> Product:
        """``wide``: in float32, where that costs nothing. Raises Unpackable."""
        if self._is_sound(linear):
            return self._native_product(linear, wide=wide)
        shape = _shape(linear)
        try:
            if shape not in self._sizes:
                self._sizes[shape] = _tried(linear)
            return PackedLinear(linear, self._sizes[shape], steady=bool(self._sizes[shape]))
        except (AttributeError, RuntimeError) as error:
            raise Unpackable(str(error).splitlines()[0]) from error

    def pack_gate(self, linear: Any, native: Native) -> Product:
        """silu(gate) * up of a layer that gives both side by side. Raises Unpackable."""
        if linear.bias is None and self._is_sound(linear):
            return self._native_product(linear, gated=True)
        return _Gate(self.pack(linear), native)

    def pack_all(self, model: nn.Module, head: nn.Module | None = None) -> None:
        """Replace every linear layer of ``model`` in place; a tied head leaves the embedding's rows as they are.

        ``head``: the one that gives logits. Rounded to bfloat16, the two best of them are equal in one step of seventy.
        Raises Unpackable, the model unchanged.
        """
        children = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
        linears = [(parent, name, child) for parent, name, child in children if type(child) in _LINEARS]
        for child in {_shape(child): child for *_, child in linears}.values():
            self.pack(child)
        for parent, name, child in linears:
            setattr(parent, name, self.pack(child, wide=child is head))

    def _native_product(self, linear: Any, *, gated: bool = False, wide: bool = False) -> NativeProduct:
        assert self._native is not None
        return NativeProduct(*weight_and_bias(linear), self._native, self._pages, gated=gated, wide=wide)

    def _is_sound(self, linear: Any) -> bool:
        """Whether our own kernel multiplies by this layer, and rightly."""
        if self._native is None or not self._native.multiplies(linear.weight.dtype):
            return False
        shape = _shape(linear)
        if shape not in self._sound:
            whole_words = shape[2] % 2 == 0 or linear.weight.dtype is torch.float32
            self._sound[shape] = whole_words and _agrees(self._native_product(linear), linear)
        return self._sound[shape]


class _Gate(Product):
    """silu(gate) * up from one product of both."""

    def __init__(self, joint: Product, native: Native):
        super().__init__()
        self.joint, self._native = joint, native
        self.in_features, self.out_features = joint.in_features, joint.out_features // 2
        self.steady = joint.steady

    def product(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        out = self._native.silu_mul(*self.joint.product(rows).chunk(2, dim=-1))
        return out if into is None else into.add_(out)


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


def _tried(linear: Any) -> tuple[int, ...]:
    """Raises Unpackable."""
    _, out, width, _ = _shape(linear)
    if not _agrees(PackedLinear(linear), linear):
        raise Unpackable(f"a packed product of {out} x {width} is not the plain one")
    with torch.inference_mode():
        sizes = steady_sizes(PackedLinear(linear))
    if not sizes:
        _log.warning("packed_linear_unsteady", out_features=out, in_features=width)
    return sizes


def _shape(linear: Any) -> tuple[Any, int, int, bool]:
    weight, bias = weight_and_bias(linear)
    return type(linear), weight.shape[0], weight.shape[1], bias is not None


def _agrees(product: Product, linear: Any) -> bool:
    """Whether it equals the plain product but for rounding."""
    weight, bias = weight_and_bias(linear)
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    wanted = F.linear(x, weight, bias).float()
    tolerance = 0.02 if weight.dtype is torch.bfloat16 else 1e-4
    error = (product(x).float() - wanted).abs().max()
    return bool(error <= tolerance * wanted.abs().max() + 1e-6)
