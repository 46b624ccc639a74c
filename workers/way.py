"""The way of a job through a worker: claim, open its log, generate, commit, cache, tell.

One task thread walks it per job. The order of the last three is the promise of the product:
whoever sees the terminal event can read the result. Steps that break off are values (``Abort``);
trouble of SQL or Redis gives the job back and is never charged to it.
"""

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any

from promptmill.core.clock import Clock
from promptmill.core.engine import Engine, Failed, Finished, GenRequest, Resumable
from promptmill.core.errors import Rejected, Unavailable
from promptmill.core.events import StreamEvent, started, terminal
from promptmill.core.jobs import Claim, Finish, Job, JobError, JobRef, Outcome, Priority, SamplingParams, Status, Timings
from promptmill.core.logs import get_logger
from promptmill.core.metrics import Metrics
from promptmill.core.ports import Append, JobQueue, JobStore, ResultCache
from workers.claims import Arrival
from workers.flusher import Flusher
from workers.registry import Abort, End, Registry, Run

MARKER_SECONDS = 30.0  # a log that cannot be opened for so long gives its job back
DELIVERY_SECONDS = 5.0  # after that SQL ends the stream: its viewers ask there
FIRST_RETRY_S, LAST_RETRY_S = 0.05, 2.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the way is built of. ``claim`` and ``finish`` are micro-batched."""

    store: JobStore
    queue: JobQueue
    cache: ResultCache
    engine: Engine
    flusher: Flusher
    registry: Registry
    metrics: Metrics
    clock: Clock
    worker: str
    claim: Callable[[Arrival], Run | None]
    finish: Callable[[Finish], bool]
    finished: Callable[[Claim], None]  # told of each committed finish


class JobWay:
    def __init__(self, parts: Parts):
        self._p = parts
        self._closing = False

    def run(self, job_id: str) -> str:
        """Bring the job as far as this worker can; the word says how far, for Flower."""
        log.info("received", job=job_id, worker=self._p.worker)
        try:
            run = self._p.claim(Arrival(job_id, self._p.clock.monotonic()))
        except Unavailable as error:  # the row and the sweep own the job
            log.warning("claim unavailable", job=job_id, reason=error.message)
            return "unclaimed"
        if run is None:
            return "not ours"
        try:
            return self._settle(run, self._generate(run))
        finally:
            self._p.registry.leave(run)

    # -- stopping, from other threads

    def cancel(self, job_id: str) -> bool:
        """Stop a job at the next step; True if the engine has it. Else a mark stops it when it comes."""
        run = self._p.registry.cancel(job_id)
        if run is not None:
            self._p.engine.cancel(run.id)
        return run is not None

    def abort(self, run: Run, why: Abort) -> None:
        """End the run without an answer. A run that is being committed only stops retrying."""
        run.halt.set()
        if run.resolve(why):
            self._p.engine.cancel(run.id)
            self._p.flusher.drop(run.claim.id, run.claim.attempt)

    def lose(self, job_id: str, attempt: int) -> None:
        """The claim (id, attempt) is not ours any more; another attempt of the job is not touched."""
        run = self._p.registry.of_job(job_id)
        if run is not None and run.claim.attempt == attempt:
            self.abort(run, Abort.LOST)

    def give_back(self, given_up: Iterable[Resumable]) -> None:
        """Requests that a draining engine has let go without an event: their jobs run elsewhere."""
        for left in given_up:
            run = self._p.registry.of_request(left.id)
            if run is not None:
                self.abort(run, Abort.RELEASE)

    def close(self) -> None:
        """Give all jobs back; what is claimed from now on is given back at once."""
        self._closing = True
        for run in self._p.registry.runs():
            self.abort(run, Abort.RELEASE)

    # -- the steps

    def _generate(self, run: Run) -> End:
        if self._closing:
            self.abort(run, Abort.RELEASE)
        broken = self._open_log(run)
        if broken is not None:
            self.abort(run, broken)
            return run.end.result()
        try:
            self._p.engine.submit(self.request(run.claim))
        except Rejected as error:
            return Failed(run.id, error.code, error.message)
        except Unavailable:  # the engine closes
            self.abort(run, Abort.RELEASE)
        if self._p.registry.submitted(run) or run.halt.is_set():
            self._p.engine.cancel(run.id)
        return run.end.result()

    def _open_log(self, run: Run) -> Abort | None:
        """Write the attempt's marker, which fences earlier attempts out of the log."""
        claim = run.claim
        marker = self._p.flusher.publish(started(claim.id, claim.attempt, claim.queue.model))
        either: list[Future[Any]] = [marker, run.end]
        wait(either, MARKER_SECONDS, FIRST_COMPLETED)
        if marker.done() and not marker.cancelled():
            return Abort.LOST if marker.result() is Append.FENCED else None
        log.warning("log not opened", job=claim.id, attempt=claim.attempt, worker=self._p.worker)
        return Abort.RELEASE

    def request(self, claim: Claim) -> GenRequest:
        """The run as the engine sees it."""
        spec = claim.spec
        return GenRequest(
            id=f"{claim.id}/{claim.attempt}",
            model=claim.queue.model,
            prompt_ids=spec.prompt_ids,
            sampling=seeded(spec.sampling, claim.id),
            priority=claim.queue.priority,
            enqueued_at=self._p.clock.monotonic(),
            tenant=claim.tenant,
        )

    def _settle(self, run: Run, end: End) -> str:
        if isinstance(end, Failed) and not self._p.engine.alive:
            end = Abort.RELEASE  # the engine died; that is not this job's failure
        if isinstance(end, Abort):
            if end is Abort.RELEASE:
                self._release(run)
            return str(end)
        finish = self._verdict(run, end)
        try:
            committed = self._commit(run, finish)
        except Exception:  # else the sweep would bring this row back for ever
            log.exception("result not storable", job=finish.id, attempt=finish.attempt, worker=finish.worker)
            finish = replace(finish, status=Status.FAILED, outcome=None, error=JobError("internal_error", "the result cannot be stored"))
            committed = self._commit(run, finish)
        if not committed:
            self._p.flusher.drop(run.claim.id, run.claim.attempt)
            log.warning("result discarded", job=run.claim.id, attempt=run.claim.attempt, worker=self._p.worker)
            return "fenced" if committed is False else "uncommitted"
        self._count(run, finish)
        self._fill_cache(run.claim, finish)
        self._deliver(run.claim, finish)
        return str(finish.status)

    def _verdict(self, run: Run, end: Finished | Failed) -> Finish:
        status, outcome, error = verdict(end, run.partial)
        prefill_s, decode_s = (end.prefill_s, end.decode_s) if isinstance(end, Finished) else (None, None)
        waited_s, window_s = (run.started.waited_s, run.started.window_s) if run.started else (0.0, 0.0)
        timings = Timings(
            queue_ms=_ms(run.claim.queued_ms / 1000 + waited_s),
            window_ms=_ms(run.window_s + window_s),
            prefill_ms=_ms(prefill_s),
            decode_ms=_ms(decode_s),
            total_ms=_ms(max(0.0, self._p.clock.time() - run.claim.created_at)),
        )
        return Finish(run.claim.id, run.claim.attempt, self._p.worker, status, outcome, error, timings)

    def _commit(self, run: Run, finish: Finish) -> bool | None:
        """True = the row is terminal with this result, False = fenced, None = SQL stayed away until
        the worker had to stop. While SQL is down the result stays here, in memory."""
        delay = FIRST_RETRY_S
        while True:
            last_try = run.halt.is_set()
            try:
                return self._p.finish(finish)
            except Unavailable as error:
                if last_try:
                    return None
                log.warning("finish unavailable", job=finish.id, attempt=finish.attempt, worker=finish.worker, reason=error.message)
            run.halt.wait(delay)
            delay = min(LAST_RETRY_S, 2 * delay)

    def _count(self, run: Run, finish: Finish) -> None:
        claim, metrics = run.claim, self._p.metrics
        metrics.jobs.labels(claim.queue.priority, finish.status).inc()
        metrics.e2e.labels(claim.queue.priority).observe((finish.timings.total_ms or 0.0) / 1000)
        if finish.status is Status.CANCELLED:
            metrics.jobs_cancelled.labels("requested").inc()
        log.info(
            "finished",
            job=claim.id,
            tenant=claim.tenant,
            attempt=claim.attempt,
            worker=finish.worker,
            status=str(finish.status),
            tokens=finish.outcome.tokens if finish.outcome else 0,
            code=finish.error.code if finish.error else None,
        )
        if claim.queue.priority is not Priority.INTERACTIVE:
            self._p.finished(claim)

    def _fill_cache(self, claim: Claim, finish: Finish) -> None:
        if finish.status is not Status.SUCCEEDED or finish.outcome is None or claim.cache == "off":
            return
        if claim.spec.sampling.deterministic:
            try:
                self._p.cache.put(claim.tenant, claim.spec.cache_key(claim.model_revision), finish.outcome)
            except Exception:  # a cache never fails a job
                log.exception("cache not filled", job=claim.id)

    def _deliver(self, claim: Claim, finish: Finish) -> None:
        event = terminal(
            claim.id,
            claim.attempt,
            finish.status,
            outcome=finish.outcome,
            error=finish.error,
            timings=finish.timings,
            cache=claim.cache,
        )
        self._append_last(claim, [event])

    def _release(self, run: Run) -> None:
        """Give the job back under its fence and send it again."""
        claim = run.claim
        try:
            rows = self._p.store.release_many(self._p.worker, [claim.held])
        except Unavailable as error:  # the lease gives it back
            log.warning("release unavailable", job=claim.id, attempt=claim.attempt, worker=self._p.worker, reason=error.message)
            return
        for job in rows:
            log.info("released", job=job.id, tenant=job.tenant, attempt=claim.attempt, worker=self._p.worker, status=str(job.status))
            if job.status is Status.QUEUED:
                self._p.queue.send([JobRef(job.id, claim.queue)])
            else:
                outcome = run.partial() if job.attempt == claim.attempt else None
                self._append_last(claim, ending(replace(job, outcome=outcome)))

    def _append_last(self, claim: Claim, events: list[StreamEvent]) -> None:
        """Wait for the terminal event to be in the log, so that what is kept for the stream stays
        bounded by the running jobs."""
        verdicts = [self._p.flusher.publish(event) for event in events]
        try:
            verdict = verdicts[-1].result(DELIVERY_SECONDS)
        except (FutureTimeout, CancelledError):
            self._p.flusher.drop(claim.id, events[-1].cursor.attempt)
            log.warning("not delivered", job=claim.id, attempt=claim.attempt, worker=self._p.worker)
        else:
            log.info("delivered", job=claim.id, tenant=claim.tenant, attempt=claim.attempt, worker=self._p.worker, verdict=str(verdict))


def verdict(end: Finished | Failed, partial: Callable[[], Outcome | None]) -> tuple[Status, Outcome | None, JobError | None]:
    """What an engine's answer means for the job. A failed job keeps what was published: the id of
    its terminal event counts those tokens."""
    if isinstance(end, Failed):
        return Status.FAILED, partial(), JobError(end.code, end.message)
    return (Status.CANCELLED if end.reason == "cancelled" else Status.SUCCEEDED), end.outcome, None


def seeded(sampling: SamplingParams, job_id: str) -> SamplingParams:
    """A sampled request without a seed gets one of its job's id: every attempt draws the same text."""
    if sampling.deterministic:
        return sampling
    return replace(sampling, seed=int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8]) >> 1)


def ending(job: Job) -> list[StreamEvent]:
    """Marker and terminal event of a row that became terminal under nobody's hands."""
    return [
        started(job.id, job.attempt, job.model),
        terminal(job.id, job.attempt, job.status, outcome=job.outcome, error=job.error, timings=job.timings, cache=job.cache),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
