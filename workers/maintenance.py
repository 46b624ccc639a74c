"""Recovery as a normal feature: what beat's ticks do. Every run may be missed, doubled or cut off."""

import threading
from collections.abc import Callable

from promptmill.core.clock import Clock
from promptmill.core.errors import Unavailable
from promptmill.core.jobs import Job, JobRef, QueueName, Status
from promptmill.core.logs import get_logger
from promptmill.core.metrics import Metrics
from promptmill.core.ports import JobQueue, JobStore, ResultCache, TokenStream
from workers.feeder import Feeder
from workers.way import ending

LEAST_GAP_S = 1.0  # a run that finds the last one younger than this returns
CHUNK = 1000

log = get_logger(__name__)


class Maintenance:
    """``lease_seconds``: after an outage of SQL live workers get that long to renew before the
    sweep takes jobs from them."""

    def __init__(
        self,
        store: JobStore,
        queue: JobQueue,
        stream: TokenStream,
        cache: ResultCache,
        feeder: Feeder,
        metrics: Metrics,
        clock: Clock,
        lease_seconds: float,
    ):
        self._store = store
        self._queue = queue
        self._stream = stream
        self._cache = cache
        self._feeder = feeder
        self._metrics = metrics
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._lock = threading.Lock()
        self._ran_at: dict[str, float] = {}
        self._recover_from = clock.monotonic()

    def sweep(self) -> None:
        """Take back the jobs of lost workers, then send again the jobs whose messages are lost."""
        self._run("sweep", self._sweep)

    def feed(self) -> None:
        """Publish standard and bulk jobs where there is room."""
        self._run("feed", self._feed)

    def evict(self) -> None:
        """Bring the result cache back under its bounds."""
        self._run("evict", self._evict)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        now = self._clock.monotonic()
        with self._lock:
            if now - self._ran_at.get(name, now - LEAST_GAP_S) < LEAST_GAP_S:
                return
            self._ran_at[name] = now
        try:
            work()
        except Unavailable as error:
            log.warning("maintenance unavailable", run=name, reason=error.message)

    def _sweep(self) -> None:
        try:
            if self._clock.monotonic() >= self._recover_from:
                self._recover()
            self._resend()
        except Unavailable:
            self._recover_from = self._clock.monotonic() + self._lease_seconds
            raise

    def _recover(self) -> None:
        while jobs := self._store.recover(CHUNK):
            self._metrics.leases_recovered.inc(len(jobs))
            log.warning("leases recovered", jobs=len(jobs))
            self._queue.send([JobRef(job.id, QueueName(job.priority, job.model)) for job in jobs if job.status is Status.QUEUED])
            self._end([job for job in jobs if job.status.terminal])
            if len(jobs) < CHUNK:
                return

    def _end(self, jobs: list[Job]) -> None:
        """Tell the viewers of rows that the sweep made terminal. If Redis is away, SQL ends their streams."""
        for job in jobs:
            self._metrics.jobs.labels(job.priority, job.status).inc()
            if job.status is Status.CANCELLED:
                self._metrics.jobs_cancelled.labels("recovered").inc()
        try:
            if jobs:
                self._stream.append([event for job in jobs for event in ending(job)])
        except Unavailable as error:
            log.warning("not delivered", jobs=len(jobs), reason=error.message)

    def _resend(self) -> None:
        due = self._store.published()
        if not due:
            return
        jobs = self._store.lost(self._queue.empty(due), CHUNK)
        if jobs:
            self._metrics.messages_resent.inc(len(jobs))
            log.warning("messages lost", jobs=len(jobs))
            self._queue.send(jobs)

    def _feed(self) -> None:
        for queue in self._store.feedable():
            self._feeder.feed(queue)

    def _evict(self) -> None:
        dropped = self._cache.evict()
        if dropped:
            log.info("results evicted", entries=dropped)
