"""The runner's port over a tiny model: slots, bytes, draws, errors of one row."""

import pytest
import torch

from batching.engines.torch.runner import TorchRunner, load_runner
from batching.runner import Draw, RowError, RowWork
from promptmill.core.jobs import SamplingParams
from tests.support.tiny_models import card, cpu_options, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama", folder)
    return folder


@pytest.fixture
def runner(folder) -> TorchRunner:
    return load_runner(folder, card(folder), cpu_options(folder))


def draw(position=0, **sampling):
    return Draw(SamplingParams(max_tokens=8, **{"temperature": 0, **sampling}), seed=3, position=position)


def test_rows_without_a_draw_give_nothing_and_others_a_token(runner):
    runner.open(0, 20)
    runner.open(1, 20)
    results = runner.step([RowWork(0, 0, [5, 6, 7], None), RowWork(1, 0, [9], draw())])
    assert results[0] is None
    assert isinstance(results[1], int)
    assert 0 <= results[1] < runner.vocab_size


def test_a_step_without_any_draw_fills_the_slots(runner):
    runner.open(0, 20)
    runner.open(1, 20)
    assert runner.step([RowWork(0, 0, [5, 6, 7], None)]) == [None]
    continued = runner.step([RowWork(0, 3, [8], draw())])
    assert continued == runner.step([RowWork(1, 0, [5, 6, 7, 8], draw())])


def test_a_slot_that_is_opened_again_knows_nothing_of_its_last_row(runner):
    runner.open(0, 40)
    runner.step([RowWork(0, 0, list(range(40)), None)])
    runner.close(0)
    runner.open(0, 40)
    runner.open(1, 40)
    assert runner.step([RowWork(0, 0, [4, 9, 16], draw())]) == runner.step([RowWork(1, 0, [4, 9, 16], draw())])


def test_kv_bytes_is_what_an_open_slot_holds(runner):
    for tokens in (1, 63, 64, 65, 128):
        runner.open(0, tokens)
        assert runner._kv.bytes_held == runner.kv_bytes(tokens)
        runner.close(0)
    # 2 layers x 2 kv heads x (8 + 8) x 4 bytes, in blocks of 64 tokens
    assert runner.kv_bytes(1) == 64 * 256
    assert runner.kv_bytes(65) == 128 * 256
    assert runner._kv.bytes_held == 0


def test_a_row_may_not_outgrow_its_slot(runner):
    runner.open(0, 64)
    with pytest.raises(RuntimeError):
        runner.step([RowWork(0, 0, [1] * 65, draw())])


def test_a_slot_is_opened_once(runner):
    runner.open(0, 8)
    with pytest.raises(RuntimeError, match="slot 0 is open already"):
        runner.open(0, 8)


def test_a_sampled_row_repeats_by_seed_and_position_whatever_stands_beside_it(runner):
    for slot in range(3):
        runner.open(slot, 20)
    hot = {"temperature": 1.5}
    alone = [runner.step([RowWork(0, 0, [5, 6], draw(position, **hot))])[0] for position in range(6)]
    beside = [
        runner.step(
            [RowWork(1, 0, [9], draw()), RowWork(2, 0, [5, 6], draw(position, **hot)), RowWork(0, 0, [3], draw(4, top_k=3, **hot))]
        )[1]
        for position in range(6)
    ]
    assert alone == beside
    assert len(set(alone)) > 1


def test_a_row_with_values_that_are_not_numbers_fails_alone(folder):
    runner = load_runner(folder, card(folder), cpu_options(folder))
    with torch.inference_mode():
        runner._model.get_input_embeddings().weight[13] = float("nan")
    runner.open(0, 8)
    runner.open(1, 8)
    good, bad = runner.step([RowWork(0, 0, [5, 6], draw()), RowWork(1, 0, [13, 6], draw(temperature=1.0))])
    assert isinstance(good, int)
    assert isinstance(bad, RowError)
    assert bad.code == "non_finite_logits"


def test_the_settings_decide_rows_and_budget(folder):
    runner = load_runner(folder, card(folder), cpu_options(folder, rows=7, kv_cache_bytes=12345))
    assert (runner.rows, runner.kv_budget_bytes) == (7, 12345)
    assert (runner.context_length, runner.vocab_size) == (128, 97)
    assert load_runner(folder, card(folder), cpu_options(folder, rows=0)).rows == 32


def test_bfloat16_runs_and_keeps_half_the_bytes(folder, runner):
    half = load_runner(folder, card(folder), cpu_options(folder, dtype="bfloat16"))
    assert half.kv_bytes(64) * 2 == runner.kv_bytes(64)
    half.open(0, 8)
    assert isinstance(half.step([RowWork(0, 0, [5, 6], draw())])[0], int)
