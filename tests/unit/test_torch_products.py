"""Our own product: the numbers of torch, the same bits beside any rows, and what becomes of its sums."""

import pytest
import torch
import torch.nn.functional as F

from batching.engines.torch.native import load_native
from batching.engines.torch.products import NativeProduct, Pages
from tests.support.kernels import KERNELS_DIR

pytestmark = pytest.mark.xdist_group("torch_engine")

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(96, 64), (97, 40), (16, 2), (33, 576), (192, 1536)]  # outputs, inputs; one with AMX's whole tiles, others without


@pytest.fixture(scope="module")
def native():
    native = load_native(KERNELS_DIR)
    assert native is not None
    return native


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, wanted, dtype):
    return (got.float() - wanted.float()).abs().max() <= (1e-5 if dtype is torch.float32 else 0.01) * wanted.float().abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_multiplies_as_torch_does(native, shape, biased, dtype):
    weight, bias = draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype, seed=1) if biased else None
    product = NativeProduct(weight, bias, native, Pages())
    for rows in (0, 1, 5, 70):
        x = draw(rows, shape[1], dtype=dtype, seed=2)
        got = product.product(x)
        assert got.dtype is dtype and got.shape == (rows, shape[0])
        assert not rows or close(got, F.linear(x.float(), weight.float(), None if bias is None else bias.float()), dtype)
    assert product(draw(2, 3, shape[1], dtype=dtype)).shape == (2, 3, shape[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_beside_any_others(native, shape, dtype, threads):
    product = NativeProduct(draw(*shape, dtype=dtype), None, native, Pages())
    x = draw(101, shape[1], dtype=dtype, seed=2)
    whole = product.product(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (1, 2, 7, 13, 16, 17, 31, 32, 33, 40, 64, 65, 101):
            assert torch.equal(torch.cat([product.product(rows) for rows in x.split(count)]), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_adds_in_place_with_the_bits_of_torch(native, shape, dtype):
    product = NativeProduct(draw(*shape, dtype=dtype), None, native, Pages())
    for rows in (1, 33, 77):
        x, before = draw(rows, shape[1], dtype=dtype, seed=2), draw(rows, shape[0], dtype=dtype, seed=3)
        into = before.clone()
        assert product.product(x, into=into) is into
        assert torch.equal(into, before + product.product(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 64), (74, 40), (6, 64)])
def test_it_gates_with_the_bits_of_the_kernel_for_gates(native, shape, dtype):
    weight = draw(*shape, dtype=dtype)
    gated, joint = NativeProduct(weight, None, native, Pages(), gated=True), NativeProduct(weight, None, native, Pages())
    assert gated.out_features == shape[0] // 2
    for rows in (1, 40):
        x = draw(rows, shape[1], dtype=dtype, seed=2)
        assert torch.equal(gated.product(x), native.silu_mul(*joint.product(x).chunk(2, dim=-1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_gives_its_sums_unrounded(native, dtype):
    weight, x = draw(97, 64, dtype=dtype), draw(35, 64, dtype=dtype, seed=2)
    wide = NativeProduct(weight, None, native, Pages(), wide=True).product(x)
    assert wide.dtype is torch.float32
    assert close(wide, x.float() @ weight.float().T, torch.float32)
    assert torch.equal(wide.to(dtype), NativeProduct(weight, None, native, Pages()).product(x))


def test_with_and_without_tiles_the_sums_are_near(native):
    weight, x = draw(96, 640, dtype=torch.bfloat16), draw(45, 640, dtype=torch.bfloat16, seed=2)
    with_tiles = NativeProduct(weight, None, native, Pages(), wide=True)
    without = NativeProduct(weight, None, native, Pages(), wide=True)
    without.weights.product.amx = False
    assert close(with_tiles.product(x), without.product(x), torch.float32)


def test_numbers_that_are_none_stay_in_their_row(native):
    for dtype in DTYPES:
        x = draw(40, 64, dtype=dtype)
        x[7] = torch.nan
        out = NativeProduct(draw(96, 64, dtype=dtype), None, native, Pages()).product(x)
        assert out[7].isnan().all()
        assert not out[:7].isnan().any() and not out[8:].isnan().any()


def test_what_the_kernel_cannot_read_is_refused(native):
    product = NativeProduct(draw(8, 6, dtype=torch.float32), None, native, Pages())
    for x in (torch.zeros(2, 7), torch.zeros(2, 6).bfloat16(), torch.zeros(6)):
        with pytest.raises(ValueError, match="are due"):
            native.product(product.weights, x)
    with pytest.raises(ValueError, match="cannot be packed"):
        NativeProduct(draw(8, 7, dtype=torch.bfloat16), None, native, Pages())
    with pytest.raises(ValueError, match="to add"):
        product.product(torch.zeros(2, 6), into=torch.zeros(3, 8))


def test_pages_give_aligned_room_that_nobody_else_has():
    pages = Pages()
    rooms = [pages.take(words) for words in (1, 17, 5000, 40 << 20, 3)]  # one is more than a chunk
    assert [len(room) for room in rooms] == [1, 17, 5000, 40 << 20, 3]
    assert all(room.data_ptr() % 64 == 0 for room in rooms)
    for number, room in enumerate(rooms):
        room[0] = room[-1] = number
    assert [int(room[0]) for room in rooms] == [int(room[-1]) for room in rooms] == [0, 1, 2, 3, 4]
