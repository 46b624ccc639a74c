"""The sampler, step by step and beside the slow reference that is written from its definition."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.engines.torch.candidates import best, best_by_blocks, padded
from batching.engines.torch.native import load_native
from batching.engines.torch.sampler import sample as sample_with
from batching.engines.torch.sampler import score
from batching.grammar import GrammarError
from batching.history import History
from batching.runner import Draw, Drawn, RowError
from promptmill.core.jobs import SamplingParams
from tests.support import reference_sampler as reference
from tests.support.kernels import KERNELS_DIR

SIZES = [1, 2, 5, 31, 33, 40, 255, 256, 257, 700, 3001]
INF = float("inf")


class Using:
    """The kernels that ``sample`` runs with."""

    kernels = None


def sample(logits, rows, draws):
    return sample_with(logits, rows, draws, Using.kernels if logits.device.type == "cpu" else None)


@pytest.fixture(scope="module", params=["torch", "native"], autouse=True)
def kernels(request):
    Using.kernels = load_native(KERNELS_DIR) if request.param == "native" else None
    assert (Using.kernels is not None) == (request.param == "native")
    yield
    Using.kernels = None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(banned=(), mask=None, history=None, candidates=0, seed=0, position=0, choice=0, **params):
    mask_of = None if mask is None else (lambda: mask)
    return Draw(SamplingParams(max_tokens=1, **params), seed, position, choice, tuple(banned), mask_of, history, candidates)


def words(size, allowed):
    """A grammar's mask; nobody may write to it."""
    bits = np.zeros(-(-size // 32) * 32, bool)
    bits[list(allowed)] = True
    mask = np.packbits(bits, bitorder="little").view(np.uint32)
    mask.flags.writeable = False
    return mask


def greedy(logits, **more):
    """The token that is drawn at temperature 0, or the error's code."""
    (result,) = sample(torch.tensor([logits]), [0], [draw(temperature=0.0, **more)])
    return result.token if isinstance(result, Drawn) else result.code


def possible(logits, **more):
    """The tokens that 300 seeds draw."""
    results = sample(torch.tensor([logits]), [0] * 300, [draw(seed=seed, **more) for seed in range(300)])
    return {result.token for result in results}


# --- against the reference


@st.composite
def rows(drawer, size):
    rng = np.random.default_rng(drawer(st.integers(0, 2**32 - 1)))
    kind = drawer(st.sampled_from(["normal", "ties", "flat", "masked", "peaked", "low", "bad"]))
    values = rng.normal(0, 3, size)
    if kind == "ties":
        values = rng.integers(-2, 3, size) / 2
    elif kind == "flat":
        values = np.zeros(size)
    elif kind == "masked":
        values = np.where(rng.random(size) < 0.8, -INF, values)
    elif kind == "peaked":
        values[rng.integers(size)] = 20.0
    elif kind == "low":
        values *= 0.05
    elif kind == "bad":
        values[rng.integers(size)] = rng.choice([np.nan, INF])
    return values.astype(np.float32)


@st.composite
def draws(drawer, size):
    ids = st.lists(st.integers(0, size - 1), max_size=6, unique=True)
    history = st.builds(History, st.lists(st.integers(0, size - 1), max_size=9), st.lists(st.integers(0, size - 1), max_size=9))
    allowed = drawer(st.none() | st.lists(st.integers(0, size - 1), min_size=1, max_size=40) | st.just(range(size)))
    biased = drawer(ids)
    return draw(
        banned=drawer(st.just(()) | ids | st.just(range(size))),
        mask=None if allowed is None else words(size, allowed),
        history=drawer(st.none() | history),
        candidates=drawer(st.sampled_from([0, 0, 0, 0, 1, 8])),
        seed=drawer(st.integers(-(2**63), 2**63 - 1)),
        position=drawer(st.integers(0, 1000)),
        choice=drawer(st.integers(0, 3)),
        temperature=drawer(st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.0, 5.0])),
        top_k=drawer(st.sampled_from([0, 0, 1, 2, 50, 255, 256, 257, 300, 10_000])),
        # No round fractions, where a flat row's mass meets top_p exactly and rounding decides.
        top_p=drawer(st.sampled_from([1.0, 1.0, 0.0123, 0.3337, 0.9013, 0.9997])),
        min_p=drawer(st.sampled_from([0.0, 0.0, 0.0513, 0.37, 1.0])),
        repetition_penalty=drawer(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=drawer(st.sampled_from([0.0, 0.613, -1.0])),
        frequency_penalty=drawer(st.sampled_from([0.0, 0.317, -0.5])),
        logit_bias=tuple((token, drawer(st.sampled_from([-100.0, 5.25, -3.0]))) for token in sorted(biased)),
        logprobs=drawer(st.sampled_from([None, 0, 3, 20])),
    )


@st.composite
def steps(drawer):
    size = drawer(st.sampled_from(SIZES))
    logits = [drawer(rows(size)) for _ in range(drawer(st.integers(1, 4)))]
    chosen = drawer(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=6))
    return np.stack(logits), chosen, [drawer(draws(size)) for _ in chosen], drawer(st.sampled_from([torch.float32, torch.bfloat16]))


