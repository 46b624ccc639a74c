"""The runner's port over a tiny model: steps, draws, scores, blocks, errors of one row and of a whole step."""

from contextlib import contextmanager

import pytest
import torch

from batching.engines.torch import runner as runner_module
from batching.engines.torch.runner import LEAST_TOKENS, TorchRunner, _blocks, kept_at, load_runner
from batching.runner import BLOCK_TOKENS, Draw, Drawn, OutOfMemory, RowError, RowOutput, RowWork, Score
from promptmill.core.errors import ConfigError
from promptmill.core.jobs import SamplingParams
from tests.support.kernels import KERNELS_DIR
from tests.support.packed import text
from tests.support.tiny_models import card, cpu_options, tiny_model
from tests.support.told import Told

pytestmark = pytest.mark.xdist_group("torch_engine")

HOT = {"temperature": 1.5}
BAD_TOKEN = 90


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A model that makes NaN of one token."""
    folder = tmp_path_factory.mktemp("poisoned")
    model = tiny_model("llama", folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = torch.nan
    model.save_pretrained(folder)
    return folder


def runner_of(folder, **options) -> TorchRunner:
    return load_runner(folder, card(folder), cpu_options(folder, **{"threads": 1, "kernels_dir": KERNELS_DIR, **options}))


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request):
    return request.param


@pytest.fixture(scope="module")
def runner(folder, kernels) -> TorchRunner:
    return runner_of(folder, kernels=kernels)


def draw(position=0, choice=0, **sampling):
    return Draw(SamplingParams(max_tokens=8, **{"temperature": 0, **sampling}), seed=3, position=position, choice=choice)


def drawn(runner, *rows) -> list[Drawn]:
    """The first draw of each row of a step."""
    results = runner.step(rows)
    assert all(isinstance(result, RowOutput) for result in results), results
    return [result.drawn[0] for result in results]


# -- steps


def test_rows_without_draws_give_nothing_and_others_a_token(runner):
    silent, speaking = runner.step([RowWork((0,), 0, [5, 6, 7]), RowWork((1,), 0, [9], (draw(),))])
    assert silent == RowOutput()
    assert speaking.scores == ()
    assert 0 <= speaking.drawn[0].token < runner.vocab_size
    assert speaking.drawn[0].logprob is None


def test_a_step_without_any_draw_fills_the_blocks(runner):
    whole = text(70)
    expected = drawn(runner, RowWork((3, 1), 0, whole, (draw(logprobs=0),)))
    assert runner.step([RowWork((0, 2), 0, whole[:30]), RowWork((5, 4), 0, whole[:66])]) == [RowOutput(), RowOutput()]
    for found in drawn(runner, RowWork((0, 2), 30, whole[30:], (draw(logprobs=0),)), RowWork((5, 4), 66, whole[66:], (draw(logprobs=0),))):
        assert found.token == expected[0].token
        assert found.logprob.logprob == pytest.approx(expected[0].logprob.logprob, abs=1e-5)


def test_results_come_in_the_order_of_the_rows(runner):
    texts = [text(length) for length in (9, 1, 30, 4)]
    alone = [drawn(runner, RowWork((0,), 0, ids, (draw(),)))[0] for ids in texts]
    assert len({each.token for each in alone}) > 1
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        assert drawn(runner, *(RowWork((place,), 0, texts[place], (draw(),)) for place in order)) == [alone[place] for place in order]


def test_a_copied_block_goes_on_as_the_first_and_apart_from_it(runner):
    begun = text(31)
    expected = drawn(runner, RowWork((0,), 0, [*begun, 8], (draw(logprobs=0),)))[0]
    runner.step([RowWork((1,), 0, begun)])
    runner.copy(1, 6)
    runner.step([RowWork((1,), 31, [40, 41, 42])])
    found = drawn(runner, RowWork((6,), 31, [8], (draw(logprobs=0),)))[0]
    assert found.token == expected.token
    assert found.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=1e-5)


# -- draws and scores


def test_several_draws_of_one_row_are_those_of_each_alone(runner):
    draws = [draw(choice=choice, **HOT) for choice in range(6)] + [draw(), draw(position=4, top_k=3, **HOT)]
    alone = [drawn(runner, RowWork((0,), 0, text(20), (one,)))[0] for one in draws]
    results = runner.step([RowWork((2,), 0, [9], (draw(),)), RowWork((1,), 0, text(20), tuple(draws)), RowWork((3,), 0, [4])])
    assert list(results[1].drawn) == alone
    assert len({each.token for each in alone[:6]}) > 1


def test_a_sampled_row_repeats_by_seed_position_and_choice_whatever_stands_beside_it(runner):
    numbers = [(position, choice) for position in range(5) for choice in range(3)]
    alone = [drawn(runner, RowWork((0,), 0, text(12), (draw(*at, **HOT),)))[0] for at in numbers]
    for count in (1, 3):
        company = [RowWork((1 + row,), 0, text(5 + row), (draw(4, top_k=3, **HOT),)) for row in range(count)]
        rows = [RowWork((7,), 0, text(12), (draw(*at, **HOT),)) for at in numbers]
        assert [drawn(runner, *company, row)[count] for row in rows] == alone
    assert len({each.token for each in alone}) > 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_draws_and_scores_of_a_row_are_those_of_the_same_steps_logits(folder, kernels, dtype):
    runner = runner_of(folder, kernels=kernels, dtype=dtype)
    ids, past = text(40), 8
    runner.step([RowWork((0,), 0, ids[:past])])
    rest, following = ids[past:], text(32, seed=1)
    scored = RowWork((0,), past, rest, (draw(logprobs=4), draw(logprobs=0, **HOT)), Score(5, following[5:], 6))
    rows = [RowWork((1,), 0, [9, 8]), scored, RowWork((2,), 0, [5], (draw(),))]
    logits = runner.logits(rows)[: len(rest) - 5].float()
    result = runner.step(rows)[1]
    logprobs = logits.log_softmax(-1)
    assert len(result.scores) == len(following) - 5
    for found, target, values, row in zip(result.scores, following[5:], logprobs, logits, strict=True):
        best = sorted(range(runner.vocab_size), key=lambda token, row=row: (-row[token].item(), token))[:6]
        assert [token for token, _ in found.top] == best
        assert [logprob for _, logprob in found.top] == pytest.approx(values[best].tolist(), abs=1e-6)
        assert found.logprob == pytest.approx(values[target].item(), abs=1e-6)
    greedy, sampled = result.drawn
    assert greedy.token == int(logits[-1].argmax())
    assert greedy.logprob.top[0] == (greedy.token, greedy.logprob.logprob)
    assert greedy.logprob.top == result.scores[-1].top[:4]
    assert sampled.logprob.logprob == pytest.approx(logprobs[-1, sampled.token].item(), abs=1e-6)


def test_a_row_may_be_scored_without_a_draw(runner):
    ids = text(9)
    result = runner.step([RowWork((0,), 0, ids[:-1], (), Score(0, ids[1:], 0))])[0]
    assert result.drawn == ()
    assert len(result.scores) == 8
    assert {score.top for score in result.scores} == {()}


DRAW = (draw(),)


@pytest.mark.parametrize(
    ("draws", "score", "kept"),
    [
        ((), None, []),
        (DRAW, None, [3]),
        (DRAW * 2, None, [3]),
        ((), Score(0, [1, 2, 3], 0), [0, 1, 2]),
        (DRAW, Score(0, [1, 2, 3], 0), [0, 1, 2, 3]),
        (DRAW, Score(2, [1, 2], 0), [2, 3]),
        ((), Score(2, [1, 2], 0), [2, 3]),
        (DRAW, Score(1, [], 0), [3]),
        ((), Score(1, [], 0), []),
    ],
)
def test_logits_are_kept_of_scored_tokens_and_then_of_the_last_if_it_draws(draws, score, kept):
    assert kept_at(RowWork((0,), 7, [5, 6, 7, 8], draws, score)) == kept


# -- one row fails


def test_a_row_with_values_that_are_not_numbers_fails_alone_and_its_wiped_blocks_serve_others(poisoned, kernels):
    runner = runner_of(poisoned, kernels=kernels)
    good, after = RowWork((0,), 0, [5, 6], (draw(),)), RowWork((1,), 2, [7], (draw(),))
    expected = runner.step([good])[0]
    results = runner.step(
        [
            RowWork((1,), 0, [BAD_TOKEN, 6], (draw(**HOT),)),
            good,
            RowWork((2,), 0, [6, BAD_TOKEN], (draw(), draw(choice=1, **HOT))),
            RowWork((3,), 0, [BAD_TOKEN, 5], (), Score(0, [5, 6], 1)),
        ]
    )
    for place in (0, 2, 3):
        assert isinstance(results[place], RowError)
        assert (results[place].code, results[place].tainted) == ("non_finite_logits", True)
    assert results[1] == expected
    assert isinstance(runner.step([after])[0], RowError)  # it reads what the bad row left
    runner.wipe([1, 2, 3])
    assert isinstance(runner.step([after])[0], RowOutput)
    assert runner.step([RowWork((block,), 0, [5, 6], (draw(),)) for block in (1, 2, 3)]) == [expected] * 3


# -- a whole step fails


@contextmanager
def failing(runner, fail):
    """The model's last layer fails; those before it have written to the cache by then."""
    hook = runner._model.model.layers[-1].register_forward_pre_hook(lambda *_: fail())
    try:
        yield
    finally:
        hook.remove()


