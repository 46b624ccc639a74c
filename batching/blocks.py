"""Who holds which block of the KV cache: references, and what is free. Numbers only, no tensor.

A block is *free*, *held* (by one reference or more), or *resting*: nobody holds it, but a keeper (the
prefix cache) still knows what is in it. Resting blocks count as free, since ``take`` gives them away.
"""

from heapq import heapify, heappop, heappush
from typing import Protocol


class Keeper(Protocol):
    """Remembers what blocks contain, so that they can be held again. Every call costs at most O(log n)."""

    def keeps(self, block: int) -> bool: ...

    def rests(self, block: int) -> None:
        """Nobody holds the kept block any more."""

    def wakes(self, block: int) -> None:
        """The resting block is held again."""

    def evict(self) -> int:
        """Forget the resting block that is wanted least, and say which. Called only while one rests."""

    def check_integrity(self) -> None: ...


class BlockPool:
    """Blocks 0 to ``total`` - 1. Every ``take`` and ``share`` ends in one ``release``."""

    def __init__(self, total: int):
        self._refs = [0] * total
        self._free = list(range(total))
        heapify(self._free)
        self._resting: set[int] = set()
        self._keeper: Keeper | None = None

    def attach(self, keeper: Keeper) -> None:
        """From now on released blocks that ``keeper`` keeps will rest."""
        self._keeper = keeper

    @property
    def free(self) -> int:
        """How many blocks ``take`` can give."""
        return len(self._free) + len(self._resting)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._refs) - self.free

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self) -> int:
        """A block with one reference; its content is anything. The lowest free one, so that few rows keep to the
        front of the cache; when there is none, a resting one. Raises ValueError when all are held."""
        if self._free:
            block = heappop(self._free)
        elif self._resting and self._keeper is not None:
            block = self._keeper.evict()
            self._resting.remove(block)
        else:
            raise ValueError("all blocks are held")
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One reference more to a held or resting block. Raises ValueError for a free one: its content is lost."""
        if block in self._resting and self._keeper is not None:
            self._resting.remove(block)
            self._refs[block] = 1
            self._keeper.wakes(block)
        elif self._refs[block]:
            self._refs[block] += 1
        else:
            raise ValueError(f"block {block} is free and cannot be shared")

    def release(self, block: int) -> None:
        """One reference less. Raises ValueError when there is none."""
        if not self._refs[block]:
            raise ValueError(f"block {block} is not held")
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if self._keeper is not None and self._keeper.keeps(block):
            self._resting.add(block)
            self._keeper.rests(block)
        else:
            heappush(self._free, block)

    def forgotten(self, block: int) -> None:
        """The keeper has forgotten the block, for another reason than ``evict``."""
        if block in self._resting:
            self._resting.remove(block)
            heappush(self._free, block)

    def check_integrity(self) -> None:
        """Free + resting + held = all, each once. Raises AssertionError."""
        held = [block for block, refs in enumerate(self._refs) if refs]
        assert sorted([*self._free, *self._resting, *held]) == list(range(len(self._refs))), "a block was lost or doubled"
        if self._keeper is not None:
            assert all(map(self._keeper.keeps, self._resting)), "a block rests that nothing is known of"
            assert not any(map(self._keeper.keeps, self._free)), "a block is kept and free"
            self._keeper.check_integrity()
