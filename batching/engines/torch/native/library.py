"""The kernels as typed methods. Each checks what C cannot: number types, sizes and strides."""

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_STORAGE = {torch.float32: 1, torch.bfloat16: 2}  # values in a 32-bit word
LANES = 16  # value dimensions are padded to a multiple of it

Integers = npt.NDArray[np.int64]


class _Step(Structure):
    """``Step`` of attention.c."""

    _fields_ = (
        *((name, c_int64) for name in ("storage", "heads", "kv_heads", "key_dim", "value_dim", "threads", "scratch_bytes")),
        ("scratch", c_void_p),
        ("tiles", c_int64),
        ("tile", c_void_p),
        ("table", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """A step's attention, cut into tiles, ready for all layers. Holds the arrays that C reads."""

    step: _Step
    dtype: torch.dtype
    tokens: int
    held: tuple[object, ...] = field(repr=False)


class Native:
    """A loaded library. Methods take tensors on the CPU in float32 or bfloat16, and run on as many threads
    as torch does. Raise ValueError for tensors that a kernel cannot read."""

    def __init__(self, path: Path):
        """Raises OSError if the file is no library of kernels."""
        self.path = path
        library = ctypes.CDLL(str(path))
        try:
            self._attend, self._scratch_bytes = library.attend, library.attend_scratch_bytes
            self._rms_norm, self._rotate = library.rms_norm, library.rotate
            self._silu_mul, self._argmax = library.silu_mul, library.argmax
        except AttributeError as error:
            raise OSError(f"{path} is no library of kernels: {error}") from error
        p, i, f = c_void_p, c_int64, c_float
        self._attend.argtypes = [POINTER(_Step), p, p, p, i, i, p, i, i, p, i, i, p, f, f, i, p]
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = [POINTER(_Step), i], i
        self._rms_norm.argtypes = [i, p, i, p, p, p, i, i, f, i, i]
        self._rotate.argtypes = [i, p, i, p, p, i, i, i, i, i]
        self._silu_mul.argtypes = [i, p, i, p, i, p, i, i, i]
        self._argmax.argtypes = [i, p, i, p, i, i, i]
        for function in (self._attend, self._rms_norm, self._rotate, self._silu_mul, self._argmax):
            function.restype = None

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, *, one_plus: bool = False, more: Tensor | None = None
    ) -> Tensor:
        """x [..., E], weight [E]. Rounded before the product as llama does, or with ``one_plus`` times 1 + weight
        in float32 as gemma does. ``out`` may be ``x``. With ``more`` [..., E], x += more first, in place."""
        storage, width = _storage(x, weight), x.shape[-1]
        if weight.shape != (width,) or not weight.is_contiguous():
            raise ValueError(f"a weight of {tuple(weight.shape)} for rows of {width}")
        if more is not None:
            _storage(x, more)
            if more.shape != x.shape or not more.is_contiguous() or not x.is_contiguous():
                raise ValueError(f"{tuple(more.shape)} to add to {tuple(x.shape)}, both contiguous")
        out = _result(x, out)
        rows, stride = x.numel() // max(width, 1), _row_stride(x)
        self._rms_norm(
            storage, x.data_ptr(), stride, None if more is None else more.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width,
            eps, one_plus, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rotate(self, x: Tensor, heads: int, dim: int, cosine: Tensor, sine: Tensor) -> None:
        """Turn the first ``heads`` heads of ``dim`` values of each row of x [T, ...] in place by rotary positions:
        cosine, sine [T, rotary], both halves of a head alike, as transformers' apply_rotary_pos_emb does."""
        storage, rows, rotary = _storage(x, cosine), x.shape[0], cosine.shape[-1]
        _storage(x, sine)
        if cosine.shape != (rows, rotary) or sine.shape != cosine.shape or not (cosine.is_contiguous() and sine.is_contiguous()):
            raise ValueError(f"a cosine of {tuple(cosine.shape)} and a sine of {tuple(sine.shape)} for {rows} rows")
        if x.dim() != 2 or heads * dim > x.shape[1] or rotary > dim or rotary % 2:
            raise ValueError(f"{heads} heads of {dim} values, {rotary} of them to turn, in rows of {tuple(x.shape[1:])}")
        self._rotate(
            storage, x.data_ptr(), _row_stride(x), cosine.data_ptr(), sine.data_ptr(), rows, heads, dim, rotary, torch.get_num_threads()
        )

    def silu_mul(self, gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
        """silu(gate) * up, both [..., I]; rows may be parts of wider rows. ``out`` may be either."""
        storage, width = _storage(gate, up), gate.shape[-1]
        if gate.shape != up.shape:
            raise ValueError(f"a gate of {tuple(gate.shape)} for {tuple(up.shape)}")
        out = _result(gate, out)
        rows, threads = gate.numel() // max(width, 1), torch.get_num_threads()
        self._silu_mul(storage, gate.data_ptr(), _row_stride(gate), up.data_ptr(), _row_stride(up), out.data_ptr(), rows, width, threads)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [rows, V] -> int64 [rows]: the lowest id of the greatest value; -1 where a row holds NaN or +inf."""
        rows, width = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        self._argmax(_storage(logits, logits), logits.data_ptr(), _row_stride(logits), out.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def tiles(
        self, dtype: torch.dtype, heads: int, kv_heads: int, key_dim: int, value_dim: int, tile: Integers, table: Integers, tokens: int
    ) -> Tiles:
        """Attention of a step over ``tokens`` packed tokens. ``tile`` [tiles, 4]: where the row's table begins in
        ``table``, position, packed index and count of the tile's tokens; a tile is of one row and one block."""
        threads = torch.get_num_threads()
        step = _Step(_STORAGE[dtype], heads, kv_heads, key_dim, value_dim, threads)
        step.scratch_bytes = self._scratch_bytes(byref(step), int(tile[:, 3].max(initial=1)) * (heads // kv_heads))
        scratch = torch.empty(threads * step.scratch_bytes, dtype=torch.uint8)
        step.scratch, step.tiles, step.tile, step.table = scratch.data_ptr(), len(tile), tile.ctypes.data, table.ctypes.data
        return Tiles(step, dtype, tokens, (scratch, tile, table))

    def attend(
        self,
        tiles: Tiles,
        keys: int,
        values: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write key and value [1, Hkv, T, .] into one layer's blocks, at the addresses ``keys`` and ``values``, and
        attend: query [1, H, T, D] -> [1, T, H, Dv]."""
        step, dtype = tiles.step, tiles.dtype
        query_strides = _heads(query, dtype, step.heads, tiles.tokens, step.key_dim)
        key_strides = _heads(key, dtype, step.kv_heads, tiles.tokens, step.key_dim)
        value_strides = _heads(value, dtype, step.kv_heads, tiles.tokens, step.value_dim)
        if sinks is not None and (sinks.dtype is not dtype or sinks.shape != (step.heads,) or not sinks.is_contiguous()):
            raise ValueError(f"sinks of {tuple(sinks.shape)} in {sinks.dtype} for {step.heads} heads in {dtype}")
        out = torch.empty(1, tiles.tokens, step.heads, step.value_dim, dtype=dtype)
        self._attend(
            byref(step), keys, values, query.data_ptr(), *query_strides, key.data_ptr(), *key_strides, value.data_ptr(), *value_strides,
            out.data_ptr(), scaling, softcap or 0.0, window or 0, None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        return out


def _storage(first: Tensor, second: Tensor) -> int:
    storage = _STORAGE.get(first.dtype)
    if storage is None or second.dtype is not first.dtype or not (first.is_cpu and second.is_cpu):
        raise ValueError(f"kernels know float32 and bfloat16 on the CPU, not {first.dtype} and {second.dtype} on {second.device.type}")
    return storage


def _row_stride(x: Tensor) -> int:
    """Values from row to row of x [..., width], seen as a matrix."""
    if x.is_contiguous():
        return x.shape[-1]
    if x.stride(-1) != 1 or x.numel() != x.shape[-2] * x.shape[-1]:
        raise ValueError(f"a tensor {tuple(x.shape)} with strides {x.stride()} is no matrix of contiguous rows")
    return x.stride(-2)


def _result(like: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    if out.shape != like.shape or out.dtype is not like.dtype or not out.is_contiguous():
        raise ValueError(f"a result of {tuple(out.shape)} in {out.dtype} for {tuple(like.shape)} in {like.dtype}")
    return out


def _heads(x: Tensor, dtype: torch.dtype, heads: int, tokens: int, dim: int) -> tuple[int, int]:
    """Strides of x [1, heads, tokens, dim] from head to head and from token to token."""
    if x.shape != (1, heads, tokens, dim) or x.dtype is not dtype or not x.is_cpu or (x.stride(3) != 1 and dim > 1):
        raise ValueError(f"{tuple(x.shape)} in {x.dtype} with strides {x.stride()} where [1, {heads}, {tokens}, {dim}] in {dtype} is due")
    return x.stride(1), x.stride(2)
