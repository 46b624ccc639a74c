"""Which queues the next fetch may look at, and in which order (docs/architecture.md, capacity).

Redis hands out the first message it finds in the order of the keys of BRPOP, so this order is the
whole of the priority policy: interactive is never blocked, bulk is never starved.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from promptmill.core.jobs import Priority, QueueName

BULK_MINIMUM = 1  # bulk jobs in flight that interactive ones may not keep out


@dataclass(frozen=True, slots=True)
class Capacity:
    """``rows`` for all priorities and ``reserved`` further ones for interactive jobs only."""

    rows: int
    reserved: int

    @property
    def total(self) -> int:
        return self.rows + self.reserved


def order(queues: Sequence[str], in_flight: Mapping[Priority, int], capacity: Capacity) -> list[str]:
    """The queues to fetch from now, the preferred one first; within a priority the given order holds.

    Queues that hold no jobs (replies, maintenance) come first: they are rare and not ours to hold back.
    """
    parsed = [(name, QueueName.parse(name)) for name in queues]
    chosen = [name for name, queue in parsed if queue is None]
    for priority in _priorities(in_flight, capacity):
        chosen += [name for name, queue in parsed if queue is not None and queue.priority is priority]
    return chosen


def _priorities(in_flight: Mapping[Priority, int], capacity: Capacity) -> list[Priority]:
    bulk = in_flight.get(Priority.BULK, 0)
    lower = in_flight.get(Priority.STANDARD, 0) + bulk
    if lower + in_flight.get(Priority.INTERACTIVE, 0) >= capacity.total:
        return []
    if lower >= capacity.rows:
        return [Priority.INTERACTIVE]
    if bulk < BULK_MINIMUM:
        return [Priority.BULK, Priority.INTERACTIVE, Priority.STANDARD]
    return [Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK]


class Load(Protocol):
    """What the gate asks of the worker's registry."""

    capacity: Capacity

    def in_flight(self) -> Mapping[Priority, int]: ...

    def polled(self) -> None:
        """The consumer is about to fetch."""


class CapacityGate:
    """Celery's ``queue_order_strategy``.

    kombu builds one per channel from its name alone, so the load is a class attribute: a process
    has one engine at most. None (api, maintenance, beat) passes all queues in turn.
    """

    load: ClassVar[Load | None] = None

    def __init__(self, queues: Iterable[str] | None = None):
        self._queues = list(queues or ())

    def update(self, queues: Iterable[str]) -> None:
        self._queues = list(queues)

    def consume(self, n: int) -> list[str]:
        if self.load is None:
            return self._queues[:n]
        self.load.polled()
        return order(self._queues, self.load.in_flight(), self.load.capacity)

    def rotate(self, last_used: str) -> str:
        """The queue just served goes last, so that the models of a priority take turns."""
        if last_used in self._queues:
            self._queues.remove(last_used)
            self._queues.append(last_used)
        return last_used
