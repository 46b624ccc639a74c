"""Driving a torch runner by hand: rows of all lengths in packed steps, and the logits at every one of their tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batching.engines.torch.runner import TorchRunner
from batching.runner import Draw, RowWork, Score
from promptmill.core.jobs import SamplingParams

GREEDY = (Draw(SamplingParams(max_tokens=1, temperature=0), seed=0, position=0),)
_BLOCKS = 2  # a row's; its table names them in the wrong order


def text(length: int, seed: int = 0, vocab_size: int = 97) -> list[int]:
    return torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(length + 1000 * seed)).tolist()


def run_packed(runner: TorchRunner, prompts: Sequence[Sequence[int]], chunk: int, new_tokens: int = 3) -> list[tuple[list[int], Tensor]]:
    """Each row's text with its greedy tokens, and the logits [len(text) - 1, vocabulary] after each of its tokens
    but the last. The second row begins when the first has made a step, and so on: steps mix chunks and decodes."""
    texts = [list(prompt) for prompt in prompts]
    past = [0] * len(texts)
    seen: list[list[Tensor]] = [[] for _ in texts]
    step = 0
    while any(len(text) < len(prompt) + new_tokens for text, prompt in zip(texts, prompts, strict=True)):
        works, members = [], []
        for row, text in enumerate(texts[: step + 1]):
            if len(text) == len(prompts[row]) + new_tokens:
                continue
            ids = text[past[row] : past[row] + chunk]
            ends = past[row] + len(ids) == len(text)
            table = range((row + 1) * _BLOCKS - 1, row * _BLOCKS - 1, -1)
            works.append(RowWork(tuple(table), past[row], ids, GREEDY if ends else (), Score(0, [0] * len(ids), 0)))
            members.append((row, len(ids), ends))
        logits = runner.logits(works) if works else None
        for row, count, ends in members:
            assert logits is not None
            mine, logits = logits[:count], logits[count:]
            seen[row].append(mine.clone())
            past[row] += count
            if ends:
                texts[row].append(int(mine[-1].argmax()))
        step += 1
    return [(text, torch.cat(parts)) for text, parts in zip(texts, seen, strict=True)]
