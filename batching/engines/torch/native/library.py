"""The kernels as typed methods. Each checks what C cannot: number types, sizes and strides."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from batching.engines.torch.native.structures import (
    ADD,
    GATE,
    LANES,
    OUTPUTS,
    STORAGE,
    STORE,
    WIDE,
    Integers,
    LayerPlan,
    LayerStructure,
    ProductStructure,
    StepStructure,
    Tiles,
    Weights,
)


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
            self._pack, self._product = library.pack, library.product
            self._shortlist, self._shortlist_bytes = library.shortlist, library.shortlist_bytes
            self._is_fast, self._has_amx = library.product_is_fast, library.product_amx
            self._layer, self._layer_bytes = library.decoder_layer, library.decoder_layer_bytes
        except AttributeError as error:
            raise OSError(f"{path} is no library of kernels: {error}") from error
        p, i, f = c_void_p, c_int64, c_float
        self._attend.argtypes = [POINTER(StepStructure), p, p, p, i, i, p, i, i, p, i, i, p, f, f, i, p]
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = [POINTER(StepStructure), i], i
        self._rms_norm.argtypes = [i, p, i, p, p, i, i, f, i, i]
        self._rotate.argtypes = [i, p, i, p, p, i, i, i, i, i]
        self._silu_mul.argtypes = [i, p, i, p, i, p, i, i, i]
        self._argmax.argtypes = [i, p, i, p, i, i, i]
        self._pack.argtypes = [POINTER(ProductStructure), p, i, p]
        self._product.argtypes = [POINTER(ProductStructure), p, p, i, i]
        for function in (self._attend, self._rms_norm, self._rotate, self._silu_mul, self._argmax, self._pack, self._product):
            function.restype = None
        self._shortlist.argtypes, self._shortlist.restype = [i, p, i, i, i, i, p, p, p, p, p, i], None
        self._shortlist_bytes.argtypes, self._shortlist_bytes.restype = [i], i
        self._is_fast.argtypes, self._is_fast.restype = [i], i
        self._has_amx.argtypes, self._has_amx.restype = [], i
        self.amx = bool(self._has_amx())
        self._layer.argtypes, self._layer.restype = [POINTER(LayerStructure), POINTER(StepStructure), p, p, p, i, p, p, p], None
        self._layer_bytes.argtypes, self._layer_bytes.restype = [POINTER(LayerStructure), i], i

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, *, one_plus: bool = False) -> Tensor:
        """x [..., E], weight [E]. Rounded before the product as llama does, or with ``one_plus`` times 1 + weight
        in float32 as gemma does. ``out`` may be ``x``."""
        storage, width = _storage(x, weight), x.shape[-1]
        if weight.shape != (width,) or not weight.is_contiguous():
            raise ValueError(f"a weight of {tuple(weight.shape)} for rows of {width}")
        out = _result(x, out)
        rows, stride = x.numel() // max(width, 1), _row_stride(x)
        self._rms_norm(
            storage, x.data_ptr(), stride, weight.data_ptr(), out.data_ptr(), rows, width, eps, one_plus, torch.get_num_threads()
        )
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

    def weight_words(self, dtype: torch.dtype, inputs: int, outputs: int, *, gated: bool = False) -> int:
        """32-bit words that the packed weights of a layer take; ``gated``: ``outputs`` gates and as many values."""
        width = LANES if gated else OUTPUTS
        return -(-outputs // width) * OUTPUTS * (inputs // STORAGE[dtype])

    def pack(self, weight: Tensor, bias: Tensor | None, room: Tensor, *, gated: bool = False, wide: bool = False) -> Weights:
        """Packs a weight [N, K] with its bias [N] into ``room``, int32 of ``weight_words``. ``gated``: its first N/2 outputs
        are gates, the others what they gate. K is even in bfloat16. Either ``gated`` or ``wide``."""
        storage, (rows, inputs) = _storage(weight, weight if bias is None else bias), weight.shape
        outputs = rows // 2 if gated else rows
        words = self.weight_words(weight.dtype, inputs, outputs, gated=gated)
        if inputs % storage or (gated and (rows % 2 or bias is not None)) or not weight.is_contiguous():
            raise ValueError(f"a weight {tuple(weight.shape)} in {weight.dtype} that cannot be packed")
        if room.dtype is not torch.int32 or room.numel() != words or not room.is_contiguous():
            raise ValueError(f"room for {room.numel()} words where {words} are due")
        amx = self.amx and weight.dtype is torch.bfloat16 and inputs % 32 == 0
        product = ProductStructure(
            storage, GATE if gated else WIDE if wide else STORE, torch.get_num_threads(), amx, outputs, inputs // storage
        )
        product.weight, product.bias = room.data_ptr(), None if bias is None else bias.data_ptr()
        self._pack(byref(product), weight.data_ptr(), inputs, room.data_ptr())
        return Weights(product, weight.dtype, inputs, outputs, gated, wide, (room, bias))

    def product(self, weights: Weights, x: Tensor, into: Tensor | None = None) -> Tensor:
        """x [rows, K] times packed weights: [rows, N]. With ``into`` [rows, N], that is added to it, rounded, in place."""
        product = weights.product
        if x.dtype is not weights.dtype or x.dim() != 2 or x.shape[1] != weights.inputs or not x.is_contiguous():
            raise ValueError(f"{tuple(x.shape)} in {x.dtype} where rows of {weights.inputs} in {weights.dtype} are due")
        if into is None:
            out = torch.empty(x.shape[0], weights.outputs, dtype=torch.float32 if weights.wide else x.dtype)
        else:
            out = into
            if (
                weights.gated
                or weights.wide
                or out.shape != (x.shape[0], weights.outputs)
                or out.dtype is not x.dtype
                or not out.is_contiguous()
            ):
                raise ValueError(f"{tuple(out.shape)} in {out.dtype} to add {weights.outputs} outputs to")
        product.threads = torch.get_num_threads()
        if not (weights.gated or weights.wide):
            product.ending = STORE if into is None else ADD
        self._product(byref(product), x.data_ptr(), out.data_ptr(), weights.inputs, x.shape[0])
        return out

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether ``product`` is the fastest that there is for this number type on this CPU."""
        return bool(self._is_fast(STORAGE[dtype])) if dtype in STORAGE else False

    def layer(
        self,
        products: Sequence[Weights],
        norms: Sequence[Tensor | None],
        epsilons: Sequence[float],
        *,
        one_plus: bool,
        heads: int,
        head_dim: int,
        rotary: int,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> LayerPlan:
        """A decoder layer for ``decoder_layer``. ``products``: q, k and v side by side, what follows attention, gated,
        what follows that. ``norms``: weights of the norms before attention and mlp [E], and of
        queries and keys [D] or None; ``epsilons`` of each of the four."""
        qkv, out, gate, down = products
        dtype, width = qkv.dtype, qkv.inputs
        kv_heads = (qkv.outputs // head_dim - heads) // 2
        sizes = (qkv.outputs, out.inputs, out.outputs, gate.inputs, down.inputs, down.outputs)
        if sizes != ((heads + 2 * kv_heads) * head_dim, heads * head_dim, width, width, gate.outputs, width) or not gate.gated:
            raise ValueError(f"products that are no decoder layer of {heads} heads of {head_dim}")
        if any(part.dtype is not dtype or part.wide for part in products):
            raise ValueError("the products of a layer have one number type")
        for norm, size in zip(norms, (width, width, head_dim, head_dim), strict=True):
            if norm is not None and (norm.shape != (size,) or norm.dtype is not dtype or not norm.is_contiguous()):
                raise ValueError(f"a norm of {tuple(norm.shape)} in {norm.dtype} for {size} values in {dtype}")
        if rotary > head_dim or rotary % 2:
            raise ValueError(f"{rotary} of {head_dim} values to turn")
        structure = LayerStructure()
        for name, part, ending in (("qkv", qkv, STORE), ("out", out, ADD), ("gate", gate, GATE), ("down", down, ADD)):
            copy = ProductStructure.from_buffer_copy(part.product)
            copy.ending = ending
            setattr(structure, name, copy)
        names = ("input", "post", "query", "key")
        for name, norm, epsilon in zip(names, norms, epsilons, strict=True):
            setattr(structure, f"{name}_norm", None if norm is None else norm.data_ptr())
            setattr(structure, f"{name}_eps", epsilon)
        structure.one_plus, structure.width, structure.heads, structure.kv_heads = one_plus, width, heads, kv_heads
        structure.head_dim, structure.rotary = head_dim, rotary
        structure.scaling, structure.softcap, structure.window = scaling, softcap or 0.0, window or 0
        return LayerPlan(structure, dtype, width, heads, kv_heads, head_dim, (*products, *norms))

    def layer_room(self, plan: LayerPlan, rows: int) -> Tensor:
        """Memory that ``decoder_layer`` works in, for layers of one shape one after the other."""
        return torch.empty(self._layer_bytes(byref(plan.structure), rows) + 64, dtype=torch.uint8)

    def decoder_layer(
        self, plan: LayerPlan, tiles: Tiles, keys: int, values: int, x: Tensor, cosine: Tensor, sine: Tensor, room: Tensor
    ) -> None:
        """Run a layer over x [T, E] in place: ``keys`` and ``values`` as for ``attend``, cosine and sine [T, rotary]."""
        structure, step, rows = plan.structure, tiles.step, x.shape[0]
        turns = (rows, structure.rotary)
        if x.shape != (tiles.tokens, plan.width) or x.dtype is not plan.dtype or tiles.dtype is not plan.dtype or not x.is_contiguous():
            raise ValueError(f"{tuple(x.shape)} in {x.dtype} where [{tiles.tokens}, {plan.width}] in {plan.dtype} is due")
        for part in (cosine, sine):
            if part.shape != turns or part.dtype is not plan.dtype or not part.is_contiguous():
                raise ValueError(f"a cosine or sine of {tuple(part.shape)} in {part.dtype} where {turns} in {plan.dtype} is due")
        if (step.heads, step.kv_heads, step.key_dim, step.value_dim) != (plan.heads, plan.kv_heads, plan.head_dim, plan.head_dim):
            raise ValueError("the step's attention is not that of the layer")
        at = -(-room.data_ptr() // 64) * 64
        self._layer(byref(structure), byref(step), keys, values, x.data_ptr(), rows, cosine.data_ptr(), sine.data_ptr(), at)

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
        step = StepStructure(STORAGE[dtype], heads, kv_heads, key_dim, value_dim, threads)
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

    def shortlist(self, logits: Tensor, count: int, temperatures: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        """The ``count`` best of each row of logits [rows, V], by (logit descending, id ascending): values in float32 and ids,
        both [rows, count]; -inf behind the finite ones. And of rows with a temperature > 0 the mass of all tokens, the sum of
        exp((logit - greatest) / temperature), float64 [rows]; else 0. Rows hold no NaN."""
        rows, width = logits.shape
        if not 0 < count <= width or len(temperatures) != rows:
            raise ValueError(f"the best {count} of {width} for {len(temperatures)} temperatures of {rows} rows")
        values, ids = torch.empty(rows, count, dtype=torch.float32), torch.empty(rows, count, dtype=torch.int64)
        heat, mass = torch.tensor(temperatures, dtype=torch.float32), torch.empty(rows, dtype=torch.float64)
        threads = torch.get_num_threads()
        scratch = torch.empty(threads * self._shortlist_bytes(width), dtype=torch.uint8)
        self._shortlist(
            _storage(logits, logits), logits.data_ptr(), _row_stride(logits), rows, width, count, heat.data_ptr(), values.data_ptr(),
            ids.data_ptr(), mass.data_ptr(), scratch.data_ptr(), threads,
        )  # fmt: skip
        return values, ids, mass


def _storage(first: Tensor, second: Tensor) -> int:
    storage = STORAGE.get(first.dtype)
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