def fill_memory():
    torch.empty(1 << 60, dtype=torch.uint8)


def throw(error):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize(
    "fail", [fill_memory, throw(MemoryError()), throw(torch.OutOfMemoryError())], ids=["allocator", "python", "device"]
)
def test_a_step_without_memory_says_so_and_gives_the_same_when_run_again(runner, fail):
    begun, rows = text(50), [RowWork((1,), 50, [8], (draw(logprobs=1),)), RowWork((0,), 0, text(9), (draw(**HOT),))]
    runner.step([RowWork((1,), 0, begun)])
    expected = runner.step(rows)
    with failing(runner, fail), pytest.raises(OutOfMemory):
        runner.step(rows)
    assert runner.step(rows) == expected


def test_another_error_comes_out_as_it_is_and_leaves_the_runner_usable(runner):
    rows = [RowWork((0,), 0, text(9), (draw(logprobs=1),))]
    expected = runner.step(rows)
    with failing(runner, throw(RuntimeError("shapes cannot be multiplied"))), pytest.raises(RuntimeError, match="cannot be multiplied"):
        runner.step(rows)
    assert runner.step(rows) == expected


# -- blocks and settings


def test_the_blocks_fill_the_budget_and_cost_what_is_said(folder, kernels):
    per_block = runner_of(folder, kernels=kernels).block_bytes
    for budget, blocks in ((5 * per_block, 5), (6 * per_block - 1, 5), (6 * per_block, 6)):
        runner = runner_of(folder, kernels=kernels, kv_cache_bytes=budget)
        assert runner.blocks == blocks
        assert sum(held.nbytes for held in (runner._kv._keys, runner._kv._values)) == blocks * runner.block_bytes