def agree(logits, item, result):
    if isinstance(result, RowError) or not item.candidates:
        want = reference.expected(logits, item)
        assert result.code == want.error if isinstance(result, RowError) else result.token in want.tokens
    else:
        want = reference.best(logits, item)
        assert [token for token, _ in result.candidates] == [token for token, _ in want]
        assert [logprob for _, logprob in result.candidates] == pytest.approx([logprob for _, logprob in want], abs=1e-4)
    if isinstance(result, Drawn) and item.sampling.logprobs is not None:
        pairs, want = result.logprob.top, reference.top(logits, item.sampling.logprobs)
        assert [token for token, _ in pairs] == [token for token, _ in want]
        assert [logprob for _, logprob in pairs] == pytest.approx([logprob for _, logprob in want], abs=1e-4)
        own = max(reference.log_softmax(logits)[result.token], reference.FLOOR)
        assert result.logprob.logprob == pytest.approx(own, abs=1e-4)
        assert dict(pairs).get(result.token, result.logprob.logprob) == result.logprob.logprob


@settings(max_examples=300, deadline=None)
@given(steps())
def test_draws_are_what_the_definition_says(step):
    logits, chosen, items, dtype = step
    tensor = torch.from_numpy(logits).to(dtype)
    before = tensor.clone()
    for row, item, result in zip(chosen, items, sample(tensor, chosen, items), strict=True):
        agree(tensor[row].float().numpy(), item, result)
        assert result == sample(tensor[row : row + 1], [0], [item])[0]
    assert torch.equal(tensor.nan_to_num(7), before.nan_to_num(7))  # others read the logits too


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SIZES).flatmap(rows), st.integers(1, 400))
def test_the_gpus_way_to_the_best_is_the_cpus(logits, count):
    if not np.isnan(logits).any():
        batch = padded(torch.from_numpy(logits)[None], [0])
        count = min(count, len(logits))
        assert best_by_blocks(batch, count)[0].tolist() == best(batch, count)[1][0].tolist() == reference.in_order(logits)[:count]


# --- the order of the steps: each test fails if its two are swapped


def test_logprobs_are_the_models_own_before_anything_else():
    item = draw(banned=[0], temperature=0.0, logprobs=2, logit_bias=((2, 100.0),), history=History([1], [1]), presence_penalty=2.0)
    (result,) = sample(torch.tensor([[3.0, 2.0, 1.0]]), [0], [item])
    raw = torch.tensor([3.0, 2.0, 1.0]).log_softmax(-1).tolist()
    assert result.token == 2
    assert result.logprob.logprob == pytest.approx(raw[2], abs=1e-6)
    assert result.logprob.top == ((0, pytest.approx(raw[0], abs=1e-6)), (1, pytest.approx(raw[1], abs=1e-6)))


