"""Replacing modules of a Hugging Face model by kernels, as far as their structure fits.

A family is never asked for by name. A module is replaced if it is built as the replacement expects and
computes the same numbers on a probe; what does not is left alone. It is done for equal bits: torch's own
kernels for some functions round the last few values of a flat tensor, or of a thread's share of it,
otherwise than the rest, so a token's bits would hang on where in the step it stands.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batching.engines.torch.linears import Product
from batching.engines.torch.native import Native
from batching.engines.torch.packer import join
from promptmill.core.logs import get_logger

_log = get_logger(__name__)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
_VALUES = 1 << 12  # enough to meet those that are rounded in two ways
_FEW = 15  # fewer than fill torch's vectors
_WIDTH = 64
_PROBE = torch.linspace(-6, 6, _WIDTH)


class RMSNorm(nn.Module):
    """``one_plus``: times 1 + weight, as gemma does it."""

    def __init__(self, norm: Any, native: Native, *, one_plus: bool):
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps, self.one_plus = _epsilon(norm), one_plus
        self._native = native

    def forward(self, hidden: Tensor) -> Tensor:
        return self._native.rms_norm(hidden.contiguous(), self.weight, self.eps, one_plus=self.one_plus)


class JointMLP(nn.Module):
    """down(silu(gate) * up), gate and up side by side from one product."""

    gate_up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, gate_up: nn.Module, down: nn.Module, native: Native):
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self._native = native

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self._native.silu_mul(*self.gate_up_proj(hidden).chunk(2, dim=-1)))


class GELUTanh(nn.Module):
    """gelu by its formula with tanh, a function that torch rounds alike everywhere; its fused form it does not."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).to(x.dtype)


def fuse(model: nn.Module, native: Native) -> list[str]:
    """Replace modules of ``model``, which is on the CPU, in place, before its linear layers are packed.

    Gives what was replaced: the classes that stand there now, each with how often.
    """
    dtype = next(model.parameters()).dtype
    replaced: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    with torch.inference_mode():
        for parent, name, module in [(owner, *child) for owner in model.modules() for child in owner.named_children()]:
            candidates = list(_candidates(module, native))
            fitting = next((candidate for candidate in candidates if _agree(module, candidate, dtype)), None)
            if fitting is not None:
                setattr(parent, name, fitting.eval())
                replaced[type(fitting).__name__] += 1
            elif candidates:
                refused[type(module).__name__] += 1
    if refused:
        _log.info("modules_left_alone", modules=dict(refused), reason="they compute other numbers than the kernels")
    return [f"{kind} x {count}" for kind, count in sorted(replaced.items())]


def unsteady(model: nn.Module) -> list[str]:
    """What in ``model`` may give a token other bits beside others: classes of modules with products that are not
    packed or with an activation that is not steady, and functions that families call by name. Attention aside."""
    dtype = next(model.parameters()).dtype
    with torch.inference_mode():
        found = {
            type(module).__name__
            for module in model.modules()
            if _multiplies(module) or (_is_activation(module) and not steady(module, dtype))
        }
        functions = (torch.cos, torch.sin, torch.tanh)
        found |= {function.__name__ for function in functions if not steady(function, torch.float32)}
    return sorted(found)


def steady(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Whether ``function``, one value at a time, gives the bits in a long tensor that it gives in short ones."""
    values = 3 * torch.randn(_VALUES, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.equal(function(values), torch.cat([function(few) for few in values.split(_FEW)]))


def _candidates(module: Any, native: Native) -> Iterator[nn.Module]:
    """What could stand for ``module``, by its structure."""
    if isinstance(module, RMSNorm | JointMLP):
        return
    parameters = dict(module.named_parameters(recurse=False))
    children = dict(module.named_children())
    if not children and parameters.keys() == {"weight"} and module.weight.dim() == 1 and isinstance(_epsilon(module), float):
        yield RMSNorm(module, native, one_plus=False)
        yield RMSNorm(module, native, one_plus=True)
    elif _is_activation(module) and not children:
        if not steady(module, torch.float32) and _close(module(_PROBE), F.gelu(_PROBE, approximate="tanh"), torch.float32):
            yield GELUTanh()
    elif not parameters:
        gates = {name for name, child in children.items() if _is_activation(child) and _close(child(_PROBE), F.silu(_PROBE), torch.float32)}
        if len(gates) == 1 and children.keys() - gates == {"gate_proj", "up_proj", "down_proj"}:
            joint = join([module.gate_proj, module.up_proj])
            if joint is not None:
                yield JointMLP(joint, module.down_proj, native)
        elif len(gates) == 1 and children.keys() - gates == {"gate_up_proj", "down_proj"}:
            yield JointMLP(module.gate_up_proj, module.down_proj, native)


def _agree(module: Any, candidate: nn.Module, dtype: torch.dtype) -> bool:
    """Tried on rows of common, tiny and great values: in the tiny ones the epsilon of a norm shows."""
    rows = torch.randn(3, _width(module), generator=torch.Generator().manual_seed(0)) + 0.5
    x = (rows * torch.tensor([[1.0], [1e-3], [30.0]])).to(dtype)
    return _close(candidate(x), module(x), dtype)


def _close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Equal in each row but for rounding."""
    error, scale = (got.float() - wanted.float()).abs().amax(-1), wanted.float().abs().amax(-1)
    return got.shape == wanted.shape and got.dtype is wanted.dtype and bool((error <= _TOLERANCE[dtype] * scale).all())


def _width(module: Any) -> int:
    """Values of a row that goes into it."""
    first = getattr(module, "gate_proj", None) or getattr(module, "gate_up_proj", None)
    if first is not None:
        return int(first.in_features)
    return _WIDTH if _is_activation(module) else len(module.weight)


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in _ACTIVATIONS


def _multiplies(module: nn.Module) -> bool:
    """Whether it holds a matrix to multiply by: torch picks the kernel for that by the number of rows."""
    if isinstance(module, Product):
        return not module.steady
    return not isinstance(module, nn.Embedding) and any(weight.dim() > 1 for weight in module.parameters(recurse=False))
