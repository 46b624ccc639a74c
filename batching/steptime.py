"""How long a step takes, learned while it runs, and what fits in a step of given length.

The law is ``t = a + b * T + c * L`` with T the tokens of the step and L the tokens of cache that its rows
attend to, together; a, b, c >= 0. It is fitted by least squares over relative errors, with exponential
forgetting, so it follows the machine. Three traps, and the answers:

* Steps that are all alike do not tell a, b and c apart, and would let them drift. A weak pull towards a
  *centre*, which follows the fit slowly, settles what the data leave open and keeps what was once learned.
* A step that is far too slow (a page fault, another process) must not spoil the fit: the error is taken
  relative to what it took, so the slower it was the less it weighs. When many in a row are off to one side,
  it is the machine that has changed: then the past is forgotten fast.
* The target is for the slowest steps, not the mean: p99 <= SLACK * target. So the ratios of actual to
  predicted times are kept, and a step is aimed so low that their 99th percentile stays within it.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

Vector = tuple[float, float, float]

FORGET = 0.995  # weight of the past at each step: about the last 200 count
FORGET_FAST = 0.8  # while predictions drift away
DRIFT = 0.2  # of the logarithm of actual to predicted time, in the mean over about the last
DRIFT_STEPS = 16
MOST_OFF = math.log(10.0)  # what a single step counts at most there
PULL = 2e-2  # of the centre, beside 1 for each observed step
FOLLOW = 0.02  # how far the centre moves to the fit at each step
WARMUP = 8  # steps whose ratios say nothing, since the start values may be far off
FIRST_SPREAD = 1.3  # at least, until
FEW_RATIOS = 100  # are known
MOST_SPREAD = 2.0  # smaller steps do not help against what is slower still
RATIOS = 512  # steps whose spread is known
PERCENTILE = 0.99
SLACK = 1.2  # times the target is what the slowest hundredth may take
MARGIN = 0.94  # of that, since the percentile is itself an estimate
LEAST_SHARE = 1 / 8  # prefill tokens per decoding row that a step has at least, so that prefill always goes on
LEAST_CHUNK = 16  # but no more than that
RESERVE = 1 / 16  # prefill tokens per row that the row limit leaves room for


class StepTime:
    """``start``: a (seconds), b (seconds per token), c (seconds per token of context) before anything is known;
    each > 0, rather too high than too low."""

    def __init__(self, start: Vector = (5e-3, 5e-4, 1e-6)):
        self._start = start
        self._centre = start
        self._fit = start
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._seen = 0
        self._drift = 0.0
        self._ratios: deque[float] = deque()
        self._sorted_ratios: list[float] = []

    @property
    def coefficients(self) -> Vector:
        """a, b, c as they are now."""
        return self._fit

    @property
    def spread(self) -> float:
        """The 99th percentile of actual to predicted time, from 1 to MOST_SPREAD. The slowest of all is left out,
        were they ever so few."""
        ratios = self._sorted_ratios
        least = FIRST_SPREAD if len(ratios) < FEW_RATIOS else 1.0
        if len(ratios) < 2:
            return least
        return min(MOST_SPREAD, max(least, ratios[min(len(ratios) - 2, math.ceil(PERCENTILE * len(ratios)) - 1)]))

    def predict(self, tokens: float, context: float) -> float:
        """Mean seconds of a step."""
        a, b, c = self._fit
        return a + b * tokens + c * context

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """A step took ``seconds``."""
        if not (seconds > 0 and math.isfinite(seconds)):
            return
        expected = max(self.predict(tokens, context), 1e-9)
        self._seen += 1
        if self._seen > WARMUP:
            self._note_ratio(seconds / expected)
        self._add((1.0, float(tokens), float(context)), seconds, 1 / max(expected, seconds) ** 2)
        self._fit = self._solve()
        self._centre = _vector(centre + FOLLOW * (fit - centre) for centre, fit in zip(self._centre, self._fit, strict=True))

    # -- decisions

    def rows_within(self, target_s: float, context: float, most: int) -> int:
        """How many rows with ``context`` tokens each may decode together, so that a step stays within the target
        with some prefill beside them; 1 to ``most``."""
        a, b, c = self._fit
        per_row = b * (1 + RESERVE) + c * context
        left = self._aim(target_s) - a
        return max(1, _count(left, per_row, most))

    def prefill_within(self, target_s: float, decode_rows: int, context: int, most: int) -> int:
        """How many prompt tokens may run beside ``decode_rows`` rows, which attend to ``context`` tokens together.

        All of ``most`` without a target or a row that decodes. Else what the target leaves, but at least one token
        to LEAST_SHARE of the decoding rows, whatever the target: prefill is never starved, and the step is not
        much longer for it.
        """
        if not target_s or not decode_rows:
            return most
        least = min(LEAST_CHUNK, math.ceil(decode_rows * LEAST_SHARE))
        room = _count(self._aim(target_s) - self.predict(decode_rows, context), self._fit[1], most)
        return min(most, max(least, room))

    def _aim(self, target_s: float) -> float:
        """What the mean step may take."""
        return target_s * min(1.0, SLACK * MARGIN / self.spread)

    # --

    @property
    def _drifts(self) -> bool:
        return abs(self._drift) > DRIFT

    def _note_ratio(self, ratio: float) -> None:
        self._drift += (max(-MOST_OFF, min(MOST_OFF, math.log(ratio))) - self._drift) / DRIFT_STEPS
        if self._drifts:
            return
        if len(self._ratios) == RATIOS:
            oldest = self._ratios.popleft()
            del self._sorted_ratios[bisect_left(self._sorted_ratios, oldest)]
        self._ratios.append(ratio)
        insort(self._sorted_ratios, ratio)

    def _add(self, x: Vector, y: float, weight: float) -> None:
        keep = FORGET_FAST if self._drifts else FORGET
        for i in range(3):
            self._products[i] = keep * self._products[i] + weight * x[i] * y
            for j in range(3):
                self._squares[i][j] = keep * self._squares[i][j] + weight * x[i] * x[j]

    def _normal_equations(self) -> tuple[list[list[float]], list[float], list[float]]:
        """Matrix and right side of the pulled least squares, in units of the centre, and these units; so seconds and
        microseconds per token are of one size."""
        unit = [max(centre, start / 100) for centre, start in zip(self._centre, self._start, strict=True)]
        matrix = [[self._squares[i][j] * unit[i] * unit[j] + (PULL if i == j else 0.0) for j in range(3)] for i in range(3)]
        right = [self._products[i] * unit[i] + PULL * self._centre[i] / unit[i] for i in range(3)]
        return matrix, right, unit

    def _solve(self) -> Vector:
        """The minimum over a, b, c >= 0 of the squared relative errors and the squared pulls.

        Of the 2^3 - 1 choices of coefficients that are not zero, the feasible one with the least error is the
        minimum, since the function is convex; nearly always it is the first, with all three.
        """
        matrix, right, unit = self._normal_equations()
        best, least = [0.0] * 3, math.inf
        for free in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
            part = _solve([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
            if min(part) < 0:
                continue
            error = -sum(value * right[i] for value, i in zip(part, free, strict=True))  # at a minimum of the subspace
            if error < least:
                least = error
                best = [0.0] * 3
                for value, i in zip(part, free, strict=True):
                    best[i] = value
            if len(free) == 3:
                break
        return _vector(value * size for value, size in zip(best, unit, strict=True))


def _count(left: float, each: float, most: int) -> int:
    """How many of ``each`` seconds fit in those ``left``, 0 to ``most``."""
    if left <= 0:
        return 0
    return most if each * most <= left else int(left / each)


def _vector(values: Iterable[float]) -> Vector:
    a, b, c = values
    return a, b, c


def _solve(matrix: list[list[float]], right: Sequence[float]) -> list[float]:
    """Solve a symmetric positive definite system by elimination; such a one needs no pivoting."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for k in range(size):
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, size + 1):
                rows[i][j] -= factor * rows[k][j]
    result = [0.0] * size
    for i in reversed(range(size)):
        result[i] = (rows[i][size] - sum(rows[i][j] * result[j] for j in range(i + 1, size))) / rows[i][i]
    return result
