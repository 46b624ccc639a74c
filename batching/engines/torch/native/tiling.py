"""Cutting the attention of a step into tiles, which threads take one by one, the longest first."""

from collections.abc import Sequence

import numpy as np

from batching.engines.torch.attention import Span
from batching.engines.torch.native.structures import Integers
from batching.runner import BLOCK_TOKENS

_TOKENS = 16
_QUERIES = 64  # query vectors of a tile: what its sums take should stay in the cache nearest to the core


def cut(spans: Sequence[Span], group: int) -> tuple[Integers, Integers]:
    """``group``: query heads to a kv head. Gives the tiles [tiles, 4] (where the row's table begins, position,
    packed index, count) and all tables in a row.

    No tile crosses a multiple of its size, so none crosses a block. Raises IndexError for a table too short:
    in C it would be read beyond its end.
    """
    size = _TOKENS
    while size > 1 and size * group > _QUERIES:
        size //= 2
    tiles: list[tuple[int, int, int, int]] = []
    table: list[int] = []
    packed = 0
    for span in spans:
        start, end = span.past, span.past + span.count
        if end > len(span.table) * BLOCK_TOKENS:
            raise IndexError(f"a table of {len(span.table)} blocks for {end} tokens")
        while start < end:
            stop = min(end, (start // size + 1) * size)
            tiles.append((len(table), start, packed, stop - start))
            packed += stop - start
            start = stop
        table.extend(span.table)
    tiles.sort(key=lambda tile: (tile[1] + tile[3]) * tile[3], reverse=True)
    return np.array(tiles, dtype=np.int64).reshape(-1, 4), np.array(table, dtype=np.int64)