def test_no_bias_brings_a_banned_token_back():
    assert greedy([0.0, 1.0], banned=[1], logit_bias=((1, 100.0),)) == 0


def test_the_repetition_penalty_divides_what_the_bias_made():
    # 1 + 4 = 5, halved 2.5: under 3. The other way round: 0.5 + 4, over 3.
    assert greedy([1.0, 3.0], logit_bias=((0, 4.0),), history=History([0]), repetition_penalty=2.0) == 1


def test_presence_is_subtracted_from_what_repetition_left():
    # 4 / 2 - 2 = 0: under 0.5. The other way round: (4 - 2) / 2 = 1, over it.
    assert greedy([4.0, 0.5], history=History([], [0]), repetition_penalty=2.0, presence_penalty=2.0) == 1


def test_no_penalty_lifts_a_token_over_the_mask():
    assert greedy([0.0, 1.0], mask=words(2, [0]), history=History([], [1]), presence_penalty=-2.0) == 0


def test_the_ban_gives_way_to_a_mask_that_leaves_only_banned_tokens():
    assert greedy([5.0, 1.0, 2.0], banned=[1, 2], mask=words(3, [1, 2])) == 2
    assert greedy([5.0, 1.0, 2.0], banned=[2], mask=words(3, [1, 2])) == 1


def test_penalties_still_count_where_the_ban_gives_way():
    assert greedy([5.0, 1.0, 2.0], banned=[1, 2], mask=words(3, [1, 2]), history=History([], [2]), presence_penalty=2.0) == 1


def test_temperature_comes_after_bias_and_penalties():
    # 1 + 1 at temperature 0.01: certain. Divided first it would be 100 + 1 against 101.5.
    assert possible([1.0, 1.015], logit_bias=((0, 1.0),), temperature=0.01) == {0}


def test_top_p_counts_the_mass_under_the_temperature():
    assert possible([1.0, 0.0], temperature=5.0, top_p=0.7) == {0, 1}
    assert possible([1.0, 0.0], temperature=1.0, top_p=0.7) == {0}


def test_top_p_is_a_part_of_what_top_k_leaves():
    # 0.4 of all, but 0.67 of the best two.
    logits = np.log([0.4, 0.2, 0.2, 0.2]).tolist()
    assert possible(logits, top_k=2, top_p=0.6) == {0}
    assert possible(logits, top_p=0.55) == {0, 1}


def test_min_p_comes_after_top_p():
    # Before it, 0.5 and 0.3 would be all, 0.625 of it the first alone; after it the second is in.
    assert possible(np.log([0.5, 0.3, 0.2]).tolist(), top_p=0.6, min_p=0.5) == {0, 1}


def test_min_p_compares_with_the_best_under_the_temperature():
    assert possible([2.0, 1.0], min_p=0.5) == {0}
    assert possible([2.0, 1.0], min_p=0.5, temperature=2.0) == {0, 1}


# --- ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_of_equal_logits(dtype):
    logits = torch.zeros(3, 5000, dtype=dtype)
    logits[0, [4999, 17, 400]] = 2.0
    logits[1, 4999] = 1.0
    logits[2, 3] = -0.0
    results = sample(logits, [0, 1, 2], [draw(temperature=0.0)] * 3)
    assert [result.token for result in results] == [17, 4999, 0]


def test_equal_logits_leave_by_id():
    assert possible([1.0] * 600, top_k=3) == {0, 1, 2}
    assert possible([-0.0, 0.0, -0.0], top_k=2) == {0, 1}


def test_alternatives_and_beams_are_ordered_by_logit_then_by_id():
    logits = torch.zeros(1, 700)
    logits[0, [650, 300, 10]] = 1.0
    listed, beams = sample(logits, [0, 0], [draw(temperature=0.0, logprobs=5), draw(temperature=0.0, candidates=5)])
    assert [token for token, _ in listed.logprob.top] == [token for token, _ in beams.candidates] == [10, 300, 650, 0, 1]


