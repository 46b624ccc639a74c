"""Keys and values of the rows, one contiguous room per slot.

Room of a slot: keys [layers, 1, Hkv, capacity, D] and values [layers, 1, Hkv, capacity, Dv], both
allocated when the slot is opened and dropped when it is closed. The capacity is the reserved length
rounded up to BLOCK tokens. Reads are views of exactly the tokens that are there, so no row ever sees
padding, stale values or another row.
"""

from dataclasses import dataclass

import torch

BLOCK = 64

LayerViews = tuple[torch.Tensor, ...]  # one [1, Hkv, tokens, D] per layer


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token costs: the same in every layer."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class SlotKV:
    """Rooms by slot number. Not thread-safe: the engine thread alone uses it."""

    def __init__(self, shape: KVShape, device: torch.device):
        self.shape = shape
        self._device = device
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def bytes(self, tokens: int) -> int:
        """Bytes of a room for ``tokens`` tokens."""
        return _capacity(tokens) * self.shape.token_bytes

    @property
    def bytes_held(self) -> int:
        return sum(room.nbytes for rooms in (self._keys, self._values) for room in rooms.values())

    def open(self, slot: int, tokens: int) -> None:
        if slot in self._keys:
            raise RuntimeError(f"slot {slot} is open already")
        keys = self._room(self.shape.key_dim, tokens)
        self._values[slot] = self._room(self.shape.value_dim, tokens)  # may raise for memory: nothing is held then
        self._keys[slot] = keys

    def close(self, slot: int) -> None:
        del self._keys[slot], self._values[slot]

    def keys(self, slot: int, start: int, stop: int) -> LayerViews:
        return self._keys[slot].narrow(3, start, stop - start).unbind(0)

    def values(self, slot: int, start: int, stop: int) -> LayerViews:
        return self._values[slot].narrow(3, start, stop - start).unbind(0)

    def _room(self, dim: int, tokens: int) -> torch.Tensor:
        shape = self.shape
        return torch.empty(shape.layers, 1, shape.heads, _capacity(tokens), dim, dtype=shape.dtype, device=self._device)


def _capacity(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK
