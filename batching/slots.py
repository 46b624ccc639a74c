"""Slots: places of rows in the KV cache, with the bytes each may grow to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class Slots:
    """``total`` slots and ``budget`` bytes. Ask ``fits``, then ``take``; every take ends in one ``release``."""

    total: int
    budget: int
    used: int = 0
    _free: list[int] = field(init=False)
    _held: dict[int, int] = field(init=False, default_factory=dict)  # slot -> reserved bytes

    def __post_init__(self) -> None:
        self._free = list(range(self.total))
        heapify(self._free)

    @property
    def held(self) -> Mapping[int, int]:
        return self._held

    def fits(self, size: int) -> bool:
        return bool(self._free) and self.used + size <= self.budget

    def take(self, size: int) -> int:
        """The lowest free slot, so that few rows keep to the front of the cache."""
        slot = heappop(self._free)
        self._held[slot] = size
        self.used += size
        return slot

    def release(self, slot: int) -> None:
        self.used -= self._held.pop(slot)
        heappush(self._free, slot)

    def check_integrity(self) -> None:
        """Free + held = all, each once, and the bytes add up. Raises AssertionError."""
        assert sorted([*self._free, *self._held]) == list(range(self.total)), "a slot was lost or doubled"
        assert self.used == sum(self._held.values()) <= self.budget, "KV bytes do not add up"
