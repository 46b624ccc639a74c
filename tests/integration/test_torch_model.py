"""The default model on the torch runner: against transformers' own generation, and alone against together."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from batching.engines.torch.runner import TorchRunner, load_runner
from batching.options import EngineOptions
from batching.runner import Draw, RowWork
from promptmill.core.jobs import SamplingParams
from promptmill.core.models import DEFAULT_MODEL, ModelCard

pytestmark = pytest.mark.model

CHUNK = 48  # shorter than some prompts, so that they are prefilled in pieces
NEW_TOKENS = 16
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Who wrote Hamlet?",
    "What is 12 + 30?",
    "Write a haiku about the sea.",
    "Explain gravity to a child in two sentences.",
    "List the planets of the solar system.",
    "Translate 'good morning' to Spanish.",
    "What does HTTP stand for?",
    "Give me a recipe for pancakes.",
    "Is a tomato a fruit?",
]
TEXTS = [
    "Once upon a time, in a small village by the river,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "In 1969,",
    "a  1",
    "Die Hauptstadt von Deutschland ist",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "SELECT name FROM users WHERE",
    "It was the best of times, it was the worst of times, " * 3,
    "Water boils at",
    "\n\n",
]


@pytest.fixture(scope="session")
def folder() -> Path:
    folder = Path(__file__).parents[2] / "var" / "models" / DEFAULT_MODEL
    if not (folder / "promptmill.json").is_file():
        pytest.fail(f"the default model is not in {folder}; bring it with: promptmill models pull {DEFAULT_MODEL}")
    return folder


@pytest.fixture(scope="session")
def runner(folder) -> TorchRunner:
    return load_runner(folder, ModelCard.load(folder), EngineOptions("torch", (folder,), device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def prompts(folder) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    asked = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]
    return asked + [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="session")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def draw(position: int, **sampling) -> Draw:
    return Draw(SamplingParams(max_tokens=NEW_TOKENS, **{"temperature": 0, **sampling}), seed=5, position=position)


def generate(runner, prompts, new_tokens=NEW_TOKENS, first_slot=0, **sampling) -> list[list[int]]:
    """All prompts in shared steps: every row steps each time, with its next chunk or its last token."""
    rows = range(len(prompts))
    texts, past = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for row in rows:
        runner.open(first_slot + row, len(prompts[row]) + new_tokens)
    while live := [row for row in rows if len(texts[row]) < len(prompts[row]) + new_tokens]:
        works = []
        for row in live:
            chunk = texts[row][past[row] : past[row] + CHUNK]
            done = past[row] + len(chunk) == len(texts[row])
            position = len(texts[row]) - len(prompts[row])
            works.append(RowWork(first_slot + row, past[row], chunk, draw(position, **sampling) if done else None))
            past[row] += len(chunk)
        for row, result in zip(live, runner.step(works), strict=True):
            if result is not None:
                assert isinstance(result, int)
                texts[row].append(result)
    for row in rows:
        runner.close(first_slot + row)
    return [texts[row][len(prompts[row]) :] for row in rows]


def gaps(reference, prompt, tokens) -> torch.Tensor:
    """For each token, how far its logit lies under the best one, in float32 and with the tokens before it given."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def test_the_runner_keeps_its_promise_of_equal_bits_on_this_machine(runner):
    assert runner.batch_invariant


def test_it_answers_by_its_chat_template(runner, prompts, folder):
    tokens = generate(runner, prompts[:1])[0]
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens[: tokens.index(2)])
    assert text == "The capital of France is Paris."


@pytest.mark.timeout(400)
def test_greedy_tokens_equal_those_of_transformers(runner, prompts, reference):
    assert len(prompts) >= 20
    ours = generate(runner, prompts)
    differing = []
    for prompt, tokens in zip(prompts, ours, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        if tokens != theirs:
            differing.append((tokens, theirs))
            at = next(index for index in range(NEW_TOKENS) if tokens[index] != theirs[index])
            # Only a near tie may fall differently: the two sum in different orders.
            assert gaps(reference, prompt, tokens[: at + 1])[at] < 1e-3
    assert len(differing) <= 2, differing


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_thirty_two_ragged_rows_equal_each_alone(runner, prompts, sampling):
    ragged = [*prompts, *(prompt[: len(prompt) // 2 + 1] for prompt in prompts[:9])]
    assert len(ragged) == 32
    together = generate(runner, ragged, new_tokens=6, **sampling)
    alone = [generate(runner, [prompt], new_tokens=6, first_slot=index % 3, **sampling)[0] for index, prompt in enumerate(ragged)]
    assert together == alone


@pytest.mark.timeout(400)
def test_bfloat16_tokens_are_near_the_best_in_float32_and_equal_alone_and_together(folder, prompts, reference):
    runner = load_runner(folder, ModelCard.load(folder), EngineOptions("torch", (folder,), device="cpu", dtype="bfloat16"))
    chosen = [prompts[0], prompts[2], prompts[14]]
    together = generate(runner, chosen, new_tokens=8)
    assert together[0][:7] == generate(runner, chosen[:1], new_tokens=7)[0]
    for prompt, tokens in zip(chosen, together, strict=True):
        assert gaps(reference, prompt, tokens).max() <= 0.5
