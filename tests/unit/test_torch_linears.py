"""Packed linears: the same numbers, and the same bits for any number of rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from batching.engines.torch.linears import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(576, 192), (1536, 576), (40, 24)])
def test_a_row_has_the_same_bits_beside_any_number_of_others(shape, bias):
    torch.manual_seed(1)
    linear = nn.Linear(*shape, bias=bias)
    packed = PackedLinear(linear)
    x = torch.randn(257, shape[0])
    with torch.inference_mode():
        whole = packed(x)
        assert torch.allclose(whole, F.linear(x, linear.weight, linear.bias), atol=1e-4)
        for count in (1, 2, 3, 7, 32, 100):
            assert torch.equal(packed(x[:count]), whole[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_transposed_layer_of_gpt2_is_packed_too(dtype):
    torch.manual_seed(1)
    layer = Conv1D(24, 1100).to(dtype).requires_grad_(False)
    layer.bias.normal_()
    packed = PackedLinear(layer)
    x = torch.randn(9, 1100).to(dtype)
    with torch.inference_mode():
        whole = packed(x)
        assert torch.allclose(whole, layer(x), atol=1e-4 if dtype is torch.float32 else 0.05, rtol=0.02)
        assert torch.equal(packed(x[:1]), whole[:1])


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_of_another_class_is_left_alone():
    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    assert pack_linears(model)
    assert [type(layer) for layer in model] == [Scaled, PackedLinear]


def test_leading_dimensions_and_an_empty_batch_are_kept():
    packed = PackedLinear(nn.Linear(8, 6))
    with torch.inference_mode():
        assert packed(torch.randn(2, 3, 8)).shape == (2, 3, 6)
        assert packed(torch.randn(1, 0, 8)).shape == (1, 0, 6)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


def test_every_linear_is_packed_and_a_tied_embedding_keeps_its_rows():
    model = Tied()
    rows = model.embed.weight.detach().clone()
    assert pack_linears(model)
    assert type(model.block[0]) is PackedLinear
    assert type(model.head) is PackedLinear
    assert torch.equal(model.embed(torch.arange(20)), rows)
    x = torch.randn(2, 8)
    assert torch.allclose(model.head(x), x @ rows.T, atol=1e-5)
