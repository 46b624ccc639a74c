"""What a request does to the model's logits before a token is chosen, in float32, in place.

Rows without a feature are not touched by it: each step gathers the logits that it changes, of all rows
at once, and puts them back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from batching.engines.torch.candidates import BLOCK
from batching.history import History
from batching.runner import Draw, Words

# The eight bits of a byte as eight bools in a row, so that a mask unpacks by look-up on any device.
_BITS = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int64)[:, 0])


@dataclass(frozen=True, slots=True)
class Limits:
    """Which tokens a draw may give."""

    banned: tuple[int, ...] = ()
    allowed: Words | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    """``index``: into the flat logits. ``amount``: one float32 per index."""

    index: Tensor
    amount: Tensor


def limits(draw: Draw) -> Limits:
    """Waits for the draw's mask. A mask that leaves nothing but banned tokens wins over the ban: a text that the
    grammar has ended ends. Raises GrammarError."""
    if draw.mask is None:
        return Limits(draw.banned)
    allowed = draw.mask()
    left = allowed.copy()
    for token in draw.banned:
        if token // 32 < len(left):
            left[token // 32] &= ~np.uint32(1 << token % 32)
    return Limits(draw.banned if left.any() else (), allowed)


def process(logits: Tensor, draws: Sequence[Draw], limited: Sequence[Limits]) -> None:
    """Apply to ``padded`` logits, one row per draw: ban, logit_bias, repetition, presence and frequency, mask."""
    flat = logits.view(-1)
    if ban := _change(logits, ((row, item.banned, 0.0) for row, item in enumerate(limited) if item.banned)):
        flat.index_fill_(0, ban.index, float("-inf"))
    biases = [(row, dict(draw.sampling.logit_bias)) for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    if bias := _change(logits, ((row, items, items.values()) for row, items in biases)):
        flat.index_add_(0, bias.index, bias.amount)
    penalised = [(row, draw, draw.history) for row, draw in enumerate(draws) if draw.history is not None and draw.sampling.penalised]
    repeated = (
        (row, _seen(history), draw.sampling.repetition_penalty) for row, draw, history in penalised if draw.sampling.repetition_penalty != 1
    )
    if repetition := _change(logits, repeated):
        values = flat[repetition.index]
        flat[repetition.index] = torch.where(values > 0, values / repetition.amount, values * repetition.amount)
    if used := _change(logits, ((row, history.output, _counted(draw, history)) for row, draw, history in penalised if history.output)):
        flat.index_add_(0, used.index, used.amount, alpha=-1)
    masked = [row for row, item in enumerate(limited) if item.allowed is not None]
    if masked:
        index = torch.tensor(masked, device=logits.device)
        allowed = _unpack([item.allowed for item in limited if item.allowed is not None], logits)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~allowed, float("-inf")))


def _seen(history: History) -> Iterable[int]:
    return chain(history.prompt, (token for token in history.output if token not in history.prompt))


def _counted(draw: Draw, history: History) -> Iterable[float]:
    presence, frequency = draw.sampling.presence_penalty, draw.sampling.frequency_penalty
    return (presence + frequency * count for count in history.output.values())


def _change(logits: Tensor, parts: Iterable[tuple[int, Iterable[int], Iterable[float] | float]]) -> _Change | None:
    """From (row, ids, an amount per id or one for all); ids of a row differ."""
    index: list[np.ndarray] = []
    amount: list[np.ndarray] = []
    for row, tokens, amounts in parts:
        ids = np.fromiter(tokens, np.int64)
        index.append(ids + row * logits.shape[1])
        amount.append(np.full(len(ids), amounts, np.float32) if isinstance(amounts, float | int) else np.fromiter(amounts, np.float32))
    if not index:
        return None
    device = logits.device
    return _Change(torch.from_numpy(np.concatenate(index)).to(device), torch.from_numpy(np.concatenate(amount)).to(device))


def _unpack(masks: Sequence[Words], logits: Tensor) -> Tensor:
    """Bool [masks, width]; words that a mask lacks allow nothing."""
    words = np.zeros((len(masks), logits.shape[1] // BLOCK), np.uint32)
    for row, mask in enumerate(masks):
        words[row, : len(mask)] = mask[: words.shape[1]]
    octets = torch.from_numpy(words.view(np.uint8)).to(logits.device)
    return _BITS.to(logits.device)[octets.long()].view(torch.bool)
