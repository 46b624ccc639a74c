"""Linear layers whose bits do not depend on how many rows stand beside a row, on CPU.

Plain ``F.linear`` picks its kernel by the number of rows, so a token's logits would depend on the
batch. oneDNN on weights packed once at load gives each row the same bits for any count from 2 on
(measured in float32 and bfloat16; one row differs when K > 1024, so a lone row is padded), and is as
fast or faster.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from promptmill.core.logs import get_logger

_log = get_logger(__name__)
_LINEARS = (nn.Linear, Conv1D)  # these and no subclass: it may compute something else
_WARM_VALUES = 1 << 21  # of a product's result; larger ones take their time anyway
_PACKED_FOR_ROWS = 32  # the row count the layout is chosen for; it serves all


class PackedLinear(nn.Module):
    """``nn.Linear``, or the ``Conv1D`` of gpt2, over a packed copy of its weight. Keeps nothing of the original."""

    def __init__(self, linear: Any):
        super().__init__()
        weight, self._bias = _weight_and_bias(linear)
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.in_features)
        count = rows.shape[0]
        if (more := padded(count) - count) > 0:
            rows = F.pad(rows, (0, 0, 0, more))
        out = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out[:count].view(*hidden.shape[:-1], self.out_features)


def padded(rows: int) -> int:
    """The number of rows that is computed for ``rows``: two at least, and few different ones, since oneDNN keeps
    some 0.4 MB of code and plans for each size of each product that it meets, up to a thousand."""
    step = 1 if rows <= 8 else 4 if rows <= 32 else 16 if rows <= 128 else 32
    return max(2, -(-rows // step) * step)


def warm(model: nn.Module, most_rows: int) -> None:
    """Let oneDNN make its code for every number of rows up to ``most_rows``, which costs each product some milliseconds
    the first time: better now than in a step that somebody waits for. Heads, which are wide, see few rows."""
    products = {(part.in_features, part.out_features): part for part in model.modules() if isinstance(part, PackedLinear)}
    dtype = next(model.parameters()).dtype
    sizes = sorted({padded(rows) for rows in range(1, most_rows + 1)})
    with torch.inference_mode():
        for (width, out), product in products.items():
            for rows in sizes:
                if rows * out <= _WARM_VALUES:
                    product(torch.zeros(rows, width, dtype=dtype))


def pack_linears(model: nn.Module) -> bool:
    """Replace every linear layer of ``model`` in place; a tied head leaves the embedding's rows as they are.

    Returns False, with the model unchanged and the reason logged, where this build of torch lacks the
    operation or computes it wrongly.
    """
    linears = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children() if type(child) in _LINEARS]
    shapes: dict[tuple[Any, ...], nn.Module] = {(type(child), child.weight.shape, child.bias is None): child for _, _, child in linears}
    try:
        wrong = [tuple(shape) for (_, shape, _), child in shapes.items() if not _agrees(child)]
    except (AttributeError, RuntimeError) as error:
        _log.warning("packed_linears_unavailable", reason=str(error).splitlines()[0])
        return False
    if wrong:
        _log.warning("packed_linears_wrong", shapes=wrong)
        return False
    for parent, name, child in linears:
        setattr(parent, name, PackedLinear(child))
    return True


def _weight_and_bias(linear: Any) -> tuple[Tensor, Tensor | None]:
    """The weight as [out, in], which ``Conv1D`` keeps the other way round."""
    weight, bias = linear.weight.detach(), linear.bias
    return (weight.t().contiguous() if isinstance(linear, Conv1D) else weight), (None if bias is None else bias.detach())


def _agrees(linear: Any) -> bool:
    """Whether the packed product equals the plain one but for rounding."""
    weight, bias = _weight_and_bias(linear)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator).to(weight.dtype)
    wanted = F.linear(x, weight, bias).float()
    tolerance = 0.02 if weight.dtype is torch.bfloat16 else 1e-4
    error = (PackedLinear(linear)(x).float() - wanted).abs().max()
    return bool(error <= tolerance * wanted.abs().max() + 1e-6)
