"""The jobs in this worker's hands: who holds which claim, what must stop, how full we are."""

import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from enum import StrEnum

from promptmill.core.clock import Clock
from promptmill.core.engine import Failed, Finished, Started, Tokens
from promptmill.core.jobs import Choice, Claim, Held, Outcome, Priority, Usage
from workers.gate import Capacity

MARK_SECONDS = 60.0
MAX_MARKS = 10_000


class Abort(StrEnum):
    """Why a run ends without an answer of the engine."""

    LOST = "lost"  # the claim is not ours any more: another attempt owns the job
    RELEASE = "release"  # we give the job back


End = Finished | Failed | Abort


@dataclass(eq=False, slots=True)
class Run:
    """One claim on its way through this worker. Fields below ``end`` belong to the engine's thread
    until ``end`` is set, then to the job's own."""

    claim: Claim
    window_s: float = 0.0
    end: Future[End] = field(default_factory=Future)
    halt: threading.Event = field(default_factory=threading.Event)  # stop retrying: the claim is given up
    submitted: bool = False
    cancelled: bool = False
    started: Started | None = None
    drawn: dict[int, list[Tokens]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The request's id at the engine."""
        return f"{self.claim.id}/{self.claim.attempt}"

    def resolve(self, end: End) -> bool:
        """Whether ``end`` is how the run ended; the first one counts."""
        try:
            self.end.set_result(end)
        except InvalidStateError:
            return False
        return True

    def partial(self) -> Outcome | None:
        """What was published before the run broke off; None if nothing was."""
        if not self.drawn:
            return None
        choices = tuple(self._choice(index) for index in range(self.claim.spec.sampling.n))
        count = sum(len(choice.token_ids) for choice in choices)
        return Outcome(choices, Usage(len(self.claim.spec.prompt_ids), count))

    def _choice(self, index: int) -> Choice:
        parts = self.drawn.get(index, [])
        scores = None if self.claim.spec.sampling.logprobs is None else tuple(score for part in parts for score in part.logprobs or ())
        return Choice(
            index,
            "".join(part.text for part in parts),
            tuple(token for part in parts for token in part.token_ids),
            (parts[-1].finish_reason if parts else None) or "cancelled",
            scores,
        )


class Registry:
    """Thread-safe. ``Condition`` brings a reentrant lock, which a signal handler that drains the
    worker needs: it may interrupt the main thread inside of any method here."""

    def __init__(self, capacity: Capacity, clock: Clock):
        self.capacity = capacity
        self._clock = clock
        self._changed = threading.Condition()
        self._runs: dict[str, Run] = {}  # by job id: of one job a worker holds one claim
        self._marks: dict[str, float] = {}  # cancelled before they came -> when to forget it
        self._in_flight: Counter[Priority] = Counter()
        self._polled_at = clock.monotonic()

    # -- claims

    def enter(self, run: Run) -> Run | None:
        """Hold the claim. Returns the run of an older attempt of the same job, which it displaces."""
        with self._changed:
            older = self._runs.get(run.claim.id)
            self._runs[run.claim.id] = run
            if self._marks.pop(run.claim.id, 0.0) > self._clock.monotonic():
                run.cancelled = True
            return older

    def leave(self, run: Run) -> None:
        with self._changed:
            if self._runs.get(run.claim.id) is run:
                del self._runs[run.claim.id]

    def of_job(self, job_id: str) -> Run | None:
        with self._changed:
            return self._runs.get(job_id)

    def of_request(self, request_id: str) -> Run | None:
        with self._changed:
            run = self._runs.get(request_id.rpartition("/")[0])
            return run if run is not None and run.id == request_id else None

    def held(self) -> list[Held]:
        with self._changed:
            return [run.claim.held for run in self._runs.values()]

    def runs(self) -> list[Run]:
        with self._changed:
            return list(self._runs.values())

    # -- cancelling: whichever of the two comes second tells the engine

    def submitted(self, run: Run) -> bool:
        """The engine has the run now. True = it was cancelled meanwhile and must be stopped there."""
        with self._changed:
            run.submitted = True
            return run.cancelled

    def cancel(self, job_id: str) -> Run | None:
        """The run to stop at the engine. Else None: it is not there yet, and a mark will stop it."""
        with self._changed:
            run = self._runs.get(job_id)
            if run is not None:
                run.cancelled = True
                return run if run.submitted else None
            self._mark(job_id)
            return None

    def _mark(self, job_id: str) -> None:
        now = self._clock.monotonic()
        self._marks = {job: until for job, until in self._marks.items() if until > now}
        if len(self._marks) < MAX_MARKS:  # the heartbeat cancels what finds no room here
            self._marks[job_id] = now + MARK_SECONDS

    # -- load: jobs fetched and not yet done, claimed or not

    def arrive(self, priority: Priority) -> None:
        with self._changed:
            self._in_flight[priority] += 1

    def depart(self, priority: Priority) -> None:
        with self._changed:
            self._in_flight[priority] -= 1
            self._changed.notify_all()

    def in_flight(self) -> Mapping[Priority, int]:
        with self._changed:
            return dict(self._in_flight)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no fetched job is left; False when ``timeout`` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._in_flight.values()), timeout)

    def polled(self) -> None:
        self._polled_at = self._clock.monotonic()

    def fetching(self, within_s: float) -> bool:
        """Whether the consumer asked the broker lately, or need not since every slot is taken."""
        with self._changed:
            full = sum(self._in_flight.values()) >= self.capacity.total
        return full or self._clock.monotonic() - self._polled_at <= within_s
