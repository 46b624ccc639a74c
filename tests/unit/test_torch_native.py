"""The C kernels: right against torch, and the same bits whatever stands beside a row."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batching.engines.torch.attention import Flavour, Span
from batching.engines.torch.device import cpu_flags
from batching.engines.torch.kv import KVShape, create_pool
from batching.engines.torch.native import Native, load_native, loading
from batching.engines.torch.native.build import build, default_folder
from batching.engines.torch.native.loading import openmp_runtimes
from batching.engines.torch.native.probe import disagreement
from batching.engines.torch.native.tiling import cut
from tests.support.kernels import KERNELS_DIR, Text, attend_packed, poison
from tests.support.told import Told

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
UNOPTIMISED = ("-march=native", "-O0")  # builds in a third of the time


@pytest.fixture(scope="module")
def native() -> Native:
    kernels = load_native(KERNELS_DIR)
    assert kernels is not None
    return kernels


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


# --- rows ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 576, 2048 + 5])
def test_rms_norm_rounds_where_llama_does(native, width, dtype):
    x, weight = draw(1, 5, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = weight * normed.to(dtype)
    got = native.rms_norm(x, weight, 1e-6)
    # One unit in the last place: the mean is summed in another order.
    assert torch.allclose(got.float(), wanted.float(), rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=0)
    if dtype is torch.bfloat16:
        assert (got == wanted).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_gemma_multiplies_by_one_plus_the_weight_before_it_rounds(native, dtype):
    x, weight = draw(3, 40, dtype=dtype), draw(40, dtype=dtype, seed=1)
    wide = x.float()
    wanted = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())).to(dtype)
    got = native.rms_norm(x, weight, 1e-6, one_plus=True)
    assert torch.allclose(got.float(), wanted.float(), rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_reads_strided_rows_and_may_write_where_it_reads(native, dtype):
    wide, weight = draw(6, 50, dtype=dtype), draw(20, dtype=dtype, seed=1)
    rows = wide[:, 10:30]
    wanted = native.rms_norm(rows.contiguous(), weight, 1e-5)
    assert torch.equal(native.rms_norm(rows, weight, 1e-5), wanted)
    own = rows.contiguous()
    assert native.rms_norm(own, weight, 1e-5, own) is own
    assert torch.equal(own, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 17, 1536, 99])
def test_silu_mul_equals_torch(native, width, dtype):
    gate, up = draw(7, width, dtype=dtype, scale=4), draw(7, width, dtype=dtype, seed=1)
    wanted = F.silu(gate) * up
    got = native.silu_mul(gate, up)
    assert torch.allclose(got.float(), wanted.float(), rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-30)


def test_silu_mul_reads_the_halves_of_a_fused_product(native):
    fused = draw(1, 9, 2 * 24, dtype=torch.float32)
    gate, up = fused.chunk(2, -1)
    assert torch.equal(native.silu_mul(gate, up), native.silu_mul(gate.contiguous(), up.contiguous()))


def test_silu_mul_holds_at_the_ends_of_the_range(native):
    gate = torch.tensor([[-1e30, -200.0, -88.5, -87.0, 0.0, 87.0, 200.0, 1e30, float("nan")]])
    got = native.silu_mul(gate, torch.ones_like(gate))
    assert torch.allclose(got[:, :-1], F.silu(gate)[:, :-1], rtol=1e-6, atol=1e-6)
    assert got[0, -1].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_argmax_is_the_first_of_the_greatest_and_minus_one_without_numbers(native, dtype, data):
    width = data.draw(st.integers(1, 70))
    few = st.sampled_from([-1.0, 0.0, -0.0, 1.0, 2.0, float("-inf"), 3.0e38])
    rows = data.draw(st.lists(st.lists(few, min_size=width, max_size=width), min_size=1, max_size=3))
    spoilt = data.draw(st.sampled_from([None, float("nan"), float("inf")]))
    x = torch.tensor(rows).to(dtype)
    wanted = [row.index(max(row)) for row in x.tolist()]
    if spoilt is not None:
        x[0, data.draw(st.integers(0, width - 1))] = spoilt
        wanted[0] = -1
    assert native.argmax(x).tolist() == wanted


def test_argmax_finds_ties_over_a_whole_vocabulary(native):
    logits = draw(3, 49152, dtype=torch.bfloat16)
    logits[0, [31_000, 40_001]] = 9.0
    logits[1, [49_151]] = 9.0
    logits[2, [16, 0, 49_151]] = 9.0
    assert native.argmax(logits).tolist() == [31_000, 49_151, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_row_kernels_give_a_row_the_same_bits_in_any_company(native, dtype, threads):
    torch.set_num_threads(threads)
    x, other, weight = draw(64, 333, dtype=dtype), draw(64, 333, dtype=dtype, seed=1), draw(333, dtype=dtype, seed=2)
    normed, gated = native.rms_norm(x, weight, 1e-5), native.silu_mul(x, other)
    for start, stop in ((0, 1), (5, 7), (13, 64)):
        assert torch.equal(native.rms_norm(x[start:stop], weight, 1e-5), normed[start:stop])
        assert torch.equal(native.silu_mul(x[start:stop], other[start:stop]), gated[start:stop])


def test_kernels_refuse_what_they_cannot_read(native):
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="float16"):
        native.rms_norm(x.half(), torch.ones(8).half(), 1e-5)
    with pytest.raises(ValueError, match="bfloat16"):
        native.rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(ValueError, match="weight"):
        native.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="strides"):
        native.silu_mul(x.t(), x.t())
    with pytest.raises(ValueError, match="result"):
        native.silu_mul(x, x, torch.zeros(2, 7))
    step = create_pool(KVShape(1, 2, 8, 8, torch.float32), 1, CPU, native).step([Span([0], 0, 2)])
    with pytest.raises(ValueError, match="is due"):
        step.attend(0, torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 7), torch.zeros(1, 2, 2, 8), Flavour())


# --- attention: the same bits ---


@st.composite
def situations(draw):
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (5, 5), (9, 3), (6, 1)]))
    dims = draw(st.sampled_from([(8, 8), (16, 16), (64, 64), (24, 40), (7, 9), (80, 16)]))
    shape = KVShape(1, kv_heads, *dims, draw(st.sampled_from(DTYPES)))
    window = draw(st.sampled_from([None, None, 1, 5, 32, 65]))
    softcap = draw(st.sampled_from([None, 2.0]))
    sinks = torch.linspace(-1, 2, heads).to(shape.dtype) if draw(st.booleans()) else None
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    return shape, heads, Flavour(None, window, softcap, sinks), lengths


@given(situations(), st.randoms(use_true_random=False), st.sampled_from([1, 2]))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_has_the_same_bits_alone_in_company_in_any_chunks_blocks_and_threads(native, situation, random, threads):
    shape, heads, flavour, lengths = situation
    texts = [Text(shape, heads, length, seed) for seed, length in enumerate(lengths)]
    torch.set_num_threads(1)
    wanted = []
    for text in texts:  # alone, in one piece
        lone = create_pool(shape, 4, CPU, native)
        wanted.append(attend_packed(lone, [text], [Span([0, 1, 2, 3], 0, text.tokens)], flavour)[0])

    torch.set_num_threads(threads)
    pool = create_pool(shape, 24, CPU, native)
    poison(pool)
    free = random.sample(range(24), 24)
    tables = [[free.pop() for _ in range(0, text.tokens, 64)] for text in texts]
    parts = [[] for _ in texts]
    past = [0] * len(texts)
    while rows := [row for row, text in enumerate(texts) if past[row] < text.tokens]:
        rows = random.sample(rows, random.randint(1, len(rows)))
        spans = []
        for row in rows:
            if random.random() < 0.05 and len(free) >= 4:  # paused, and computed again into other blocks
                tables[row], parts[row], past[row] = [free.pop() for _ in tables[row]], [], 0
            count = min(random.choice([1, 1, 2, 15, 37, 64, 130]), texts[row].tokens - past[row])
            spans.append(Span(tables[row], past[row], count))
        for row, span, got in zip(rows, spans, attend_packed(pool, [texts[row] for row in rows], spans, flavour), strict=True):
            parts[row].append(got)
            past[row] += span.count
    for got, want in zip(parts, wanted, strict=True):
        assert torch.equal(bits(torch.cat(got, 1)), bits(want))


def test_contiguous_and_strided_queries_give_the_same_bits(native):
    shape = KVShape(1, 2, 24, 24, torch.float32)
    pool, text = create_pool(shape, 2, CPU, native), Text(shape, 4, 70, 1)
    strided = attend_packed(pool, [text], [Span([0, 1], 0, 70)], Flavour())[0]
    straight = pool.step([Span([1, 0], 0, 70)]).attend(0, text.query[:1][0][None], text.key[0][None], text.value[0][None], Flavour())
    assert torch.equal(strided, straight)


def test_a_model_in_another_number_type_gets_its_own_back(native):
    shape = KVShape(1, 2, 16, 16, torch.bfloat16)
    pool, text = create_pool(shape, 1, CPU, native), Text(shape, 4, 9, 1)
    (wanted,) = attend_packed(pool, [text], [Span([0], 0, 9)], Flavour())
    wide = [tensor[0][None].float() for tensor in (text.query, text.key, text.value)]
    got = pool.step([Span([0], 0, 9)]).attend(0, *wide, Flavour(sinks=None))
    assert got.dtype is torch.float32
    assert torch.equal(got.bfloat16(), wanted)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 150)), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4, 5, 8, 32, 71]))
def test_tiles_cover_each_token_once_within_blocks_longest_first(rows, group):
    spans = [Span(range(10 * n, 10 * n + 8), past, count) for n, (past, count) in enumerate(rows)]
    tiles, table = cut(spans, group)
    covered = {}
    for begin, position, packed, count in tiles.tolist():
        assert position // 64 == (position + count - 1) // 64
        assert count == 1 or count * group <= 64
        for index in range(count):
            covered[packed + index] = (table[begin], position + index)
    assert covered == dict(enumerate((span.table[0], span.past + n) for span in spans for n in range(span.count)))
    costs = [(position + count) * count for _, position, _, count in tiles.tolist()]
    assert costs == sorted(costs, reverse=True)


# --- building and loading ---


def test_kernels_run_on_the_threads_of_torch(native):
    assert [path.parent.name for path in openmp_runtimes()] == ["lib"]
    assert "torch" in openmp_runtimes()[0].parts


@pytest.mark.parametrize("target", ["-march=x86-64-v3", "-march=x86-64"])
def test_kernels_are_right_on_lesser_cpus_too(target):
    if "avx2" not in cpu_flags():
        pytest.skip("this CPU runs none of them")
    lesser = Native(build(KERNELS_DIR, openmp_runtimes()[0], (target,)))
    assert disagreement(lesser) is None
    shape = KVShape(1, 3, 40, 40, torch.bfloat16)
    text = Text(shape, 9, 150, 1)
    whole = attend_packed(create_pool(shape, 3, CPU, lesser), [text], [Span([0, 1, 2], 0, 150)], Flavour(window=70))[0]
    pool = create_pool(shape, 3, CPU, lesser)
    poison(pool)
    parts = [attend_packed(pool, [text], [Span([2, 0, 1], past, 15)], Flavour(window=70))[0] for past in range(0, 150, 15)]
    assert torch.equal(bits(torch.cat(parts, 1)), bits(whole))


def test_a_library_is_built_once_and_under_another_name_for_other_flags(tmp_path):
    runtime = openmp_runtimes()[0]
    first = build(tmp_path, runtime, UNOPTIMISED)
    made = first.stat().st_mtime_ns
    assert build(tmp_path, runtime, UNOPTIMISED) == first
    assert first.stat().st_mtime_ns == made
    assert build(tmp_path, runtime, (*UNOPTIMISED, "-DOTHER")) != first
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".so", ".so"]  # and nothing else is left


def test_builders_side_by_side_end_with_one_library(tmp_path):
    runtime, built = openmp_runtimes()[0], []
    threads = [threading.Thread(target=lambda: built.append(build(tmp_path, runtime, UNOPTIMISED))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(built) == 3
    assert len(set(built)) == 1
    assert disagreement(Native(built[0])) is None


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch, loading)


def test_without_a_compiler_there_are_no_kernels_and_the_log_says_so(tmp_path, monkeypatch, told):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    assert load_native(tmp_path / "kernels") is None
    assert "no C compiler" in str(told)


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch, told):
    monkeypatch.setenv("CC", compiler(tmp_path, '[ "$1" = --version ] && exit 0; echo "x.c:1: error: it is Monday" >&2; exit 1'))
    assert load_native(tmp_path / "kernels") is None
    assert "it is Monday" in str(told)


def test_a_library_without_the_kernels_is_not_used(tmp_path, monkeypatch, told):
    real = os.environ.get("CC", "cc")
    empty = f'while [ "$1" != -o ]; do shift; done; echo "int x;" | {real} -shared -x c - -o "$2"'
    script = f'[ "$1" = --version ] && exit 0; {empty}'
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    assert load_native(tmp_path / "kernels") is None
    assert "no library of kernels" in str(told)


def test_wrong_kernels_are_not_used(tmp_path, monkeypatch, told):
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -Dsqrtf=fabsf")  # a norm that forgets the root
    assert load_native(tmp_path / "kernels") is None
    assert "rms_norm kernel in torch.float32 is off by" in str(told)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, told):
    (tmp_path / "file").touch()
    assert load_native(tmp_path / "file" / "kernels") is None
    assert "cannot write to" in str(told)


def test_kernels_are_kept_in_the_users_cache_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "promptmill" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "promptmill" / "kernels"
