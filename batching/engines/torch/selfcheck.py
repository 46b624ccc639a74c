"""The check at load: does a row compute the same bits alone as in company?

It cannot be promised once for all: it hangs on the CPU, the libraries and the number of threads. So a
few rows are run alone and packed together on the real model, and their logits compared bit by bit.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from batching.runner import Draw, RowWork
from promptmill.core.jobs import SamplingParams

# Prompt lengths and the chunk they are prefilled by: one token, odd counts, more than one chunk.
_LENGTHS = (1, 7, 24, 45)
_CHUNK = 32
_DECODES = 2
_ROW_STEPS = 2 + _DECODES  # chunks of the longest prompt, then the decodes

_GREEDY = Draw(SamplingParams(max_tokens=1, temperature=0), seed=0, position=0)


class Checked(Protocol):
    vocab_size: int

    def open(self, slot: int, tokens: int) -> None: ...
    def close(self, slot: int) -> None: ...
    def logits(self, rows: Sequence[RowWork]) -> torch.Tensor: ...


def is_batch_invariant(runner: Checked) -> bool:
    """Whether each row's logits are bit-equal alone and together. Uses the first slots, and frees them."""
    alone = [_run(runner, [length])[0] for length in _LENGTHS]
    together = _run(runner, _LENGTHS)
    return all(torch.equal(a, b) for row_a, row_b in zip(alone, together, strict=True) for a, b in zip(row_a, row_b, strict=True))


def _run(runner: Checked, lengths: Sequence[int]) -> list[list[torch.Tensor]]:
    """The logits of each row at each of its draws. Greedy, so that equal bits give equal inputs."""
    texts = [_prompt(length, runner.vocab_size) for length in lengths]
    past = [0] * len(lengths)
    seen: list[list[torch.Tensor]] = [[] for _ in lengths]
    for slot, length in enumerate(lengths):
        runner.open(slot, length + _ROW_STEPS)
    try:
        for _ in range(_ROW_STEPS):
            works = []
            for slot, text in enumerate(texts):
                chunk = text[past[slot] : past[slot] + _CHUNK]
                past[slot] += len(chunk)
                works.append(RowWork(slot, past[slot] - len(chunk), chunk, _GREEDY if past[slot] == len(text) else None))
            drawing = [work.slot for work in works if work.draw is not None]
            for slot, logits in zip(drawing, runner.logits(works), strict=True):
                seen[slot].append(logits.clone())
                texts[slot].append(int(logits.argmax()))
    finally:
        for slot in range(len(lengths)):
            runner.close(slot)
    return seen


def _prompt(length: int, vocab_size: int) -> list[int]:
    """Ids spread over the vocabulary, others for each length; 7919 is a prime."""
    return [(index + length) * 7919 % vocab_size for index in range(length)]
