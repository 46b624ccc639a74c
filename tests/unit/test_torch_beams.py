"""Beam search against transformers' own, over the same tiny model."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from batching.beams import BeamSearch, Hypothesis
from promptmill.core.jobs import Beam
from tests.support.tiny_models import tiny_model

PAD = 96
PROMPTS = ((1, 5, 9, 30), (1, 77), (40, 41, 42, 43, 44, 45, 46))
MAX_TOKENS = 12

Ends = tuple[int, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreTrainedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other over so small a model
    yield tiny_model("llama", tmp_path_factory.mktemp("beams") / "llama")
    torch.set_num_threads(threads)


@torch.inference_mode()
def search(model: PreTrainedModel, prompt: tuple[int, ...], beam: Beam, n: int, ends: Ends) -> list[Hypothesis]:
    beams = BeamSearch(beam, n, MAX_TOKENS, frozenset(ends))
    while not beams.done:
        logits = model(torch.tensor([[*prompt, *live.token_ids] for live in beams.live])).logits[:, -1].float()
        best = logits.log_softmax(-1).topk(beams.candidates)
        beams.advance(
            [list(zip(ids, logprobs, strict=True)) for ids, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        )
    return beams.best(n)


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: tuple[int, ...], beam: Beam, n: int, ends: Ends) -> tuple[list[list[int]], list[float]]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        num_return_sequences=n,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=list(ends) or None,
        pad_token_id=PAD,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist()


@pytest.fixture(scope="module")
def cases(model: PreTrainedModel) -> list[tuple[tuple[int, ...], Ends]]:
    """Prompts with no end token, and with some that a free search comes upon."""
    found = [(prompt, search(model, prompt, Beam(4), 1, ())[0].token_ids) for prompt in PROMPTS]
    return [(prompt, ends) for prompt, ids in found for ends in ((), ids[2:3], tuple(dict.fromkeys(ids[2:]))[:3])]


def check(model: PreTrainedModel, prompt: tuple[int, ...], beam: Beam, n: int, ends: Ends) -> list[Hypothesis]:
    ours = search(model, prompt, beam, n, ends)
    sequences, scores = generate(model, prompt, beam, n, ends)
    for found, ids in zip(ours, sequences, strict=True):
        count = len(found.token_ids)
        assert list(found.token_ids) == ids[:count]
        assert set(ids[count:]) <= {PAD}
        assert found.reason == ("stop" if found.token_ids[-1] in ends else "length")
        assert found.reason == "stop" or count == MAX_TOKENS
    assert [found.score for found in ours] == pytest.approx(scores, abs=1e-4, rel=1e-4)
    return ours


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0, 2.0])
def test_it_finds_what_transformers_finds(
    model: PreTrainedModel, cases: list[tuple[tuple[int, ...], Ends]], length_penalty: float, early_stopping: bool
) -> None:
    reasons = set()
    for width in range(2, 7):
        for prompt, ends in cases:
            found = check(model, prompt, Beam(width, length_penalty, early_stopping), width, ends)
            reasons |= {each.reason for each in found}
    assert reasons == {"stop", "length"}


@torch.inference_mode()
def best_after(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    return model(torch.tensor([prompt])).logits[0, -1].topk(count).indices.tolist()


def test_it_does_so_with_more_end_tokens_than_beams(model: PreTrainedModel) -> None:
    found = []
    for prompt in PROMPTS:
        # All but one of the best candidates end the text: the second beam has to come from behind them.
        ends = tuple(best_after(model, prompt, 40)[1:])
        found += check(model, prompt, Beam(2), 2, ends)
    assert "stop" in {each.reason for each in found}
    assert max(len(each.token_ids) for each in found) > 1


def test_the_n_best_are_the_first_of_all(model: PreTrainedModel, cases: list[tuple[tuple[int, ...], Ends]]) -> None:
    prompt, ends = cases[2]
    whole = search(model, prompt, Beam(5), 5, ends)
    for n in range(1, 6):
        assert check(model, prompt, Beam(5), n, ends) == whole[:n]
