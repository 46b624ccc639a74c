"""Linear layers whose bits do not depend on how many rows stand beside a row, on CPU.

Plain ``F.linear`` picks its kernel by the number of rows, so a token's logits would depend on the
batch. oneDNN on weights packed once at load gives each row the same bits for any count from 2 on
(measured in float32 and bfloat16; one row differs when K > 1024, so a lone row is doubled), and is as
fast or faster.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from promptmill.core.logs import get_logger

_log = get_logger(__name__)
_PACKED_FOR_ROWS = 32  # the row count the layout is chosen for; it serves all


class PackedLinear(nn.Module):
    """``nn.Linear`` over a packed copy of its weight. Keeps nothing of the original."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACKED_FOR_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.in_features)
        count = rows.shape[0]
        if count == 1:
            rows = rows.repeat(2, 1)
        out = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out[:count].view(*hidden.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> bool:
    """Replace every ``nn.Linear`` of ``model`` in place; a tied head leaves the embedding's rows as they are.

    Returns False, with the model unchanged and the reason logged, where this build of torch lacks the
    operation or computes it wrongly.
    """
    linears = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children() if type(child) is nn.Linear]
    shapes = {(child.weight.shape, child.bias is None): child for _, _, child in linears}
    try:
        wrong = [tuple(shape) for (shape, _), child in shapes.items() if not _agrees(child)]
    except (AttributeError, RuntimeError) as error:
        _log.warning("packed_linears_unavailable", reason=str(error).splitlines()[0])
        return False
    if wrong:
        _log.warning("packed_linears_wrong", shapes=wrong)
        return False
    for parent, name, child in linears:
        setattr(parent, name, PackedLinear(child))
    return True


def _agrees(linear: nn.Linear) -> bool:
    """Whether the packed product equals the plain one but for rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, linear.in_features, generator=generator).to(linear.weight.dtype)
    wanted = F.linear(x, linear.weight, linear.bias).float()
    tolerance = 0.02 if linear.weight.dtype is torch.bfloat16 else 1e-4
    error = (PackedLinear(linear)(x).float() - wanted).abs().max()
    return bool(error <= tolerance * wanted.abs().max() + 1e-6)
