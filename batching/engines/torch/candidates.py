"""The best tokens of each row, in exact order, without sorting the vocabulary.

A row's order is (logit descending, id ascending), which torch.topk does not keep among equal logits,
and bfloat16 logits are full of those: the 20th and the 21st best are equal in half of all steps.

On a GPU one integer per token holds both criteria, so that no two are equal and any top-k algorithm is
exact. On a CPU NumPy cuts row by row, by value, and extends the cut by ties: it partitions and takes
exponentials a few times faster than torch, whose threads would wait for each other in every operation.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CPU_ROWS = 8
DEVICE_ROWS = 64
BLOCK = 32  # a word of a grammar's mask; fewer make slow maxima, more make long second rounds

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Singles = npt.NDArray[np.float32]

_LOW = (1 << 32) - 1


def slices(rows: Sequence[int], device: torch.device) -> Iterator[Sequence[int]]:
    """Parts of ``rows`` to be worked on one after the other. On a CPU their copies of 200 kB a row then stay in its
    cache and in memory that it has already; taking new memory costs it more than the work."""
    size = CPU_ROWS if device.type == "cpu" else DEVICE_ROWS
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


def padded(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """A float32 copy of these rows [rows, width], -inf behind the vocabulary up to a whole BLOCK."""
    size = logits.shape[1]
    copy = logits.new_empty((len(rows), -(-size // BLOCK) * BLOCK), dtype=torch.float32)
    copy[:, size:] = float("-inf")
    if logits.device.type == "cpu":
        for place, row in enumerate(rows):  # once over the memory, not twice
            copy[place, :size] = logits[row]
    else:
        copy[:, :size] = pick_rows(logits, rows)
    return copy


def pick_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of ``tensor``; itself, when they are all of it."""
    if len(rows) == len(tensor) and all(row == place for place, row in enumerate(rows)):
        return tensor
    return tensor.index_select(0, torch.tensor(rows, dtype=torch.long, device=tensor.device))


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best of each row of ``padded`` logits: values and ids, both [rows, count]."""
    ids = torch.from_numpy(_cut_all(logits.numpy(), count)) if logits.device.type == "cpu" else best_by_blocks(logits, count)
    return logits.gather(1, ids), ids


def best_by_blocks(logits: Tensor, count: int) -> Tensor:
    """The ids that ``best`` gives, for a GPU.

    The best k tokens lie in the k blocks whose own bests are the best: a token outside of those has k
    better ones inside. So the exact search runs over k * BLOCK tokens.
    """
    rows, width = logits.shape
    blocks = logits.view(rows, -1, BLOCK)
    tokens = torch.arange(width, device=logits.device)
    near = logits
    if blocks.shape[1] > count:
        chosen = _keys(blocks.amax(-1), tokens[: blocks.shape[1]]).topk(count, sorted=False).indices[:, :, None]
        tokens = (chosen * BLOCK + tokens[:BLOCK]).view(rows, -1)
        near = logits.gather(1, tokens)
    return _LOW - (_keys(near, tokens).topk(count).values & _LOW)


def _cut_all(rows: Singles, count: int) -> Ids:
    ids = np.empty((len(rows), count), np.int64)
    if not count:
        return ids
    for row, values in enumerate(rows):
        ids[row] = _cut(values, count)
    return ids


def _cut(values: Singles, count: int) -> Ids:
    """The ``count`` best ids of one row. Any ids for a row with a NaN, which the guard refuses."""
    if count == 1:
        return np.array([values.argmax()])  # of equal ones the first
    possible = np.flatnonzero(values > -np.inf) if np.count_nonzero(values > -np.inf) < len(values) // 4 else None
    if possible is not None and len(possible) <= count:  # so many equal ones make a partition slow
        found = possible[np.argsort(-values[possible], kind="stable")]
        return np.concatenate([found, np.flatnonzero(values == -np.inf)[: count - len(found)]])
    if possible is not None:
        return possible[_cut(values[possible], count)]
    if count == len(values):
        return np.argsort(-values, kind="stable")
    edge = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= edge)
    if len(ids) > count:
        above = np.flatnonzero(values > edge)
        ties = np.flatnonzero(values == edge)[: count - len(above)]
        return np.concatenate([above[np.argsort(-values[above], kind="stable")], ties])
    if len(ids) < count:
        return np.arange(count)
    return ids[np.argsort(-values[ids], kind="stable")]


def masses(logits: Tensor, rows: Sequence[int], greatest: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Of each of ``rows`` the sum of exp((logit - greatest) / temperature) over all tokens. Each row is added up by
    itself, so that its bits do not depend on the others."""
    if logits.device.type != "cpu":
        heat = torch.tensor(temperatures, device=logits.device)[:, None]
        return 1 / ((pick_rows(logits, rows) - greatest[:, None]) / heat).softmax(-1).amax(-1)
    found = np.empty(len(rows))
    for place, (row, best_value, temperature) in enumerate(zip(rows, greatest.numpy(), temperatures, strict=True)):
        with np.errstate(over="ignore", invalid="ignore"):  # far below: no mass. A row of -inf alone: not asked for
            weights = logits[row].numpy() - best_value
            weights /= np.float32(temperature)
        found[place] = np.exp(weights, out=weights).sum(dtype=np.float64)
    return torch.from_numpy(found)


def ordered(row: Tensor) -> tuple[Floats, Ids]:
    """All of one row on the host, in order: values and ids. A third of a millisecond for 49 000 tokens."""
    values = row.numpy()
    keys = (~_sortable(values + np.float32(0)).astype(np.int64) << 32) | np.arange(len(values))
    keys.sort()  # unlike torch's, NumPy's sort uses AVX-512
    ids: Ids = keys & _LOW
    return values[ids].astype(np.float64), ids


def _sortable(values: Singles) -> npt.NDArray[np.int32]:
    bits = values.view(np.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _keys(values: Tensor, places: Tensor) -> Tensor:
    """Integers that order by (value descending, place ascending) from the greatest down."""
    bits = (values + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0
    # A negative float's bits count away from zero: turn all but the sign to make them sort as integers do.
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (_LOW - places)


def fetch(*tensors: Tensor) -> list[Floats]:
    """Small tensors (of numbers that float64 holds exactly) to the host, in one transfer."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(np.split(flat, ends[:-1]), tensors, strict=True)]