@pytest.mark.parametrize(
    ("budget", "context", "rows", "blocks"),
    [
        (100, 128, 4, 16),  # what four rows can use, and as much again
        (100, 129, 4, 24),
        (9, 128, 4, 9),
        (2, 128, 4, 2),
        (1, BLOCK_TOKENS, 4, 1),
        (LEAST_TOKENS // BLOCK_TOKENS, 8192, 4, 8),
    ],
)
def test_there_are_as_many_blocks_as_the_budget_allows_and_rows_can_use(budget, context, rows, blocks):
    assert _blocks(budget * 1000 + 999, 1000, context, rows) == blocks


@pytest.mark.parametrize(("budget", "context"), [(0, 128), (1, 128), (7, 8192)])
def test_a_cache_that_serves_nobody_is_refused(budget, context):
    with pytest.raises(ConfigError, match=f"holds {budget * BLOCK_TOKENS} tokens"):
        _blocks(budget * 1000 + 999, 1000, context, 4)


def test_a_cache_too_small_for_the_context_is_logged(monkeypatch):
    told = Told(monkeypatch, runner_module)
    _blocks(8000, 1000, 512, 4)
    assert "kv_cache_small" not in str(told)
    _blocks(8000, 1000, 513, 4)
    assert "kv_cache_small" in str(told)


def test_a_budget_that_is_too_small_is_refused_at_load(folder, runner):
    with pytest.raises(ConfigError, match="too few to serve it"):
        runner_of(folder, kernels="torch", kv_cache_bytes=runner.block_bytes)


def test_the_settings_decide_rows_and_the_card_the_rest(folder):
    runner = runner_of(folder, rows=7, reserved_rows=2)
    assert (runner.rows, runner.blocks) == (7, 2 * 9 * 2)
    assert (runner.context_length, runner.vocab_size) == (128, 97)
    assert runner_of(folder, rows=0).rows == 32


def test_native_kernels_that_are_demanded_and_cannot_be_built_are_an_error(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    with pytest.raises(ConfigError, match="C kernels cannot be used"):
        runner_of(folder, kernels="native", kernels_dir=tmp_path)
    assert not runner_of(folder, kernels="auto", kernels_dir=tmp_path).caps.batch_invariant


def test_equal_bits_are_promised_with_the_native_kernels_alone(runner, kernels):
    assert runner.caps.batch_invariant == (kernels == "native")


def test_bfloat16_runs_and_takes_half_the_bytes(folder, runner, kernels):
    half = runner_of(folder, kernels=kernels, dtype="bfloat16")
    assert half.block_bytes * 2 == runner.block_bytes
    assert half.step([RowWork((0,), 0, [5, 6], (draw(),))])[0].drawn
