"""Whole decoder layers in one call, where they are built as llama's.

Run by its parts such a layer makes some 25 calls of torch, each for a small tensor, and reads its input
seven times. One that fits is replaced: q, k and v are one product, gate and up another, and where our own
kernels do all its products, the layer is one call (native/layer.c); else some ten.

As in fuse.py no family is asked for by name. The parts must be there and nothing else; how the layer
attends is seen in a pass through the model; and for each kind of layer the replacement must give the very
bits that the layer gives when its parts are replaced one by one.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batching.engines.torch.attention import Flavour, Span, Step, attending, current_step
from batching.engines.torch.fit import kv_shape, run_packed
from batching.engines.torch.fuse import JointMLP, RMSNorm, fuse
from batching.engines.torch.kv import NativeKV, NativeStep
from batching.engines.torch.native import Native
from batching.engines.torch.native.structures import LayerPlan
from batching.engines.torch.packer import Packer, Unpackable, join
from batching.engines.torch.products import NativeProduct
from promptmill.core.logs import get_logger

_log = get_logger(__name__)
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_APART, _JOINT, _NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}, {"q_norm", "k_norm"}
_ATTENTIONS = (_APART, _JOINT, _APART | _NORMS, _JOINT | _NORMS)
_SPANS = (Span((0,), 0, 21), Span((1,), 0, 1))  # rows of the pass in which layers are observed


class DecoderLayer(nn.Module):
    """x += o(attention(rotated q, k, v of norm(x))); x += mlp(norm(x)). ``plain``: the layer it replaces, its norms and its
    mlp by kernels already. Raises Unpackable; ``_Misfit`` where ``plain`` has parts that do not fit."""

    def __init__(self, plain: Any, native: Native, packer: Packer, flavour: Flavour):
        super().__init__()
        attention, mlp = plain.self_attn, plain.mlp
        self.input_norm, self.post_norm = _norm(plain.input_layernorm), _norm(plain.post_attention_layernorm)
        self.query_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        if not isinstance(mlp, JointMLP) or flavour.sinks is not None:
            raise _Misfit
        joint = attention.qkv_proj if hasattr(attention, "qkv_proj") else join([attention.q_proj, attention.k_proj, attention.v_proj])
        if joint is None:
            raise _Misfit
        self.qkv_proj, self.o_proj = packer.pack(joint), packer.pack(attention.o_proj)
        self.gate, self.down_proj = packer.pack_gate(mlp.gate_up_proj, native), packer.pack(mlp.down_proj)
        self.layer_idx = int(attention.layer_idx)
        self.head_dim = int(attention.head_dim)
        self.heads = self.o_proj.in_features // self.head_dim
        self.kv_heads, rest = divmod(self.qkv_proj.out_features // self.head_dim - self.heads, 2)
        if rest or self.qkv_proj.out_features != (self.heads + 2 * self.kv_heads) * self.head_dim:
            raise _Misfit
        for name in ("attention_type", "layer_type"):  # what models ask of their layers
            if hasattr(plain, name):
                setattr(self, name, getattr(plain, name))
        self._native, self._flavour = native, flavour
        self._plans: dict[int, LayerPlan | None] = {}  # by how many values of a head turn

    def forward(self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any) -> Tensor:
        """hidden_states [1, T, E], changed in place."""
        x, step, (cosine, sine) = hidden_states[0], current_step(), position_embeddings
        plan = self._plan(cosine.shape[-1]) if isinstance(step, NativeStep) else None
        if plan is not None and isinstance(step, NativeStep):
            step.run_layer(plan, self.layer_idx, x, cosine[0], sine[0])
        else:
            self.run_by_kernels(x, step, cosine[0], sine[0])
        return hidden_states

    def run_by_kernels(self, x: Tensor, step: Step, cosine: Tensor, sine: Tensor) -> None:
        """The same, one kernel after the other."""
        attended = self._attend(self.qkv_proj.product(self.input_norm(x)), step, cosine, sine)
        self.o_proj.product(attended.view(len(x), -1), into=x)
        self.down_proj.product(self.gate.product(self.post_norm(x)), into=x)

    def _plan(self, rotary: int) -> LayerPlan | None:
        """None: not all products are our own."""
        if rotary not in self._plans:
            self._plans[rotary] = self._make_plan(rotary)
        return self._plans[rotary]

    def _make_plan(self, rotary: int) -> LayerPlan | None:
        products = (self.qkv_proj, self.o_proj, self.gate, self.down_proj)
        norms = [norm for norm in (self.input_norm, self.post_norm, self.query_norm, self.key_norm) if norm is not None]
        own = [product.weights for product in products if isinstance(product, NativeProduct)]
        if len(own) < len(products) or len({norm.one_plus for norm in norms}) != 1:
            return None
        heads = (self.query_norm, self.key_norm)
        return self._native.layer(
            own,
            [self.input_norm.weight, self.post_norm.weight, *(None if norm is None else norm.weight for norm in heads)],
            [self.input_norm.eps, self.post_norm.eps, *(0.0 if norm is None else norm.eps for norm in heads)],
            one_plus=norms[0].one_plus,
            heads=self.heads,
            head_dim=self.head_dim,
            rotary=rotary,
            scaling=self._flavour.scaling if self._flavour.scaling is not None else self.head_dim**-0.5,
            window=self._flavour.window,
            softcap=self._flavour.softcap,
        )

    def _attend(self, qkv: Tensor, step: Step, cosine: Tensor, sine: Tensor) -> Tensor:
        tokens, dim = qkv.shape[0], self.head_dim
        all_heads = qkv.view(tokens, -1, dim)
        if self.query_norm is not None and self.key_norm is not None:
            all_heads[:, : self.heads] = self.query_norm(all_heads[:, : self.heads])
            all_heads[:, self.heads : -self.kv_heads] = self.key_norm(all_heads[:, self.heads : -self.kv_heads])
        self._native.rotate(qkv, self.heads + self.kv_heads, dim, cosine, sine)
        query, key, value = all_heads.transpose(0, 1)[None].split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return step.attend(self.layer_idx, query, key, value, self._flavour)


class _Misfit(Exception):
    """A part of the layer is not as the replacement needs it."""


@dataclass(frozen=True, slots=True)
class _Call:
    """How the model calls a layer."""

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    def __call__(self, layer: nn.Module) -> Any:
        arguments = [argument.clone() if isinstance(argument, Tensor) else argument for argument in self.arguments]
        return layer(*arguments, **{name: value.clone() if isinstance(value, Tensor) else value for name, value in self.named.items()})


class _Observed:
    """A step that notes how each layer attends."""

    def __init__(self, step: Step):
        self._step = step
        self.flavours: dict[int, Flavour] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        self.flavours[layer] = flavour
        return self._step.attend(layer, query, key, value, flavour)


def fuse_layers(model: Any, native: Native, packer: Packer, cache_argument: str) -> int:
    """Replace the layers of ``model`` that fit, before its other parts are replaced or packed; how many."""
    fitting = {layer: (parent, name) for parent in model.modules() for name, layer in parent.named_children() if _looks_right(layer)}
    if not fitting:
        return 0
    pool = NativeKV(kv_shape(model, cache_argument), len(_SPANS), native)
    calls, flavours = _observe(model, cache_argument, pool, list(fitting))
    agrees: dict[Any, bool] = {}
    replaced = 0
    for layer, (parent, name) in fitting.items():
        flavour, kind = flavours[layer.self_attn.layer_idx], _kind(layer, flavours[layer.self_attn.layer_idx])
        if agrees.get(kind) is False:
            continue
        try:
            candidate = DecoderLayer(_by_parts(layer, native), native, packer, flavour)
            if kind not in agrees:
                agrees[kind] = _agree(candidate, layer, calls[layer], native, packer, pool)
            if not agrees[kind]:
                _log.info("layers_left_alone", layer=type(layer).__name__, reason="the whole gives other bits than its parts")
        except (_Misfit, Unpackable):
            agrees[kind] = False
        if agrees[kind]:
            setattr(parent, name, candidate.eval())
            replaced += 1
    return replaced


def _looks_right(layer: Any) -> bool:
    children = {name: child for name, child in layer.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
    if children.keys() != _PARTS or any(True for _ in layer.parameters(recurse=False)):
        return False
    attention = layer.self_attn
    parts = {name for name, child in attention.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
    known = hasattr(attention, "layer_idx") and hasattr(attention, "head_dim")
    return known and not any(True for _ in attention.parameters(recurse=False)) and parts in _ATTENTIONS


def _kind(layer: Any, flavour: Flavour) -> Any:
    """Equal for layers that compute the same with other weights: they have equal shapes and settings."""
    shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
    settings = [
        (name, value)
        for module in layer.modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | None) and name != "layer_idx"
    ]
    return type(layer), shapes, tuple(settings), flavour.scaling, flavour.window, flavour.softcap


def _observe(model: Any, cache_argument: str, pool: NativeKV, layers: list[nn.Module]) -> tuple[dict[nn.Module, _Call], dict[int, Flavour]]:
    """Run a short step; how each of ``layers`` is called, and how each attends."""
    calls: dict[nn.Module, _Call] = {}

    def note(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls[layer] = _Call(tuple(part.clone() if isinstance(part, Tensor) else part for part in arguments), named)

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    observed = _Observed(pool.step(_SPANS))
    positions = torch.cat([torch.arange(span.count) for span in _SPANS])
    ids = torch.arange(len(positions)) * 7919 % model.config.get_text_config().vocab_size  # a prime
    try:
        with torch.inference_mode():
            run_packed(model, cache_argument, observed, ids, positions, torch.arange(1))
    finally:
        for hook in hooks:
            hook.remove()
    return calls, observed.flavours


def _by_parts(layer: nn.Module, native: Native) -> nn.Module:
    """A copy of the layer, its weights shared, with its norms and its mlp replaced by kernels where they fit."""
    shared = {id(weight): weight for weight in layer.parameters()}
    parts = copy.deepcopy(layer, shared)
    fuse(parts, native)
    return parts


def _agree(candidate: nn.Module, layer: nn.Module, call: _Call, native: Native, packer: Packer, pool: NativeKV) -> bool:
    """Whether the candidate gives the bits that the layer does when its parts are replaced and packed one by one."""
    parts = _by_parts(layer, native)
    packer.pack_all(parts)
    with torch.inference_mode(), attending(pool.step(_SPANS)):
        try:
            wanted, got = call(parts), call(candidate)
        except (TypeError, ValueError, RuntimeError):  # called otherwise, or with positions of another build
            return False
    return isinstance(wanted, Tensor) and wanted.dtype is got.dtype and torch.equal(got, wanted)


def _norm(part: nn.Module) -> RMSNorm:
    if not isinstance(part, RMSNorm):
        raise _Misfit
    return part
