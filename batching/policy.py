"""Who goes next: admission order, row limits, prefill order, the idle window. Pure functions over plain values.

R rows serve everybody, E further *reserved* rows serve interactive requests only, so that bulk
work never stands between an interactive request and a row. R may be less at times, when the target
latency or memory asks for it; what runs then goes on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batching.window import Window
from promptmill.core.jobs import Priority

RANK: Mapping[Priority, int] = {Priority.INTERACTIVE: 0, Priority.STANDARD: 1, Priority.BULK: 2}
BULK_MINIMUM = 1  # rows that bulk keeps under any load
PATIENCE = 8  # each so many prefill steps, the longest waiting row goes first whatever its rank
OVERTAKEN_MOST = 8  # times that others of equal rank may go before a waiting request
OVERTAKEN_S = 0.2  # and so long after the first of them
LENGTH_STEP = 64  # tokens; lengths that differ by less are alike
GAPS_KNOWN = 8  # arrivals that it takes to tell their rate
GAP_WEIGHT = 1 / 16  # of the newest gap in the mean
MOST_GAP_S = 1.0  # what a gap counts at most, lest a quiet night hide the burst of the morning
SILENT_GAPS = 3.0  # after so many mean gaps without an arrival the burst is over (in 95 % of the cases)
SILENT_S = 0.002  # but never sooner: the requests of one burst do not come all at once


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request. ``shared``: blocks of its beginning that are in the cache. ``length``: tokens.
    ``overtaken``: how often others of its rank went before it, the first time at ``overtaken_at``."""

    shared: int
    length: int
    overtaken: int = 0
    overtaken_at: float | None = None


def admission_order(bulk_running: int, *, wide_waits: bool = False) -> tuple[Priority, ...]:
    """The order in which priorities are asked for their next request.

    ``wide_waits``: a request that wants several rows, and came before all waiting bulk, lacks rows. Bulk's minimum
    then waits behind it, else one bulk row after another could keep it from ever having enough.
    """
    if bulk_running < BULK_MINIMUM and not wide_waits:
        return (Priority.BULK, Priority.INTERACTIVE, Priority.STANDARD)
    return (Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK)


def has_row(priority: Priority, running: Mapping[Priority, int], rows: int, reserved: int, width: int = 1) -> bool:
    """Whether a request of ``width`` rows may run beside ``running`` (rows by priority).

    One that is wider than ``rows`` runs when nothing else does.
    """
    total = sum(running.values())
    if not total:
        return True
    if total + width > rows + reserved:
        return False
    shared = running.get(Priority.STANDARD, 0) + running.get(Priority.BULK, 0)
    return priority is Priority.INTERACTIVE or shared + width <= rows


def choose(waiting: Sequence[Candidate], running_length: float | None, now: float) -> int:
    """Which of ``waiting`` (of one rank, in order of arrival, not empty) is admitted next.

    One that shares more with the cache goes first, then one whose length is near that of the running rows
    (their mean; None = none run), then the oldest; but nobody goes before a request that has been overtaken
    OVERTAKEN_MOST times, or first was OVERTAKEN_S ago.
    """

    def rank(index: int) -> tuple[int, int, int]:
        candidate = waiting[index]
        distance = 0.0 if running_length is None else abs(candidate.length - running_length)
        return -candidate.shared, int(distance // LENGTH_STEP), index

    last = next((index for index, candidate in enumerate(waiting) if _is_due(candidate, now)), len(waiting) - 1)
    return min(range(last + 1), key=rank)


def prefill_key(priority: Priority, admitted: int, step: int) -> tuple[int, int]:
    """Sort key of a row that prefills; ``admitted`` counts admissions, ``step`` counts prefill steps."""
    by_age = step % PATIENCE == PATIENCE - 1
    return (0 if by_age else RANK[priority], admitted)


def idle_due_at(waiting: Sequence[tuple[Priority, float]], window_s: float, rows: int, gap_s: float | None) -> float:
    """When an idle engine starts with ``waiting`` (priority, enqueued_at; not empty).

    Measured from the oldest enqueue time, so that a redelivered job does not wait twice.
    Interactive requests do not wait for company. ``gap_s``: mean time between arrivals, None = not known;
    it closes the window at once when the next arrival is not expected in it, and early when arrivals have
    stopped.
    """
    if any(priority is Priority.INTERACTIVE for priority, _ in waiting):
        window_s = 0.0
    arrivals = sorted(at for _, at in waiting)
    due = Window(rows, window_s, window_s).due_at(arrivals)
    if gap_s is None:
        return due
    newest = arrivals[-1]
    if newest + gap_s > due:
        return min(due, newest)
    return min(due, newest + max(SILENT_GAPS * gap_s, SILENT_S))


class ArrivalRate:
    """The mean time between arrivals, the latest ones weighing most.

    Needs no lock: ``gap_s`` may be read beside ``note``, which one thread at a time may call.
    """

    def __init__(self) -> None:
        self._last = math.nan
        self._gaps = 0
        self._mean = 0.0

    def note(self, now: float) -> None:
        """A request arrived."""
        if not math.isnan(self._last):
            self._gaps += 1
            # A plain mean at first, so that the first gap does not weigh more than the others.
            gap = min(max(0.0, now - self._last), MOST_GAP_S)
            self._mean += (gap - self._mean) * max(GAP_WEIGHT, 1 / self._gaps)
        self._last = now

    @property
    def gap_s(self) -> float | None:
        """None until enough requests have come."""
        return self._mean if self._gaps >= GAPS_KNOWN else None


def _is_due(candidate: Candidate, now: float) -> bool:
    if candidate.overtaken >= OVERTAKEN_MOST:
        return True
    return candidate.overtaken_at is not None and now - candidate.overtaken_at >= OVERTAKEN_S
