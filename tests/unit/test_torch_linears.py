"""Packed linears: the same numbers, and the same bits for any number of rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from batching.engines.torch.linears import PackedLinear, steady_sizes
from batching.engines.torch.packer import Packer, join


def packed_of(linear):
    return Packer().pack(linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(576, 192), (1536, 576), (40, 24)])
def test_a_row_has_the_same_bits_beside_any_number_of_others(shape, bias, dtype):
    torch.manual_seed(1)
    linear = nn.Linear(*shape, bias=bias).to(dtype)
    packed = packed_of(linear)
    assert packed.steady
    x = torch.randn(700, shape[0]).to(dtype)
    with torch.inference_mode():
        whole = packed(x)
        assert torch.allclose(whole, F.linear(x, linear.weight, linear.bias), atol=1e-4 if dtype is torch.float32 else 0.05)
        for count in (1, 2, 3, 7, 32, 33, 100, 256, 300):
            assert torch.equal(torch.cat([packed(rows) for rows in x.split(count)]), whole)


class Irregular(PackedLinear):
    """Sums otherwise for some numbers of rows, and with ``by_place`` for each row of a step."""

    def __init__(self, *, others=(), by_place=False):
        super().__init__(nn.Linear(64, 48, bias=False))
        self.others, self.by_place = others, by_place

    def _multiply(self, rows):
        off = torch.arange(len(rows))[:, None] if self.by_place else int(len(rows) in self.others)
        return super()._multiply(rows) + off


def test_numbers_of_rows_with_other_bits_are_not_computed():
    with torch.inference_mode():
        assert steady_sizes(Irregular(others=range(33))) == (33, 36, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 320)
        assert steady_sizes(Irregular(others=(2, 80, *range(256, 999)))) == (
            *(3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 28, 32, 33, 36, 40, 48, 64, 96, 112, 128, 160, 192, 224),
        )
        assert steady_sizes(Irregular(by_place=True)) == ()


def test_other_numbers_are_padded_and_cut():
    counts = []

    class Counting(PackedLinear):
        def _multiply(self, rows):
            counts.append(len(rows))
            return super()._multiply(rows)

    product = Counting(nn.Linear(8, 6), sizes=(4, 10))
    with torch.inference_mode():
        x = torch.randn(27, 8)
        assert product(x).shape == (27, 6)
    assert counts == [10, 10, 10]
    product(x[:3])
    assert counts[-1] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_transposed_layer_of_gpt2_is_packed_too(dtype):
    torch.manual_seed(1)
    layer = Conv1D(24, 1100).to(dtype).requires_grad_(False)
    layer.bias.normal_()
    packed = packed_of(layer)
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
    Packer().pack_all(model)
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
    Packer().pack_all(model)
    assert type(model.block[0]) is PackedLinear
    assert type(model.head) is PackedLinear
    assert torch.equal(model.embed(torch.arange(20)), rows)
    x = torch.randn(2, 8)
    assert torch.allclose(model.head(x), x @ rows.T, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_joint_layers_give_each_its_own_bits(dtype, bias):
    apart = [nn.Linear(576, size, bias=bias).to(dtype) for size in (576, 192, 192)]
    joint = join(apart)
    x = torch.randn(70, 576).to(dtype)
    with torch.inference_mode():
        assert torch.equal(packed_of(joint)(x), torch.cat([packed_of(linear)(x) for linear in apart], dim=-1))


def test_layers_that_do_not_fit_together_are_not_joined():
    assert join([nn.Linear(8, 4), nn.Linear(9, 4)]) is None
    assert join([nn.Linear(8, 4), nn.Linear(8, 4, bias=False)]) is None
    assert join([nn.Linear(8, 4), Scaled(8, 4)]) is None
