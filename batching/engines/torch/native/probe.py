"""The check of freshly loaded kernels: do they compute what torch computes?"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batching.engines.torch.native.library import Native
from batching.engines.torch.native.structures import LANES

_HEADS, _KV_HEADS, _DIM, _TOKENS, _BLOCK = 4, 2, 24, 70, 64
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def disagreement(native: Native) -> str | None:
    """Which kernel is wrong by more than rounding; None = none."""
    with torch.inference_mode():
        for dtype, tolerance in _TOLERANCE.items():
            for name, got, wanted in _comparisons(native, dtype):
                error = (got.float() - wanted.float()).abs().max()
                if not error <= tolerance * wanted.float().abs().max():
                    return f"the {name} kernel in {dtype} is off by {float(error):.2g} from torch"
    return None


def _comparisons(native: Native, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    x, other, weight = draw(3, 40), draw(3, 40), draw(40)
    yield "rms_norm", native.rms_norm(x, weight, 1e-5), F.rms_norm(x.float(), (40,), weight.float(), 1e-5)
    yield "silu_mul", native.silu_mul(x, other), F.silu(x.float()) * other.float()
    yield "argmax", native.argmax(x), x.max(-1).indices
    query, key, value = draw(1, _HEADS, _TOKENS, _DIM), draw(1, _KV_HEADS, _TOKENS, _DIM), draw(1, _KV_HEADS, _TOKENS, _DIM)
    keys, values = (torch.full((2 * _KV_HEADS * _BLOCK * 2 * LANES,), torch.nan, dtype=dtype) for _ in range(2))
    starts = range(0, _TOKENS, LANES)
    tile = np.array([(0, start, start, min(LANES, _TOKENS - start)) for start in starts], dtype=np.int64)
    tiles = native.tiles(dtype, _HEADS, _KV_HEADS, _DIM, _DIM, tile, np.array([1, 0], dtype=np.int64), _TOKENS)
    got = native.attend(tiles, keys.data_ptr(), values.data_ptr(), query, key, value, _DIM**-0.5)
    wanted = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True, enable_gqa=True)
    yield "attention", got, wanted.transpose(1, 2)
