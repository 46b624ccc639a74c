"""Who goes next: admission order, row limits, prefill order. Pure functions over plain values.

R rows serve everybody, E further *reserved* rows serve interactive requests only, so that bulk
work never stands between an interactive request and a row.
"""

from collections.abc import Mapping, Sequence

from batching.window import Window
from promptmill.core.jobs import Priority

RANK: Mapping[Priority, int] = {Priority.INTERACTIVE: 0, Priority.STANDARD: 1, Priority.BULK: 2}
BULK_MINIMUM = 1  # rows that bulk keeps under any load
PATIENCE = 8  # each so many prefill steps, the longest waiting row goes first whatever its rank


def admission_order(bulk_running: int) -> tuple[Priority, ...]:
    """The order in which priorities are asked for their next request."""
    if bulk_running < BULK_MINIMUM:
        return (Priority.BULK, Priority.INTERACTIVE, Priority.STANDARD)
    return (Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK)


def has_row(priority: Priority, running: Mapping[Priority, int], rows: int, reserved: int) -> bool:
    """Whether one more request of ``priority`` may run beside ``running`` (counts by priority)."""
    if sum(running.values()) >= rows + reserved:
        return False
    shared = running.get(Priority.STANDARD, 0) + running.get(Priority.BULK, 0)
    return priority is Priority.INTERACTIVE or shared < rows


def prefill_key(priority: Priority, admitted: int, step: int) -> tuple[int, int]:
    """Sort key of a row that prefills; ``admitted`` counts admissions, ``step`` counts prefill steps."""
    by_age = step % PATIENCE == PATIENCE - 1
    return (0 if by_age else RANK[priority], admitted)


def idle_due_at(waiting: Sequence[tuple[Priority, float]], window_s: float, rows: int) -> float:
    """When an idle engine starts with ``waiting`` (priority, enqueued_at; not empty).

    Measured from the oldest enqueue time, so that a redelivered job does not wait twice.
    Interactive requests do not wait for company.
    """
    if any(priority is Priority.INTERACTIVE for priority, _ in waiting):
        window_s = 0.0
    return Window(rows, window_s, window_s).due_at(sorted(at for _, at in waiting))
