"""Runs the steps that the scheduler plans, and keeps a failure from spreading: a step that fails as a
whole is run in halves, down to single rows, so that only the culprits fail; one that does not fit the
memory comes again in smaller steps with fewer rows."""

from collections.abc import Sequence

from batching.meter import EngineMeter
from batching.pace import Pace
from batching.runner import OutOfMemory, RowError, RowResult, RowWork, Runner
from batching.scheduler import Plan
from promptmill.core.clock import Clock
from promptmill.core.logs import get_logger

FAILED = "engine_error"

log = get_logger(__name__)


class Stepper:
    def __init__(self, runner: Runner, pace: Pace, meter: EngineMeter, clock: Clock):
        self._runner = runner
        self._pace = pace
        self._meter = meter
        self._clock = clock
        self._ended: float | None = None  # when the last step ended, while they follow each other: what lies between counts

    def run(self, plan: Plan) -> list[RowResult | None]:
        """One result per piece of work; None = it did not run and is to be planned again."""
        began = self._clock.monotonic()
        since = began if self._ended is None else self._ended
        try:
            results: list[RowResult | None] = [*self._runner.step(plan.works)]
        except Exception as error:
            log.warning("step_failed", rows=len(plan.works), error=type(error).__name__, exc_info=True)
            results = self._bisect(plan.works, error)
        else:
            self._pace.observe(plan, self._clock.monotonic() - since)
        self._ended = self._clock.monotonic()
        self._meter.step(plan, self._ended - began)
        return results

    def rehearse(self, works: Sequence[RowWork], *, count: bool) -> None:
        """Run a step for the sake of its time, which is learned if it is to ``count``."""
        began = self._clock.monotonic()
        try:
            self._runner.step(works)
        except OutOfMemory as error:
            log.warning("step_failed", rows=len(works), error=str(error))
            self._pace.out_of_memory(_tokens(works))
        else:
            if count:
                tokens = _tokens(works)
                self._pace.learn(tokens, tokens + sum(work.past for work in works), self._clock.monotonic() - began)

    def idle(self) -> None:
        """No step follows at once."""
        self._ended = None

    def _bisect(self, works: Sequence[RowWork], error: Exception) -> list[RowResult | None]:
        if isinstance(error, OutOfMemory):
            self._pace.out_of_memory(_tokens(works))
        if len(works) > 1:
            middle = len(works) // 2
            return self._part(works[:middle]) + self._part(works[middle:])
        if isinstance(error, OutOfMemory) and len(works[0].token_ids) > 1:
            return [None]
        return [row_error(error)]

    def _part(self, works: Sequence[RowWork]) -> list[RowResult | None]:
        try:
            return [*self._runner.step(works)]
        except Exception as error:
            return self._bisect(works, error)


def _tokens(works: Sequence[RowWork]) -> int:
    return sum(len(work.token_ids) for work in works)


def row_error(error: Exception) -> RowError:
    return RowError(FAILED, f"the model failed on this request ({type(error).__name__})")
