"""The same runner on a GPU: what its tests on the CPU assert, but for equal bits, which are not promised there."""

import pytest
import torch

from batching.engines.torch.runner import load_runner
from batching.runner import Draw, Drawn, RowError, RowOutput, RowWork, Score
from promptmill.core.jobs import SamplingParams
from tests.support.packed import run_packed, text
from tests.support.tiny_models import card, cpu_options, tiny_model

pytestmark = [pytest.mark.cuda, pytest.mark.xdist_group("torch_engine")]

DEVICE = "cuda"
PROMPTS = [text(length) for length in (1, 2, 31, 70, 13)]
FAMILIES = ["llama", "gemma2", "gpt_oss", "mixtral", "phi3", "gpt2", "deepseek_v3"]
BAD_TOKEN = 90


def runner_of(folder, **options):
    return load_runner(folder, card(folder), cpu_options(folder, **{"device": DEVICE, "rows": 8, "kv_cache_bytes": 16 << 20, **options}))


def draw(position=0, choice=0, **sampling):
    return Draw(SamplingParams(max_tokens=8, **{"temperature": 0, **sampling}), seed=3, position=position, choice=choice)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A llama on the CPU with eager attention, and its folder."""
    folder = tmp_path_factory.mktemp("llama")
    return tiny_model("llama", folder), folder


@pytest.fixture(scope="module")
def runner(model):
    return runner_of(model[1])


def logits_of(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_in_one_step_give_the_logits_of_each_text_alone_in_transformers(family, tmp_path):
    reference = tiny_model(family, tmp_path)
    for prompt, (whole, logits) in zip(PROMPTS, run_packed(runner_of(tmp_path), PROMPTS, chunk=19), strict=True):
        wanted = logits_of(reference, whole[:-1])
        assert (logits.cpu() - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        assert whole[len(prompt) :] == wanted[len(prompt) - 1 :].argmax(-1).tolist()


def test_company_and_chunks_change_a_row_by_no_more_than_rounding(runner):
    together = run_packed(runner, PROMPTS, chunk=16)
    for prompt, (whole, logits) in zip(PROMPTS, together, strict=True):
        whole_alone, logits_alone = run_packed(runner, [prompt], chunk=96)[0]
        assert whole == whole_alone
        assert (logits - logits_alone).abs().max() <= 1e-4 * logits.abs().max()


def test_nothing_is_promised_about_bits(runner):
    assert not runner.caps.batch_invariant


def test_several_draws_of_one_row_are_those_of_each_choice_alone(runner):
    hot = {"temperature": 1.3, "top_p": 0.95}
    draws = tuple(draw(choice=choice, **hot) for choice in range(6))
    result = runner.step([RowWork((0, 1), 0, PROMPTS[2], draws), RowWork((2,), 0, PROMPTS[1], (draw(),))])[0]
    assert isinstance(result, RowOutput)
    alone = [runner.step([RowWork((3, 4), 0, PROMPTS[2], (one,))])[0].drawn[0] for one in draws]
    assert list(result.drawn) == alone
    assert len({drawn.token for drawn in alone}) > 1


def test_scores_are_the_log_softmax_of_the_logits(model, runner):
    ids = PROMPTS[2]
    result = runner.step([RowWork((0,), 0, ids[:-1], (), Score(0, ids[1:], 3)), RowWork((1,), 0, [5], (draw(logprobs=2),))])
    wanted = logits_of(model[0], ids[:-1]).log_softmax(-1)
    for score, target, row in zip(result[0].scores, ids[1:], wanted, strict=True):
        assert score.logprob == pytest.approx(float(row[target]), abs=1e-3)
        assert [logprob for _, logprob in score.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
    drawn = result[1].drawn[0]
    assert isinstance(drawn, Drawn)
    assert drawn.logprob.top[0] == (drawn.token, drawn.logprob.logprob)


def test_a_row_with_values_that_are_not_numbers_fails_alone_and_its_blocks_serve_again(tmp_path):
    model = tiny_model("llama", tmp_path)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = torch.nan
    model.save_pretrained(tmp_path)
    runner = runner_of(tmp_path)
    good, bad = RowWork((0,), 0, [5, 6], (draw(),)), RowWork((1,), 0, [BAD_TOKEN, 6], (draw(temperature=1.0),))
    expected = runner.step([good])
    results = runner.step([bad, good, RowWork((2,), 0, [BAD_TOKEN], (draw(),))])
    assert [result.code for result in (results[0], results[2]) if isinstance(result, RowError)] == ["non_finite_logits"] * 2
    assert results[1] == expected[0]
    runner.wipe([1, 2])
    assert runner.step([RowWork((1,), 0, [5, 6], (draw(),))]) == expected


def test_a_copied_block_continues_as_the_first_does(runner):
    runner.step([RowWork((0,), 0, PROMPTS[2])])
    runner.copy(0, 5)
    first, copied = runner.step([RowWork((0,), 31, [8], (draw(logprobs=0),)), RowWork((5,), 31, [8], (draw(logprobs=0),))])
    assert first.drawn[0].token == copied.drawn[0].token
    assert first.drawn[0].logprob.logprob == pytest.approx(copied.drawn[0].logprob.logprob, abs=1e-4)


def test_bfloat16_is_the_number_type_of_choice_and_takes_half_the_bytes(model, runner):
    half = runner_of(model[1], dtype="auto")
    assert half.block_bytes * 2 == runner.block_bytes
    assert isinstance(half.step([RowWork((0,), 0, [5, 6], (draw(),))])[0], RowOutput)


def test_memory_does_not_grow_over_many_steps(runner):
    def steps(count):
        for number in range(count):
            length = 1 + number * 7 % 40
            rows = [RowWork((row,), 0, text(length, seed=row), (draw(temperature=1.0),)) for row in range(1 + number % 5)]
            assert all(isinstance(result, RowOutput) for result in runner.step(rows))

    steps(40)
    held = torch.cuda.memory_allocated()
    steps(200)
    assert torch.cuda.memory_allocated() == held
