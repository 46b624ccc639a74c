"""The micro-batch window: many threads bring one item each, one call runs them together.

``Window`` decides when a batch is due, from plain numbers. ``MicroBatcher`` is the effect around
it: the thread whose item is the oldest leads, gathers until the window is due, runs the batch and
hands each caller its own result. There is no thread of its own, so a lone item pays no switch.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Condition, Event
from typing import Generic, Literal, TypeVar

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import Unavailable

T = TypeVar("T")
R = TypeVar("R")

Reason = Literal["size", "time", "gap"]


@dataclass(frozen=True, slots=True)
class Window:
    """Size or deadline, counted from the *first arrival*.

    A lone item is due after ``probe_s``. When a second one arrives within that time, the window
    stretches to ``max_wait_s`` from the first. ``max_size`` items are due at once.
    """

    max_size: int
    probe_s: float
    max_wait_s: float

    def due_at(self, arrivals: Sequence[float]) -> float:
        """When the items that came at ``arrivals`` (oldest first, not empty) must go."""
        if len(arrivals) >= self.max_size:
            return -math.inf
        return arrivals[0] + (self.max_wait_s if self._stretched(arrivals) else self.probe_s)

    def reason(self, arrivals: Sequence[float], now: float) -> Reason | None:
        """Why they must go now: ``size``, ``time`` (max_wait_s), ``gap`` (no second one in probe_s); or None."""
        if now < self.due_at(arrivals):
            return None
        if len(arrivals) >= self.max_size:
            return "size"
        return "time" if self._stretched(arrivals) else "gap"

    def _stretched(self, arrivals: Sequence[float]) -> bool:
        return len(arrivals) > 1 and arrivals[1] - arrivals[0] <= self.probe_s


class _Call(Generic[T, R]):
    """One caller's item and, later, its answer. ``woken`` is set with the answer or to make it leader."""

    __slots__ = ("arrived", "error", "item", "result", "woken")

    def __init__(self, item: T, arrived: float):
        self.item = item
        self.arrived = arrived
        self.woken = Event()
        self.result: list[R] = []
        self.error: BaseException | None = None

    @property
    def answered(self) -> bool:
        return bool(self.result) or self.error is not None


class MicroBatcher(Generic[T, R]):
    """``result = batcher(item)`` from any number of threads.

    One batch runs at a time; what arrives meanwhile gathers, so with ``probe_s`` and
    ``max_wait_s`` 0 a lone item runs at once and a busy batcher still makes batches.

    ``run`` gets at most ``max_size`` items and returns one result each, in order. Its error reaches
    every caller of the batch; with ``retry_alone`` the items of a failed batch of several are run
    again one by one, so that a bad item cannot fail its neighbours (``run`` must allow that).
    ``on_batch(size, waited_s, reason)`` is told of each batch before it runs.
    """

    def __init__(
        self,
        run: Callable[[Sequence[T]], Sequence[R]],
        *,
        max_size: int,
        probe_s: float,
        max_wait_s: float,
        clock: Clock = SYSTEM_CLOCK,
        on_batch: Callable[[int, float, Reason], None] | None = None,
        retry_alone: bool = False,
    ):
        self._run = run
        self._window = Window(max_size, probe_s, max_wait_s)
        self._clock = clock
        self._on_batch = on_batch
        self._retry_alone = retry_alone
        self._changed = Condition()
        self._calls: deque[_Call[T, R]] = deque()
        self._led = False  # a leader gathers or runs; it is always the caller of the oldest item
        self._closed = False

    def __call__(self, item: T) -> R:
        """The item's own result. Raises what ``run`` raised, or Unavailable once closed."""
        with self._changed:
            if self._closed:
                raise Unavailable("this process is shutting down")
            call: _Call[T, R] = _Call(item, self._clock.monotonic())
            self._calls.append(call)
            leads = not self._led
            self._led = True
            self._changed.notify()
        if not leads:
            call.woken.wait()
        if not call.answered:
            self._lead(call)
        if call.error is not None:
            raise call.error
        return call.result[0]

    def close(self) -> None:
        """What waits is run at once; later calls raise Unavailable."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _lead(self, own: _Call[T, R]) -> None:
        batch: list[_Call[T, R]] = []
        try:
            batch, reason = self._gather()
            self._answer(batch, reason)
        finally:
            self._hand_over(own)
            for call in batch:
                call.woken.set()

    def _gather(self) -> tuple[list[_Call[T, R]], Reason]:
        """Wait until the window is due, then take the batch."""
        with self._changed:
            while True:
                arrivals = [call.arrived for call in islice(self._calls, self._window.max_size)]
                now = self._clock.monotonic()
                reason = self._window.reason(arrivals, now)
                if reason is None and self._closed:
                    reason = "time"
                if reason is not None:
                    return [self._calls.popleft() for _ in arrivals], reason
                self._changed.wait(self._window.due_at(arrivals) - now)

    def _answer(self, batch: list[_Call[T, R]], reason: Reason) -> None:
        try:
            if self._on_batch is not None:
                self._on_batch(len(batch), self._clock.monotonic() - batch[0].arrived, reason)
            self._compute(batch)
        except BaseException as error:
            if self._retry_alone and len(batch) > 1 and isinstance(error, Exception):
                for call in batch:
                    self._answer_alone(call)
            else:
                for call in batch:
                    call.error = error

    def _answer_alone(self, call: _Call[T, R]) -> None:
        try:
            self._compute([call])
        except Exception as error:
            call.error = error

    def _compute(self, batch: Sequence[_Call[T, R]]) -> None:
        results = self._run([call.item for call in batch])
        if len(results) != len(batch):
            raise ValueError(f"a batch of {len(batch)} got {len(results)} results")
        for call, result in zip(batch, results, strict=True):
            call.result.append(result)

    def _hand_over(self, own: _Call[T, R]) -> None:
        """Make the caller of the oldest waiting item the leader."""
        with self._changed:
            if self._calls and self._calls[0] is own:  # interrupted while it gathered
                self._calls.popleft()
            if self._calls:
                self._calls[0].woken.set()
            else:
                self._led = False
