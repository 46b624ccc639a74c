"""Modules replaced by kernels: by what they are built of and compute, and only for equal bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from batching.engines.torch.fuse import GELUTanh, JointMLP, RMSNorm, fuse, steady, unsteady
from batching.engines.torch.native import load_native
from batching.engines.torch.packer import Packer
from tests.support.kernels import KERNELS_DIR

pytestmark = pytest.mark.xdist_group("torch_engine")


@pytest.fixture(scope="module")
def native():
    native = load_native(KERNELS_DIR)
    assert native is not None
    return native


class Gated(nn.Module):
    """The MLP of llama."""

    def __init__(self, act="silu"):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(20, 36), nn.Linear(20, 36), nn.Linear(36, 20)
        self.act_fn = ACT2FN[act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Joint(nn.Module):
    """The MLP of phi3."""

    def __init__(self, act="silu"):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(20, 72, bias=False), nn.Linear(36, 20, bias=False)
        self.activation_fn = ACT2FN[act]

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class Clipped(Gated):
    """Built like llama's, computes something else."""

    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=0.1))


class MeanNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Model(nn.Module):
    """A model around one block."""

    def __init__(self, block):
        super().__init__()
        self.embed, self.block = nn.Embedding(3, 20), block

    def forward(self, x):
        return self.block(x)


def model_of(block, dtype=torch.float32):
    torch.manual_seed(2)
    model = Model(block).to(dtype).requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(std=0.5)
    return model.eval()


def fused(model, native):
    replaced = fuse(model, native)
    Packer().pack_all(model)
    return replaced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        (lambda: LlamaRMSNorm(20), RMSNorm),
        (lambda: LlamaRMSNorm(20, eps=0.3), RMSNorm),
        (lambda: Gemma2RMSNorm(20), RMSNorm),
        (Gated, JointMLP),
        (Joint, JointMLP),
    ],
)
def test_a_module_that_fits_is_replaced_and_computes_the_same(module, kernel, dtype, native):
    model = model_of(module(), dtype)
    x = torch.randn(1, 9, 20).to(dtype)
    wanted = model(x)
    assert fused(model, native) == [f"{kernel.__name__} x 1"]
    assert type(model.block) is kernel
    got = model(x)
    assert got.dtype is dtype
    assert (got - wanted).abs().max() <= (1e-5 if dtype is torch.float32 else 0.03) * wanted.abs().max()


@pytest.mark.parametrize(
    "module", [Clipped(), Gated("relu"), Joint("gelu"), MeanNorm(20), nn.LayerNorm(20), nn.Linear(20, 20), nn.ReLU(), ACT2FN["gelu"]]
)
def test_a_module_that_computes_something_else_or_needs_no_kernel_is_left_alone(module, native):
    model = model_of(module)
    x = torch.randn(1, 9, 20)
    wanted = model(x)
    assert fused(model, native) == []
    assert torch.allclose(model(x), wanted, atol=1e-5)


def test_a_norm_takes_heads_in_any_layout(native):
    model = model_of(LlamaRMSNorm(8))
    heads = torch.randn(1, 5, 3, 8).transpose(1, 2)
    wanted = model(heads)
    assert fused(model, native) == ["RMSNorm x 1"]
    assert torch.allclose(model(heads), wanted, atol=1e-6)
    parts = torch.randn(1, 5, 20).split([8, 12], dim=-1)[0]
    assert torch.allclose(model(parts), LlamaRMSNorm(8)(parts) * model.block.weight, atol=1e-6)


def test_gelu_with_tanh_is_replaced_where_torch_rounds_it_by_its_place(native):
    model = model_of(ACT2FN["gelu_pytorch_tanh"])
    assert fused(model, native) == ([] if steady(ACT2FN["gelu_pytorch_tanh"], torch.float32) else ["GELUTanh x 1"])
    x = torch.linspace(-9, 9, 1001)
    assert torch.allclose(model(x), F.gelu(x, approximate="tanh"), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_replaces_gelu_is_steady(dtype):
    assert steady(GELUTanh(), dtype)
    assert steady(torch.relu, dtype)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("module", [lambda: LlamaRMSNorm(1003), Gated, Joint, lambda: ACT2FN["gelu_pytorch_tanh"]])
def test_a_token_has_the_same_bits_in_any_place_and_company(module, threads, native):
    model = model_of(module())
    fused(model, native)
    width = 20 if isinstance(model.block, JointMLP) else 1003
    x = torch.randn(1, 301, width)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = model(x)
        assert all(
            torch.equal(model(x[:, begin:end].clone()), whole[:, begin:end]) for begin, end in [(0, 1), (3, 10), (7, 301), (300, 301)]
        )
    finally:
        torch.set_num_threads(before)


def test_what_is_not_steady_is_named(native):
    model = model_of(nn.Sequential(Gated(), Gated("relu"), nn.Embedding(5, 20)))
    assert unsteady(model) == (["Linear"] if steady(ACT2FN["silu"], torch.float32) else ["Linear", "SiLUActivation"])
    fused(model, native)
    assert unsteady(model) == []


def test_a_function_that_rounds_by_place_is_not_steady():
    assert not steady(lambda x: x if len(x) < 16 else x + 1e-6, torch.float32)
