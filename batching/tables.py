"""The block tables of rows: what each has in the KV cache, shared where it can be. No group, no policy."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from batching.blocks import BlockPool
from batching.prefix import PrefixCache
from batching.row import Row
from batching.runner import BLOCK_TOKENS, blocks_for

KNOWN = 8  # blocks: enough to tell who shares a beginning, and cheap to look for in a long queue


class Tables:
    """``copy(source, target)`` and ``wipe(blocks)`` are the runner's."""

    def __init__(self, pool: BlockPool, prefixes: PrefixCache, *, copy: Callable[[int, int], None], wipe: Callable[[Sequence[int]], None]):
        self._pool = pool
        self._prefixes = prefixes
        self._copy = copy
        self._wipe = wipe

    @property
    def free(self) -> int:
        """Blocks that rows can have now, at the cost of nobody but the prefix cache."""
        return self._pool.free

    @property
    def used(self) -> int:
        return self._pool.used

    # -- room

    def grow(self, row: Row, count: int) -> int:
        """Room for ``count`` more tokens of the row, or for as many as there are free blocks for; how many."""
        while len(row.table) * BLOCK_TOKENS < row.past + count and self._pool.free:
            row.table.append(self._pool.take())
        return min(count, len(row.table) * BLOCK_TOKENS - row.past)

    def need(self, row: Row) -> int:
        """Free blocks that it takes to compute all tokens of the row, and the next one."""
        in_use = sum(self._pool.refs(block) > 0 for _, block in self._beginning(row))
        return blocks_for(len(row.tokens) + 1) - len(row.table) - in_use

    def fork(self, parent: Row, child: Row) -> None:
        """Give ``child``, which has the same tokens and no table, what ``parent`` has: whole blocks are shared, the
        last one is copied; without a free block its tokens are to be computed again."""
        whole = parent.past // BLOCK_TOKENS
        child.table = parent.table[:whole]
        for block in child.table:
            self._pool.share(block)
        child.digests = parent.digests[:whole]
        child.past = whole * BLOCK_TOKENS
        if parent.past > child.past and self._pool.free:
            child.table.append(self._pool.take())
            self._copy(parent.table[whole], child.table[whole])
            child.past = parent.past

    def drop(self, row: Row) -> None:
        """Free the row's blocks, the last ones first: the beginnings are what others may share."""
        for block in reversed(row.table):
            self._pool.release(block)
        row.table, row.digests, row.past = [], [], 0

    def taint(self, rows: Iterable[Row]) -> None:
        """Nobody may read what these rows computed, before and after their blocks are freed."""
        held = Counter(block for row in rows for block in row.table)
        gone = set(held).union(*map(self._prefixes.forget, held))  # with what was computed from them
        self._wipe([block for block in sorted(gone) if self._pool.refs(block) == held[block]])

    # -- sharing

    def adopt(self, row: Row) -> None:
        """Share the row's next blocks, as far as the prefix cache knows them."""
        beginning = self._beginning(row)
        while beginning and len(row.table) > len(row.digests):  # room for a step that did not run
            self._pool.release(row.table.pop())
        for digest, block in beginning:
            self._pool.share(block)
            row.table.append(block)
            row.digests.append(digest)
            row.past += BLOCK_TOKENS

    def known(self, row: Row) -> int:
        """How many of the row's first blocks are there already, its own or another's; those beyond KNOWN are not
        looked for."""
        return len(row.digests) + len(self._beginning(row, KNOWN))

    def register(self, row: Row) -> None:
        """Tell the prefix cache of the row's blocks that have become whole."""
        while (len(row.digests) + 1) * BLOCK_TOKENS <= row.past:
            index = len(row.digests)
            row.digests.append(self._prefixes.insert(_parent(row), _ids(row, index), row.table[index]))

    def made_by(self, row: Row, count: int) -> list[bytes]:
        """The digests of the blocks that are whole once ``count`` more tokens of the row are computed."""
        made: list[bytes] = []
        if not self._prefixes.enabled:
            return made
        digest = _parent(row)
        for index in range(len(row.digests), (row.past + count) // BLOCK_TOKENS):
            digest = self._prefixes.child(digest, _ids(row, index))
            made.append(digest)
        return made

    def next_adoptable(self, row: Row) -> bytes | None:
        """The digest of the block that the row would compute next, if it may as well take it from another."""
        if row.pending <= BLOCK_TOKENS or row.unscored or row.past != len(row.digests) * BLOCK_TOKENS:
            return None
        return next(iter(self.made_by(row, BLOCK_TOKENS)), None)

    def _beginning(self, row: Row, most: int | None = None) -> list[tuple[bytes, int]]:
        """The (digest, block) of the row's next blocks that the prefix cache knows, ``most`` of them. One token at
        least is left to compute, and so are those whose logits are wanted for a score."""
        found: list[tuple[bytes, int]] = []
        if row.past != len(row.digests) * BLOCK_TOKENS:
            return found
        digest = _parent(row)
        limit = min(len(row.tokens), row.scored) if row.unscored else len(row.tokens)
        last = (limit - 1) // BLOCK_TOKENS
        for index in range(len(row.digests), last if most is None else min(last, len(row.digests) + most)):
            hit = self._prefixes.find(digest, _ids(row, index))
            if hit is None:
                break
            found.append(hit)
            digest = hit[0]
        return found

    # --

    def check_integrity(self, rows: Iterable[Row]) -> None:
        """``rows``: all there are. Raises AssertionError when blocks and tables do not tell the same story."""
        self._pool.check_integrity()
        held: dict[int, int] = {}
        for row in rows:
            assert row.past <= len(row.table) * BLOCK_TOKENS, "a row has more tokens than room"
            for block in row.table:
                held[block] = held.get(block, 0) + 1
        assert all(self._pool.refs(block) == count for block, count in held.items()), "a block's references differ from the tables"
        assert len(held) == self._pool.used, "a block is held by no row"


def _parent(row: Row) -> bytes:
    return row.digests[-1] if row.digests else row.root


def _ids(row: Row, index: int) -> list[int]:
    return row.tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
