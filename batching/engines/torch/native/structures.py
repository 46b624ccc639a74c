"""What C reads: the structures of native/kernels.h and layer.c, and the Python objects that keep their memory alive."""

from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

STORAGE = {torch.float32: 1, torch.bfloat16: 2}  # values in a 32-bit word
LANES = 16  # value dimensions are padded to a multiple of it

Integers = npt.NDArray[np.int64]


class StepStructure(Structure):
    """``Step`` of kernels.h."""

    _fields_ = (
        *((name, c_int64) for name in ("storage", "heads", "kv_heads", "key_dim", "value_dim", "threads", "scratch_bytes")),
        ("scratch", c_void_p),
        ("tiles", c_int64),
        ("tile", c_void_p),
        ("table", c_void_p),
    )


class ProductStructure(Structure):
    """``Product`` of kernels.h."""

    _fields_ = (
        *((name, c_int64) for name in ("storage", "ending", "threads", "amx", "outputs", "words")),
        ("bias", c_void_p),
        ("weight", c_void_p),
    )


class LayerStructure(Structure):
    """``DecoderLayer`` of layer.c."""

    _fields_ = (
        *((name, ProductStructure) for name in ("qkv", "out", "gate", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, c_float) for name in ("input_eps", "post_eps", "query_eps", "key_eps")),
        *((name, c_int64) for name in ("one_plus", "width", "heads", "kv_heads", "head_dim", "rotary")),
        ("scaling", c_float),
        ("softcap", c_float),
        ("window", c_int64),
    )


OUTPUTS = 32  # of a panel of weights
STORE, ADD, GATE, WIDE = range(4)


@dataclass(frozen=True, slots=True)
class Weights:
    """Packed weights of one linear layer. ``gated``: a row gives silu(gate) * up. ``wide``: it gives float32 whatever
    the weights are. Holds the arrays that C reads."""

    product: ProductStructure
    dtype: torch.dtype
    inputs: int
    outputs: int
    gated: bool
    wide: bool
    held: tuple[object, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A step's attention, cut into tiles, ready for all layers. Holds the arrays that C reads."""

    step: StepStructure
    dtype: torch.dtype
    tokens: int
    held: tuple[object, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A decoder layer that runs in one call. Holds the weights that C reads."""

    structure: LayerStructure
    dtype: torch.dtype
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    held: tuple[object, ...] = field(repr=False)
