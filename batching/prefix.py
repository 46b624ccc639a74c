"""The prefix cache: which block of the KV cache holds which beginning of a text.

A whole block is named by a digest over its parent's digest and its own ids, so a digest stands for all
tokens up to the block's end; the chain begins at a ``root`` of its tenant and model, across which nothing is
ever shared. A lookup goes block by block from the root and compares parent and ids: a collision of
digests is a miss.

When blocks run short the one whose last use is longest ago goes first, but never before those that
rest behind it in the chain: without its beginning a block cannot be found. A block may still lose its
beginning, when a row that holds it computed the beginning for itself; it is found again once the same
beginning is computed again, or it is evicted in its turn. There is at most one entry per block, so nothing
grows beyond the pool.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush

from batching.blocks import BlockPool

DIGEST_BYTES = 16


def root(tenant: str, model: str) -> bytes:
    """The digest that the first blocks of a tenant's texts for a model have as parent."""
    name = tenant.encode()
    return _digest(len(name).to_bytes(8), name + model.encode())


@dataclass(slots=True)
class _Entry:
    """``used``: a counter's value at the last use. ``queued``: stands in the eviction queue."""

    digest: bytes
    block: int
    parent: bytes
    ids: bytes
    used: int = 0
    resting: bool = False
    queued: bool = False


class PrefixCache:
    """The keeper of ``pool``. Not ``enabled``, it knows and keeps nothing."""

    def __init__(self, pool: BlockPool, *, enabled: bool = True):
        self.enabled = enabled
        self._pool = pool
        self._entries: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._children: defaultdict[bytes, set[bytes]] = defaultdict(set)  # digests by parent, which may be gone
        self._resting_children: Counter[bytes] = Counter()  # by parent
        self._queue: list[tuple[int, int]] = []  # heap of (used, block), at most one per entry; some out of date
        self._uses = 0
        pool.attach(self)

    def __len__(self) -> int:
        return len(self._entries)

    # -- names

    def child(self, parent: bytes, ids: Sequence[int]) -> bytes:
        """The digest of the block with ``ids`` behind ``parent``."""
        return _digest(parent, _packed(ids))

    def find(self, parent: bytes, ids: Sequence[int]) -> tuple[bytes, int] | None:
        """The digest and the block with ``ids`` behind ``parent``. To use the block, ``share`` it before any ``take``."""
        if not self.enabled:
            return None
        packed = _packed(ids)
        entry = self._entries.get(_digest(parent, packed))
        if entry is None or entry.ids != packed or entry.parent != parent:
            return None
        self._touch(entry)
        return entry.digest, entry.block

    def insert(self, parent: bytes, ids: Sequence[int], block: int) -> bytes:
        """Remember that the held ``block`` has ``ids`` behind ``parent``; the digest to go on from.

        Of several blocks with one content the first is remembered; the others stay with their rows.
        """
        if not self.enabled:
            return parent
        packed = _packed(ids)
        digest = _digest(parent, packed)
        entry = self._entries.get(digest)
        if entry is None:
            assert self._pool.refs(block), "a block must be held when it is named"
            assert block not in self._by_block, "a block has one content"
            entry = _Entry(digest, block, parent, packed)
            self._entries[digest] = self._by_block[block] = entry
            self._children[parent].add(digest)
        elif entry.ids != packed or entry.parent != parent:
            return _digest(digest, packed)  # a collision: what follows must not be found behind the other text
        self._touch(entry)
        return digest

    def forget(self, block: int) -> list[int]:
        """``block`` must not be shared again, nor may what was computed from it: blocks behind it are forgotten with
        it. All that were, in no order; [] when it was not known."""
        entry = self._by_block.get(block)
        doomed = [] if entry is None else [entry]
        gone = []
        while doomed:
            entry = doomed.pop()
            doomed += [self._entries[digest] for digest in self._children.get(entry.digest, ())]
            if entry.queued:
                self._queue = [item for item in self._queue if item[1] != entry.block]
                heapify(self._queue)
            self._remove(entry)
            self._pool.forgotten(entry.block)
            gone.append(entry.block)
        return gone

    # -- the pool's keeper

    def keeps(self, block: int) -> bool:
        return block in self._by_block

    def rests(self, block: int) -> None:
        entry = self._by_block[block]
        entry.resting = True
        self._touch(entry)
        self._resting_children[entry.parent] += 1
        self._queue_if_evictable(entry)

    def wakes(self, block: int) -> None:
        entry = self._by_block[block]
        entry.resting = False
        self._one_resting_less(entry.parent)

    def evict(self) -> int:
        while True:
            used, block = heappop(self._queue)
            entry = self._by_block[block]
            entry.queued = False
            if not self._evictable(entry):
                continue  # it is queued again when it becomes so
            if used == entry.used:
                self._remove(entry)
                return block
            self._queue_if_evictable(entry)  # used meanwhile

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong."""
        entries = self._entries.values()
        assert {entry.block: entry for entry in entries} == self._by_block, "a block has two names"
        assert sum(map(len, self._children.values())) == len(entries), "a child was lost"
        assert all(entry.digest in self._children.get(entry.parent, ()) for entry in entries), "a child is not its parent's"
        assert all(self._children.values()), "a parent without children is remembered"
        assert Counter(entry.parent for entry in entries if entry.resting) == self._resting_children, "resting blocks do not add up"
        assert all(entry.resting == (self._pool.refs(entry.block) == 0) for entry in entries), "a block both rests and is held"
        assert all(entry.queued for entry in entries if self._evictable(entry)), "a block cannot be evicted"
        assert sorted(block for _, block in self._queue) == sorted(entry.block for entry in entries if entry.queued), "the queue is wrong"

    # --

    def _touch(self, entry: _Entry) -> None:
        self._uses += 1
        entry.used = self._uses

    def _evictable(self, entry: _Entry) -> bool:
        return entry.resting and entry.digest not in self._resting_children

    def _queue_if_evictable(self, entry: _Entry) -> None:
        if not entry.queued and self._evictable(entry):
            entry.queued = True
            heappush(self._queue, (entry.used, entry.block))

    def _one_resting_less(self, parent: bytes) -> None:
        self._resting_children[parent] -= 1
        if not self._resting_children[parent]:
            del self._resting_children[parent]
            if (entry := self._entries.get(parent)) is not None:
                self._queue_if_evictable(entry)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.digest], self._by_block[entry.block]
        siblings = self._children[entry.parent]
        siblings.remove(entry.digest)
        if not siblings:
            del self._children[entry.parent]
        if entry.resting:
            self._one_resting_less(entry.parent)


def _digest(parent: bytes, packed: bytes) -> bytes:
    return blake2b(parent + packed, digest_size=DIGEST_BYTES).digest()


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
