"""The packed step against transformers' own eager forward, family by family."""

import random

import pytest
import torch

from batching.engines.torch.runner import load_runner
from batching.runner import Draw, RowWork
from promptmill.core.jobs import SamplingParams
from tests.support.tiny_models import FAMILIES, card, cpu_options, tiny_model

ANY = Draw(SamplingParams(max_tokens=1, temperature=0), seed=0, position=0)
LENGTHS = (1, 6, 19, 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_chunks_and_decodes_in_one_pack_equal_the_eager_forward_of_each_text(family, tmp_path):
    model = tiny_model(family, tmp_path)
    runner = load_runner(tmp_path, card(tmp_path), cpu_options(tmp_path))
    rng = random.Random(5)
    texts = [[rng.randrange(97) for _ in range(length)] for length in LENGTHS]
    with torch.inference_mode():
        wanted = [model(torch.tensor([text])).logits[0] for text in texts]
    past = [0] * len(texts)
    for slot, text in enumerate(texts):
        runner.open(slot, len(text))
    worst = 0.0
    while any(past[slot] < len(text) for slot, text in enumerate(texts)):
        works = []
        for slot, text in enumerate(texts):
            # Chunks of 1 to 9 tokens; the last 8 tokens of a text come one by one, as decodes do.
            count = min(rng.randint(1, 9), max(len(text) - 8 - past[slot], 1))
            if past[slot] < len(text):
                works.append(RowWork(slot, past[slot], text[past[slot] : past[slot] + count], ANY))
                past[slot] += count
        for work, logits in zip(works, runner.logits(works), strict=True):
            worst = max(worst, float((logits - wanted[work.slot][past[work.slot] - 1]).abs().max()))
    assert worst < 1e-4


def test_a_window_is_honoured_at_all(tmp_path):
    # Guards the test above: without its window the same model gives other logits.
    narrow = tiny_model("mistral", tmp_path / "narrow")
    wide = tiny_model("mistral", tmp_path / "wide", sliding_window=None)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert (narrow(ids).logits[0, -1] - wide(ids).logits[0, -1]).abs().max() > 1e-2


def test_a_row_is_bit_equal_alone_and_in_company(tmp_path):
    tiny_model("llama", tmp_path)
    runner = load_runner(tmp_path, card(tmp_path), cpu_options(tmp_path))
    assert runner.batch_invariant
    texts = [[(7 * slot + index) % 97 for index in range(length)] for slot, length in enumerate((3, 17, 30, 64))]

    def run(slots):
        for slot in slots:
            runner.open(slot, len(texts[slot]) + 1)
        works = [RowWork(slot, 0, texts[slot], ANY) for slot in slots]
        first = runner.logits(works).clone()
        second = runner.logits([RowWork(slot, len(texts[slot]), [5], ANY) for slot in slots]).clone()
        for slot in slots:
            runner.close(slot)
        return first, second

    together = run(range(4))
    for slot in range(4):
        alone = run([slot])
        assert torch.equal(alone[0][0], together[0][slot])
        assert torch.equal(alone[1][0], together[1][slot])
