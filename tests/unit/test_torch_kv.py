"""The pools of blocks: every rule for each of them, against attention computed by its definition."""

import pytest
import torch

from batching.engines.torch.attention import Flavour, Span
from batching.engines.torch.kv import KVPool, KVShape, NativeKV, TorchKV, block_bytes, create_pool
from batching.engines.torch.native import Native, load_native
from tests.support.kernels import KERNELS_DIR, Text, attend_packed, dense_attention, poison

CPU = torch.device("cpu")
# Averages of values: the results are no larger than the values (about 4), and each weight, each product of weights
# and values and the result itself are rounded once: a few units of 2^-9 in bfloat16, of 2^-24 in float32.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04}
PLAIN = Flavour()
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FLAVOURS = {
    "plain": Flavour(),
    "scaled": Flavour(scaling=0.7),
    "window": Flavour(window=9),
    "wide window": Flavour(window=70),
    "softcap": Flavour(softcap=1.5),
    "sinks": Flavour(sinks=SINKS),
    "all": Flavour(0.4, 33, 3.0, SINKS),
}
# (kv heads, key dim, value dim) for four query heads: grouped, one for all, each its own; odd and unequal dims.
SHAPES = [(2, 8, 8), (1, 64, 64), (4, 24, 16), (2, 7, 5), (2, 80, 80), (4, 33, 48)]


@pytest.fixture(scope="module")
def native() -> Native:
    kernels = load_native(KERNELS_DIR)
    assert kernels is not None
    return kernels


@pytest.fixture(params=["native", "torch"])
def kernels(request, native: Native) -> Native | None:
    return native if request.param == "native" else None


def tiny(kernels: Native | None, blocks: int = 8, dtype: torch.dtype = torch.float32, layers: int = 2) -> KVPool:
    return create_pool(KVShape(layers, 2, 8, 8, dtype), blocks, CPU, kernels)


def whole(pool: KVPool, text: Text, table, flavour: Flavour = PLAIN) -> torch.Tensor:
    return attend_packed(pool, [text], [Span(table, 0, text.tokens)], flavour)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_ragged_chunks_and_decodes_equal_attention_by_definition(kernels, dims, flavour, dtype):
    how = FLAVOURS[flavour]
    pool = create_pool(KVShape(2, *dims, dtype), 9, CPU, kernels)
    poison(pool)
    texts = [Text(pool.shape, 4, tokens, seed) for seed, tokens in enumerate((1, 40, 150))]
    tables = [[4], [7], [2, 8, 0]]
    parts = [[], [], []]
    for stops in ([1, 0, 100], [1, 38, 100], [1, 39, 148], [1, 40, 149], [1, 40, 150]):
        rows = [row for row, stop in enumerate(stops) if sum(p.shape[1] for p in parts[row]) < stop]
        pasts = {row: sum(p.shape[1] for p in parts[row]) for row in rows}
        spans = [Span(tables[row], pasts[row], stops[row] - pasts[row]) for row in rows]
        for row, got in zip(rows, attend_packed(pool, [texts[row] for row in rows], spans, how), strict=True):
            parts[row].append(got)
    for text, got in zip(texts, parts, strict=True):
        for layer in range(2):
            wanted = dense_attention(text.query[layer], text.key[layer], text.value[layer], how)
            assert (torch.cat(got, 1)[layer] - wanted).abs().max() < TOLERANCE[dtype]


def test_what_an_earlier_owner_left_never_reaches_a_row(kernels):
    # Lengths at and beside the edges of pairs, panels and blocks, decoded into blocks full of NaN.
    pool = tiny(kernels, blocks=4, dtype=torch.bfloat16)
    for tokens in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129):
        for window in (None, 1, 2, 31):
            poison(pool)
            text = Text(pool.shape, 4, tokens + 1, tokens)
            attend_packed(pool, [text], [Span([3, 0, 1], 0, tokens)], Flavour(window=window))
            (decoded,) = attend_packed(pool, [text], [Span([3, 0, 1], tokens, 1)], Flavour(window=window))
            assert decoded.isfinite().all(), (tokens, window)


def test_a_row_of_nan_stays_nan_and_its_neighbours_do_not(kernels):
    pool = tiny(kernels)
    bad, good = Text(pool.shape, 4, 20, 1), Text(pool.shape, 4, 20, 2)
    bad.value[:, :, 7] = torch.nan
    first, second = attend_packed(pool, [bad, good], [Span([0], 0, 20), Span([1], 0, 20)], Flavour())
    assert first[:, 7:].isnan().all()
    assert second.isfinite().all()


def test_tokens_that_do_not_see_a_nan_of_their_row_do_not_have_it(native):
    # Else the bits of a token would depend on what is in its chunk.
    pool = tiny(native, dtype=torch.bfloat16)
    text = Text(pool.shape, 4, 20, 1)
    text.value[:, :, 7] = torch.nan
    got = whole(pool, text, [0])
    assert got[:, :7].isfinite().all()
    assert got[:, 7:].isnan().all()


def test_a_nan_that_left_the_window_is_not_seen(native):
    pool = tiny(native, dtype=torch.bfloat16)
    text = Text(pool.shape, 4, 40, 1)
    text.value[:, :, 10] = torch.nan
    got = whole(pool, text, [0], Flavour(window=5))
    assert got[:, 10:15].isnan().all()
    assert got[:, :10].isfinite().all()
    assert got[:, 15:].isfinite().all()


def test_scores_of_infinity_make_nan_and_not_a_number(kernels):
    pool = tiny(kernels)
    text = Text(pool.shape, 4, 3, 1)
    text.key[:, :, 1] = torch.inf
    assert whole(pool, text, [0])[:, 2].isnan().any()


