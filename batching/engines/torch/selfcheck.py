"""The check at load: does a row compute the same bits alone as in company?

It cannot be promised once for all: it hangs on the CPU, the libraries, the number of threads and what the
model's family is built of. So a few rows are run on the real model, alone, together, with prompts cut in
other places and in other blocks, and their logits are compared bit by bit.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from batching.runner import BLOCK_TOKENS, Draw, RowWork
from promptmill.core.jobs import SamplingParams

# Prompt lengths: one token, some, more than one block. Few steps: each costs start-up time.
_LENGTHS = (1, 24, BLOCK_TOKENS + 7)
_CHUNKS = (40, 19)
_DECODES = 1
_BLOCKS = 2  # per row

_GREEDY = (Draw(SamplingParams(max_tokens=1, temperature=0), seed=0, position=0),)


class Checked(Protocol):
    vocab_size: int
    context_length: int
    blocks: int

    def logits(self, rows: Sequence[RowWork]) -> torch.Tensor: ...


def is_batch_invariant(runner: Checked) -> bool:
    """Whether each row's logits are bit-equal in all these ways. Writes into blocks that nobody holds yet."""
    most = min(runner.context_length - _DECODES, runner.blocks // _BLOCKS * BLOCK_TOKENS)
    lengths = [length for length in _LENGTHS if length <= most][: runner.blocks // _BLOCKS]
    alone = [_run(runner, [length], _CHUNKS[0])[0] for length in lengths]
    together = [_run(runner, lengths, chunk) for chunk in _CHUNKS]
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # bits: NaN is not equal to itself
        for rows in together
        for row_alone, row in zip(alone, rows, strict=True)
        for one, other in zip(row_alone, row, strict=True)
    )


def _run(runner: Checked, lengths: Sequence[int], chunk: int) -> list[list[torch.Tensor]]:
    """The logits of each row at each of its draws. Greedy, so that equal bits give equal inputs."""
    texts = [_prompt(length, runner.vocab_size) for length in lengths]
    goal = [length + _DECODES for length in lengths]
    past = [0] * len(lengths)
    seen: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(past[row] < goal[row] for row in range(len(lengths))):
        works, drawing = [], []
        for row, text in enumerate(texts):
            ids = text[past[row] : past[row] + chunk]
            if past[row] >= goal[row]:
                continue
            table = tuple(range(row * _BLOCKS, (row + 1) * _BLOCKS))
            ends = past[row] + len(ids) == len(text)
            works.append(RowWork(table, past[row], ids, _GREEDY if ends else ()))
            past[row] += len(ids)
            if ends:
                drawing.append(row)
        for row, logits in zip(drawing, runner.logits(works), strict=True):
            seen[row].append(logits.clone())
            texts[row].append(int(logits.argmax()))
    return seen


def _prompt(length: int, vocab_size: int) -> list[int]:
    """Ids spread over the vocabulary, others for each length; 7919 is a prime."""
    return [(index + length) * 7919 % vocab_size for index in range(length)]