# --- rows on their own


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"logprobs": 3}, {"candidates": 4}, {"mask": words(300, [5])}])
def test_only_the_row_that_is_not_finite_fails(bad, kind):
    logits = torch.zeros(4, 300)
    logits[1, 7] = bad
    logits[2, :] = -INF
    logits[3, :] = -INF
    logits[3, 5] = 0.0
    results = sample(logits, [0, 1, 2, 3], [draw(**kind)] * 4)
    assert [isinstance(result, RowError) for result in results] == [False, True, True, False]
    assert {(result.code, result.tainted) for result in results[1:3]} == {("non_finite_logits", True)}
    assert results[3].token == 5


@pytest.mark.parametrize("size", [700, 5003, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_bit_for_bit_the_same_alone_and_beside_others(size, dtype, threads):
    logits = (torch.randn(13, size, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
    history = History(range(30), [3, 3, 4])
    kinds = [
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 20},
        {"logprobs": 2},
        {"temperature": 0.0, "logprobs": 3},
        {"top_k": 400, "temperature": 1.5},
        {"min_p": 0.01, "temperature": 2.0},
        {"temperature": 4.0, "history": history, "repetition_penalty": 1.2, "logprobs": 0},
        {"candidates": 8, "temperature": 0.0},
    ]
    items = [draw(seed=row, position=row, **kinds[row % len(kinds)]) for row in range(13)]
    together = sample(logits, range(13), items)
    torch.set_num_threads(threads)
    assert together == [sample(logits[row : row + 1], [0], [item])[0] for row, item in enumerate(items)]
    assert together[::-1] == sample(logits, range(12, -1, -1), items[::-1])
    assert score(logits, list(range(13)), 4) == [score(logits[row : row + 1], [row], 4)[0] for row in range(13)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_change_nothing(dtype):
    native = load_native(KERNELS_DIR)
    assert native is not None
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(3)).to(dtype) * 4
    logits[1, 7], logits[2, 9], logits[3] = float("nan"), INF, -INF
    items = [draw(temperature=0.0)] * 6 + [draw(seed=3)] * 6 + [draw(seed=4, top_k=5, banned=[3])] * 6 + [draw(seed=5, top_p=0.3)] * 6
    assert sample_with(logits, [*range(6)] * 4, items, native) == sample_with(logits, [*range(6)] * 4, items)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_the_kernels_shortlist_is_in_exact_order(size, dtype):
    """Ties, negative zeros and impossible tokens included."""
    native = load_native(KERNELS_DIR)
    assert native is not None
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(5, size, generator=generator) * 2).round(decimals=1).to(dtype)
    logits[1] = -0.0
    logits[1, ::2] = 0.0
    logits[2, ::3] = -INF
    logits[3] = -INF
    for count in {1, min(size, 7), min(size, 256), size}:
        values, ids, mass = native.shortlist(logits, count, [0.7, 0.0, 1.5, 1.0, 0.01])
        for row in range(5):
            assert ids[row].tolist() == reference.in_order(logits[row].float().numpy())[:count]
            assert torch.equal(values[row], logits[row].float()[ids[row]])
        for row, temperature in ((0, 0.7), (2, 1.5), (4, 0.01)):
            if (best_value := logits[row].max()) > -INF:
                wanted = ((logits[row].double() - best_value.double()) / temperature).exp().sum()
                assert float(mass[row]) == pytest.approx(float(wanted), rel=1e-5)


def test_choices_of_one_row_draw_on_their_own():
    results = sample(torch.zeros(1, 5000), [0] * 64, [draw(choice=choice) for choice in range(64)])
    assert len({result.token for result in results}) > 50


# --- what a request cannot have


def test_a_grammar_that_fails_fails_its_row_alone():
    def broken():
        raise GrammarError("the grammar is too complex")

    bad = Draw(SamplingParams(max_tokens=1, temperature=0.0), 0, 0, mask=broken)
    first, second, third = sample(torch.tensor([[0.0, 1.0]]), [0, 0, 0], [draw(temperature=0.0), bad, draw(banned=[1], temperature=0.0)])
    assert (first.token, third.token) == (1, 0)
    assert second == RowError("grammar_error", "the grammar is too complex")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_left_the_row_says_why(temperature):
    logits = torch.tensor([[0.0, -INF, 2.0]])
    dead = draw(mask=words(3, [1]), temperature=temperature)
    shut = draw(banned=[0, 1, 2], temperature=temperature)
    assert [result.code for result in sample(logits, [0, 0], [dead, shut])] == ["grammar_dead_end", "no_token_allowed"]


def test_a_beam_that_cannot_go_on_has_no_candidates():
    assert sample(torch.zeros(1, 3), [0], [draw(banned=[0, 1, 2], candidates=4)]) == [Drawn(0)]


def test_a_beam_gets_what_is_possible():
    (result,) = sample(torch.tensor([[0.0, -INF, 2.0]]), [0], [draw(candidates=4)])
    assert [token for token, _ in result.candidates] == [2, 0]
    assert result.token == 2


def test_extreme_logits_and_parameters_draw_what_they_must():
    logits = [3e38, -3e38, 2.9e38, 0.0]
    assert possible(logits) == possible(logits, temperature=1e-5, top_p=1e-9) == {0}
    assert possible([0.0, 1e-3], temperature=2.0, min_p=1.0) == {1}
    assert possible([0.0, 0.0], logit_bias=((0, -100.0),)) == {1}
    assert greedy(logits, history=History([0]), repetition_penalty=10.0) == 2


# --- the distribution


def test_draws_follow_the_distribution():
    """Chi-square with 9 degrees of freedom: over 27.9 once in a thousand seeds; this seed is fixed."""
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(1))
    for temperature in (0.5, 1.0, 2.0):
        items = [draw(seed=42, position=position, temperature=temperature) for position in range(5000)]
        counts = np.bincount([result.token for result in sample(logits, [0] * 5000, items)], minlength=10)
        wanted = 5000 * torch.softmax(logits[0].double() / temperature, -1).numpy()
        assert ((counts - wanted) ** 2 / wanted).sum() < 27.9


# --- scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_log_softmax_of_the_float32_logits(dtype):
    logits = (torch.randn(130, 1000, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    targets = [(37 * row) % 1000 for row in range(130)]
    want = logits.float().log_softmax(-1)
    for row, item in enumerate(score(logits, targets, 5)):
        assert item.logprob == pytest.approx(want[row, targets[row]].item(), abs=1e-4)
        assert [token for token, _ in item.top] == reference.in_order(logits[row].float().numpy())[:5]
    assert all(not item.top for item in score(logits, targets, 0))
    assert score(logits[:0], [], 3) == []


def test_a_text_with_a_row_that_is_not_finite_fails():
    logits = torch.zeros(70, 50)
    logits[69, 3] = float("nan")
    result = score(logits, [0] * 70, 2)
    assert isinstance(result, RowError)
    assert (result.code, result.tainted) == ("non_finite_logits", True)


def test_an_impossible_token_scores_a_number():
    (item,) = score(torch.tensor([[0.0, -INF]]), [1], 2)
    assert (item.logprob, item.top) == (-9999.0, ((0, 0.0), (1, -9999.0)))


# --- the same on a GPU


@pytest.mark.cuda
@settings(max_examples=100, deadline=None)
@given(steps())
def test_draws_on_a_gpu_are_what_the_definition_says(step):
    logits, chosen, items, dtype = step
    tensor = torch.from_numpy(logits).to("cuda", dtype)
    for row, item, result in zip(chosen, items, sample(tensor, chosen, items), strict=True):
        agree(tensor[row].float().cpu().numpy(), item, result)


@pytest.mark.cuda
def test_rows_on_a_gpu_do_not_depend_on_each_other():
    logits = torch.randn(16, 49152, generator=torch.Generator().manual_seed(3)).cuda() * 2
    items = [draw(seed=row, temperature=0.8, top_p=0.95, logprobs=5) for row in range(16)]
    assert sample(logits, range(16), items) == [sample(logits[row : row + 1], [0], [item])[0] for row, item in enumerate(items)]
