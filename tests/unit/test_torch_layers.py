"""Whole layers replaced: which, and that they give the bits of their parts."""

import pytest
import torch
from torch import nn

from batching.engines.torch import runner as runners
from batching.engines.torch.fuse import fuse
from batching.engines.torch.layers import DecoderLayer, fuse_layers
from batching.engines.torch.loader import cache_argument, load_model
from batching.engines.torch.native import load_native
from batching.engines.torch.packer import Packer
from batching.engines.torch.runner import load_runner
from tests.support.kernels import KERNELS_DIR
from tests.support.packed import run_packed, text
from tests.support.tiny_models import FAMILIES, card, cpu_options, tiny_model

pytestmark = pytest.mark.xdist_group("torch_engine")

WHOLE = {"llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"}  # of FAMILIES, those built as llama
PROMPTS = [text(length) for length in (1, 31, 70)]


@pytest.fixture(scope="module")
def native():
    native = load_native(KERNELS_DIR)
    assert native is not None
    return native


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, folder)
    return request.param, folder


def whole_layers(model):
    return sum(type(module) is DecoderLayer for module in model.modules())


def test_the_layers_of_families_built_as_llama_are_replaced(family, native):
    name, folder = family
    model = load_model(folder, torch.float32, torch.device("cpu"))
    wanted = model.config.num_hidden_layers if name in WHOLE else 0
    if name == "smollm3":  # every second of its layers knows no positions
        wanted //= 2
    assert fuse_layers(model, native, Packer(native), cache_argument(model)) == whole_layers(model) == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(WHOLE & set(FAMILIES)))
def test_whole_layers_give_the_bits_of_their_parts(name, dtype, tmp_path, monkeypatch):
    tiny_model(name, tmp_path)
    options = cpu_options(tmp_path, rows=8, kernels="native", kernels_dir=KERNELS_DIR, dtype=dtype)
    whole = load_runner(tmp_path, card(tmp_path), options)
    monkeypatch.setattr(runners, "fuse_layers", lambda *_: 0)
    parts = load_runner(tmp_path, card(tmp_path), options)
    assert whole_layers(whole._model) > 0 == whole_layers(parts._model)
    for (ids, logits), (wanted_ids, wanted) in zip(run_packed(whole, PROMPTS, 19), run_packed(parts, PROMPTS, 19), strict=True):
        assert ids == wanted_ids
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(WHOLE & set(FAMILIES)))
def test_one_call_gives_the_bits_of_kernel_after_kernel(name, dtype, tmp_path, monkeypatch):
    tiny_model(name, tmp_path)
    runner = load_runner(tmp_path, card(tmp_path), cpu_options(tmp_path, rows=8, kernels="native", kernels_dir=KERNELS_DIR, dtype=dtype))
    at_once = run_packed(runner, PROMPTS, 19)
    calls = []
    by_kernels = DecoderLayer.run_by_kernels
    monkeypatch.setattr(DecoderLayer, "_plan", lambda *_: None)
    monkeypatch.setattr(DecoderLayer, "run_by_kernels", lambda *arguments: calls.append(1) or by_kernels(*arguments))
    for (ids, logits), (wanted_ids, wanted) in zip(at_once, run_packed(runner, PROMPTS, 19), strict=True):
        assert ids == wanted_ids
        assert torch.equal(logits, wanted)
    assert calls


class Scaled(nn.Module):
    """A layer of llama's parts that joins them otherwise."""

    def __init__(self, layer):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm

    def forward(self, hidden_states, **named):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
        hidden_states = hidden_states + 0.5 * attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_a_layer_that_joins_its_parts_otherwise_is_left_alone(native, tmp_path):
    tiny_model("llama", tmp_path)
    model = load_model(tmp_path, torch.float32, torch.device("cpu"))
    layers = model.get_decoder().layers
    layers[1] = Scaled(layers[1])
    assert fuse_layers(model, native, Packer(native), cache_argument(model)) == len(layers) - 1
    assert type(layers[1]) is Scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary", [64, 48, 6])
def test_rotary_positions_are_turned_as_transformers_does(native, dtype, rotary):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 5, 64, generator=generator).to(dtype)
    angles = torch.randn(40, rotary // 2, generator=generator)
    cosine, sine = (torch.cat([part, part], -1).to(dtype) for part in (angles.cos(), angles.sin()))
    turned, half = x[:, :3, :rotary], rotary // 2
    around = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    wanted = x.clone()
    wanted[:, :3, :rotary] = turned * cosine[:, None] + around * sine[:, None]
    got = x.clone().view(40, -1)
    native.rotate(got, 3, 64, cosine, sine)
    assert torch.equal(got.view(40, 5, 64), wanted)


def test_parts_replaced_alone_are_not_replaced_again(native, tmp_path):
    tiny_model("llama", tmp_path)
    model = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert fuse(model, native)
    assert fuse(model, native) == []