def test_scores_of_minus_infinity_weigh_nothing(native):
    pool = tiny(native, blocks=2, layers=1)
    text = Text(pool.shape, 4, 70, 1)
    text.query.fill_(1)
    text.key[:, :, :64] = -1e38  # the whole first block: best score -inf when the second begins
    text.value[:, :, 64:] = 3
    assert torch.allclose(whole(pool, text, [0, 1])[:, 64:], torch.tensor(3.0))


def test_a_copied_block_serves_as_the_one_it_was_copied_from(kernels):
    pool = tiny(kernels)
    text = Text(pool.shape, 4, 80, 1)
    unforked = whole(pool, text, [0, 1])
    attend_packed(pool, [text], [Span([2, 3], 0, 79)], Flavour())
    pool.copy(3, 5)  # a fork owns its partial last block, and shares the whole one
    (forked,) = attend_packed(pool, [text], [Span([2, 5], 79, 1)], Flavour())
    assert torch.allclose(forked, unforked[:, 79:], atol=1e-6)


def test_a_fork_does_not_disturb_what_it_forked_from(kernels):
    pool = tiny(kernels)
    text, other = Text(pool.shape, 4, 80, 1), Text(pool.shape, 4, 80, 2)
    unforked = whole(pool, text, [0, 1])
    attend_packed(pool, [text], [Span([0, 1], 0, 70)], Flavour())
    pool.copy(1, 5)
    attend_packed(pool, [other], [Span([0, 5], 70, 10)], Flavour())
    (rest,) = attend_packed(pool, [text], [Span([0, 1], 70, 10)], Flavour())
    assert torch.allclose(rest, unforked[:, 70:], atol=1e-6)


def test_wiped_blocks_hold_zeros_in_all_layers_and_the_others_what_they_held(kernels):
    pool = tiny(kernels, blocks=3)
    text = Text(pool.shape, 4, 64, 1)
    kept = whole(pool, text, [1])
    poison(pool)
    whole(pool, text, [1])
    pool.wipe([0, 2])
    # A row of 64 tokens over a wiped block: all keys and values 0 but the last.
    (last,) = attend_packed(pool, [text], [Span([2], 63, 1)], Flavour(scaling=0.0))
    assert torch.allclose(last[:, 0], text.value[:, :, 63].repeat_interleave(2, 1) / 64, atol=1e-6)
    (again,) = attend_packed(pool, [text], [Span([1], 63, 1)], Flavour())
    assert torch.allclose(again, kept[:, 63:], atol=1e-6)
    pool.wipe([])


def test_many_long_decodes_of_unlike_length_stand_together(kernels):
    # More tokens than are gathered at once.
    pool = tiny(kernels, blocks=340, layers=1)
    lengths = [1000 + 97 * row for row in range(13)]
    texts = [Text(pool.shape, 4, length, row) for row, length in enumerate(lengths)]
    tables, free = [], 0
    for length in lengths:
        tables.append(range(free, free + -(-length // 64)))
        free = tables[-1].stop
    attend_packed(pool, texts, [Span(t, 0, n - 1) for t, n in zip(tables, lengths, strict=True)], Flavour(window=1))
    got = attend_packed(pool, texts, [Span(t, n - 1, 1) for t, n in zip(tables, lengths, strict=True)], Flavour())
    for text, row in zip(texts, got, strict=True):
        wanted = dense_attention(text.query[0], text.key[0], text.value[0], Flavour())[-1]
        assert (row[0, 0] - wanted).abs().max() < 1e-5


def test_a_block_costs_what_it_is_said_to_cost(native):
    for dims in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            shape = KVShape(3, *dims, dtype)
            for kernels in (native, None):
                pool = create_pool(shape, 2, CPU, kernels)
                assert pool.block_bytes == block_bytes(shape, kernels) >= 64 * shape.token_bytes
    even = KVShape(3, 2, 64, 64, torch.bfloat16)
    assert block_bytes(even, native) == 64 * even.token_bytes  # nothing is padded in common shapes


def test_the_pool_follows_the_device_and_the_kernels(native):
    shape = KVShape(1, 2, 8, 8, torch.float32)
    assert isinstance(create_pool(shape, 1, CPU, native), NativeKV)
    assert isinstance(create_pool(shape, 1, CPU, None), TorchKV)
    assert create_pool(shape, 1, CPU, native).exact
    assert not create_pool(shape, 1, CPU, None).exact
    assert isinstance(create_pool(shape, 1, torch.device("meta"), native), TorchKV)


def test_blocks_that_do_not_exist_are_refused_before_memory_is_touched(native):
    pool = tiny(native, blocks=2)
    text = Text(pool.shape, 4, 70, 1)
    for table in ([0, 2], [-1, 0], [1]):
        with pytest.raises(IndexError):
            whole(pool, text, table)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_gathered_attention_is_right_on_cuda(flavour):
    how = FLAVOURS[flavour]
    on_gpu = Flavour(how.scaling, how.window, how.softcap, None if how.sinks is None else how.sinks.cuda())
    shape = KVShape(1, 2, 64, 64, torch.float32)
    pool = create_pool(shape, 8, torch.device("cuda"), None)
    text = Text(shape, 4, 100, 1)
    query, key, value = (tensor[0][None].cuda() for tensor in (text.query, text.key, text.value))
    wanted = dense_attention(text.query[0], text.key[0], text.value[0], how)
    for past, count in ((0, 98), (98, 1), (99, 1)):
        part = slice(past, past + count)
        torch.cuda.set_sync_debug_mode("error")
        step = pool.step([Span([5, 2], past, count)])
        got = step.attend(0, query[:, :, part], key[:, :, part], value[:, :, part], on_gpu)[0]
        torch.cuda.set_sync_debug_mode("default")
        assert (got.cpu() - wanted[part]).abs().max() < 1e-4
