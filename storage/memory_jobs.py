"""In-memory twins of the job store and the job queue: one process, no durability, the same rules.

They pass the contract tests of the real ones (tests/contract/test_job_store.py), so tests of what
stands above a store can use them.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import IdempotencyMismatch
from promptmill.core.jobs import Claim, Finish, Held, Job, JobRef, NewJob, Priority, QueueName, Status
from promptmill.core.ports import Depth, Heartbeat, Page, Submitted
from storage.rows import job_of_new
from storage.sweep import OVERTAKEN_SECONDS, RESEND_MOST, RESEND_SECONDS, SANE_LEASES


@dataclass(slots=True)
class _Row:
    """A job and what only the store knows of it; the columns of the same names."""

    job: Job
    lease_until: float = 0.0
    fed_at: float | None = None
    publish_due: float | None = None
    resends: int = 0

    @property
    def queue(self) -> QueueName:
        return QueueName(self.job.priority, self.job.model)

    @property
    def queued(self) -> bool:
        return self.job.status is Status.QUEUED

    @property
    def waiting(self) -> bool:
        return self.queued and self.fed_at is None

    @property
    def published(self) -> bool:
        return self.queued and self.fed_at is not None

    def publish(self, now: float, due_in: float) -> None:
        self.fed_at, self.publish_due = now, now + due_in

    def held_as(self, worker: str, attempt: int) -> bool:
        job = self.job
        return job.status is Status.RUNNING and job.worker == worker and job.attempt == attempt


class MemoryJobStore:
    """The JobStore port in a dict under one lock."""

    def __init__(self, *, lease_seconds: float = 8.0, idempotency_seconds: float = 86400.0, clock: Clock = SYSTEM_CLOCK):
        self._lease = lease_seconds
        self._key_life = idempotency_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[str, _Row] = {}
        self._keys: dict[tuple[str, str, str], tuple[str, str, float]] = {}  # -> body hash, job id, expiry

    def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        with self._lock:
            now = self._clock.time()
            keys = {scope: value for scope, value in self._keys.items() if value[2] > now}
            rows: dict[str, _Row] = {}
            answers = []
            for new in jobs:
                key = new.idempotency
                if key is not None:
                    scope = (new.tenant, key.route, key.key)
                    body_hash, job_id, _ = keys.setdefault(scope, (key.body_hash, new.id, now + self._key_life))
                    if body_hash != key.body_hash:
                        raise IdempotencyMismatch("this idempotency key was used for another request", param="Idempotency-Key")
                    if job_id != new.id:
                        answers.append(Submitted((rows.get(job_id) or self._rows[job_id]).job, True))
                        continue
                row = rows[new.id] = _Row(job_of_new(new))
                if new.priority is Priority.INTERACTIVE and row.queued:
                    row.publish(self._clock.lease(), RESEND_SECONDS)
                answers.append(Submitted(row.job))
            self._keys = keys
            self._rows.update(rows)
            return answers

    def get(self, job_id: str, tenant: str = "default") -> Job | None:
        with self._lock:
            row = self._rows.get(job_id)
            return row.job if row is not None and row.job.tenant == tenant else None

    def page(
        self,
        tenant: str = "default",
        *,
        status: Status | None = None,
        after: str | None = None,
        limit: int = 20,
        batch_id: str | None = None,
    ) -> Page:
        def wanted(job: Job) -> bool:
            in_batch = batch_id is None or job.batch_id == batch_id
            return job.tenant == tenant and in_batch and status in (None, job.status) and (after is None or job.id < after)

        with self._lock:
            found = sorted((row.job for row in self._rows.values() if wanted(row.job)), key=lambda job: job.id, reverse=True)
        return Page(tuple(found[:limit]), len(found) > limit)

    def claim_many(self, ids: Sequence[str], worker: str, node: str) -> list[Claim | None]:
        with self._lock:
            return [self._claim(id, worker, node) for id in ids]

    def _claim(self, id: str, worker: str, node: str) -> Claim | None:
        row = self._rows.get(id)
        if row is None or not row.queued:
            return None
        wall = self._clock.time()
        job = row.job
        started = job.started_at if job.started_at is not None else max(job.created_at, wall)
        row.job = job = replace(job, status=Status.RUNNING, attempt=job.attempt + 1, worker=worker, node=node, started_at=started)
        row.lease_until = self._clock.lease() + self._lease
        row.publish_due = None
        queued_ms = max(0.0, wall - job.created_at) * 1000
        return Claim(id, job.attempt, job.tenant, row.queue, job.model_revision, job.spec, job.cache, job.created_at, queued_ms)

    def heartbeat(self, worker: str, held: Sequence[Held]) -> Heartbeat:
        with self._lock:
            renewed = {claim: self._rows[claim.id] for claim in held if self._holds(worker, claim)}
            for row in renewed.values():
                row.lease_until = self._clock.lease() + self._lease
            cancelled = frozenset(row.job.id for row in renewed.values() if row.job.cancel_requested)
            return Heartbeat(frozenset(renewed), cancelled)

    def finish_many(self, items: Sequence[Finish]) -> list[bool]:
        if any(not item.status.terminal for item in items):
            raise ValueError("a finish needs a terminal status")
        with self._lock:
            return [self._finish(item) for item in items]

    def _finish(self, item: Finish) -> bool:
        row = self._rows.get(item.id)
        if row is None:
            return False
        if not row.held_as(item.worker, item.attempt):
            job = row.job
            return (job.status, job.attempt, job.worker) == (item.status, item.attempt, item.worker)
        row.job = replace(
            row.job,
            status=item.status,
            outcome=item.outcome,
            error=item.error,
            timings=item.timings,
            finished_at=self._finished_at(row.job),
        )
        return True

    def release_many(self, worker: str, held: Sequence[Held]) -> list[Job]:
        with self._lock:
            rows = [self._rows[claim.id] for claim in held if self._holds(worker, claim)]
            for row in rows:
                if row.job.cancel_requested:
                    row.job = replace(row.job, status=Status.CANCELLED, finished_at=self._finished_at(row.job))
                else:
                    self._requeue(row, row.job.losses, due_in=0.0)
            return sorted((row.job for row in rows), key=lambda job: job.id)

    def cancel(self, job_id: str, tenant: str = "default") -> Job | None:
        with self._lock:
            row = self._rows.get(job_id)
            if row is None or row.job.tenant != tenant:
                return None
            job = row.job
            if row.queued:
                done = {"status": Status.CANCELLED, "attempt": job.attempt + 1, "finished_at": self._finished_at(job)}
                row.job = replace(job, cancel_requested=True, **done)  # type: ignore[arg-type]
                row.fed_at = row.publish_due = None
            elif not job.status.terminal:
                row.job = replace(job, cancel_requested=True)
            return row.job

    def feed(self, queue: QueueName, bound: int) -> list[JobRef]:
        with self._lock:
            room = bound - len(self._where(lambda row: row.published and row.queue == queue))
            rows = self._where(lambda row: row.waiting and row.queue == queue)[: max(0, room)]
            for row in rows:
                row.publish(self._clock.lease(), RESEND_SECONDS)
                row.resends = 0
            return [JobRef(row.job.id, queue) for row in rows]

    def feedable(self) -> list[QueueName]:
        with self._lock:
            return _queues(self._where(lambda row: row.waiting))

    def recover(self, limit: int = 1000) -> list[Job]:
        with self._lock:
            now = self._clock.lease()

            def expired(row: _Row) -> bool:
                lease_over = row.lease_until < now or row.lease_until > now + SANE_LEASES * self._lease
                return row.job.status is Status.RUNNING and lease_over

            rows = self._where(expired)[:limit]
            for row in rows:
                job = row.job
                if job.cancel_requested:
                    ended = {"status": Status.CANCELLED, "attempt": job.attempt + 1, "finished_at": self._finished_at(job)}
                    row.job = replace(job, worker=None, node=None, losses=job.losses + 1, **ended)  # type: ignore[arg-type]
                else:
                    self._requeue(row, job.losses + 1, due_in=RESEND_SECONDS)
            return [row.job for row in rows]

    def lost(self, empty: Collection[QueueName], limit: int = 1000) -> list[JobRef]:
        with self._lock:
            now = self._clock.lease()
            found: list[JobRef] = []
            for queue in self._due_queues(now):
                claimed = self._where(lambda row, queue=queue: row.queue == queue and not row.queued)  # type: ignore[misc]
                read_until = max((row.fed_at for row in claimed if row.fed_at is not None and row.fed_at <= now), default=None)
                for row in self._where(lambda row, queue=queue: row.queue == queue and _due(row, now)):  # type: ignore[misc]
                    fed_at = row.fed_at if row.fed_at is not None and row.fed_at <= now else 0.0
                    overtaken = read_until is not None and fed_at <= read_until - OVERTAKEN_SECONDS
                    if len(found) < limit and (queue in empty or overtaken):
                        row.resends += 1
                        row.publish(now, min(RESEND_MOST, RESEND_SECONDS * 2**row.resends))
                        found.append(JobRef(row.job.id, queue))
            return found

    def published(self) -> list[QueueName]:
        with self._lock:
            return self._due_queues(self._clock.lease())

    def depths(self) -> list[Depth]:
        with self._lock:
            wall = self._clock.time()
            depths = []
            for queue in _queues(self._where(lambda row: not row.job.status.terminal)):
                rows = self._where(lambda row, queue=queue: row.queue == queue)  # type: ignore[misc]
                queued = [row for row in rows if row.queued]
                running = sum(row.job.status is Status.RUNNING for row in rows)
                oldest = min((row.job.created_at for row in queued), default=wall)
                published = sum(row.published for row in queued)
                depths.append(Depth(queue, len(queued), published, running, max(0.0, wall - oldest)))
            return depths

    def check(self) -> None:
        """Always reachable."""

    def close(self) -> None:
        """Nothing to close."""

    def _holds(self, worker: str, claim: Held) -> bool:
        return claim.id in self._rows and self._rows[claim.id].held_as(worker, claim.attempt)

    def _requeue(self, row: _Row, losses: int, due_in: float) -> None:
        row.job = replace(row.job, status=Status.QUEUED, worker=None, node=None, losses=losses)
        row.publish(self._clock.lease(), due_in)
        row.resends = 0

    def _finished_at(self, job: Job) -> float:
        return max(self._clock.time(), job.started_at if job.started_at is not None else job.created_at)

    def _where(self, condition: Callable[[_Row], bool]) -> list[_Row]:
        """Oldest first."""
        return sorted((row for row in self._rows.values() if condition(row)), key=lambda row: row.job.id)

    def _due_queues(self, now: float) -> list[QueueName]:
        return _queues(self._where(lambda row: _due(row, now)))


class MemoryJobQueue:
    """The JobQueue port: a list of ids per queue, and the cancels that were told, for tests to read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lists: dict[QueueName, deque[str]] = {}
        self.cancels: list[tuple[str, str]] = []

    def send(self, jobs: Sequence[JobRef]) -> None:
        with self._lock:
            for job in jobs:
                self._lists.setdefault(job.queue, deque()).append(job.id)

    def cancel(self, job_id: str, node: str) -> None:
        with self._lock:
            self.cancels.append((job_id, node))

    def empty(self, queues: Collection[QueueName]) -> set[QueueName]:
        with self._lock:
            return {queue for queue in queues if not self._lists.get(queue)}

    def take(self, queue: QueueName) -> str | None:
        """The oldest message, as a worker would receive it; None when there is none."""
        with self._lock:
            messages = self._lists.get(queue)
            return messages.popleft() if messages else None


def _due(row: _Row, now: float) -> bool:
    if row.fed_at is None or row.publish_due is None:
        return False
    return row.queued and (row.publish_due < now or row.fed_at > now)


def _queues(rows: Sequence[_Row]) -> list[QueueName]:
    return sorted({row.queue for row in rows}, key=str)
