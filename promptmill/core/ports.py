"""The ports: what each part may ask of the others. Implementations and their in-memory twins pass
the same contract tests (tests/contract/).

Errors: a store or stream that cannot be reached raises ``Unavailable``; that is never charged to
a job. Every method is thread-safe unless it says otherwise.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from promptmill.core.events import Cursor, StreamEvent
from promptmill.core.jobs import (
    Claim,
    Finish,
    Held,
    Job,
    JobRef,
    NewJob,
    Outcome,
    QueueName,
    Status,
)

# -- jobs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """``replayed``: the idempotency key was known, ``job`` is the earlier one and nothing was inserted."""

    job: Job
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    jobs: tuple[Job, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """``renewed``: the claims that are still ours. ``cancelled``: ids among them that must stop."""

    renewed: frozenset[Held]
    cancelled: frozenset[str]


@dataclass(frozen=True, slots=True)
class Depth:
    """One queue as SQL sees it. ``published``: queued rows that were sent to the broker."""

    queue: QueueName
    queued: int
    published: int
    running: int
    oldest_s: float


class JobStore(Protocol):
    """The truth. Every transition is one UPDATE guarded by status and attempt; what it returns is
    the verdict. Times of leases are the store's own clock (docs/states.md)."""

    def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Insert and commit. ``interactive`` rows are born published (they are sent at once),
        others wait for ``feed``. Raises IdempotencyMismatch (nothing is inserted)."""

    def get(self, job_id: str, tenant: str = "default") -> Job | None: ...

    def page(
        self,
        tenant: str = "default",
        *,
        status: Status | None = None,
        after: str | None = None,
        limit: int = 20,
        batch_id: str | None = None,
    ) -> Page:
        """Newest first; ``after`` is the id of the last job of the previous page."""

    def claim_many(self, ids: Sequence[str], worker: str, node: str) -> list[Claim | None]:
        """queued -> running for all of ``ids`` in one statement, in the order asked. An id that is
        not queued, has a cancel flag, or stands earlier in ``ids`` gets None. ``worker`` is unique per
        process start, ``node`` is the address for control commands."""

    def heartbeat(self, worker: str, held: Sequence[Held]) -> Heartbeat:
        """Renew the leases of ``held`` in one statement."""

    def finish_many(self, items: Sequence[Finish]) -> list[bool]:
        """running -> terminal, each under its fence, result in the same transaction, one commit for
        all. True also when our own earlier commit is found (its answer was lost); False = fenced."""

    def release_many(self, worker: str, held: Sequence[Held]) -> list[Job]:
        """running -> queued (or cancelled, if the flag is set) under the fence; ``losses`` unchanged.
        Returns the rows that changed."""

    def cancel(self, job_id: str, tenant: str = "default") -> Job | None:
        """queued -> cancelled (attempt + 1) or flag a running job; one statement. None = no such
        job. The returned row tells which; a terminal row is returned as it is, unchanged."""

    def feed(self, queue: QueueName, bound: int) -> list[JobRef]:
        """Mark the oldest unpublished queued rows of ``queue`` published until ``bound`` of them
        are, commit, and return them; the caller sends them."""

    def feedable(self) -> list[QueueName]:
        """Queues that have unpublished queued rows."""

    def recover(self, limit: int = 1000) -> list[Job]:
        """Sweep (1): running rows whose lease is over -> queued (losses + 1, published anew: the
        caller sends them) or cancelled if the flag is set. Returns the rows that changed."""

    def lost(self, empty: Collection[QueueName], limit: int = 1000) -> list[JobRef]:
        """Sweep (2): published queued rows past their due time whose message must be lost, since
        their queue's list is in ``empty`` or a row published at least 5 s later was claimed.
        Marks them published anew (due again after 5 s x 2^n, at most 1 h); the caller sends them."""

    def published(self) -> list[QueueName]:
        """Queues that have published queued rows past their due time."""

    def depths(self) -> list[Depth]: ...

    def check(self) -> None:
        """Reachable and migrated, or Unavailable. Writes nothing."""

    def close(self) -> None: ...


class JobQueue(Protocol):
    """The broker: fire and forget. A message may be lost or doubled; the sweep and the claim repair it."""

    def send(self, jobs: Sequence[JobRef]) -> None:
        """Never raises for a broker that is away: it logs, and the sweep sends again."""

    def cancel(self, job_id: str, node: str) -> None:
        """Tell the worker ``node`` to stop a running job; fire and forget, the heartbeat is the slow path."""

    def empty(self, queues: Collection[QueueName]) -> set[QueueName]:
        """Those of ``queues`` whose broker list is empty now. Raises Unavailable."""


# -- streams --------------------------------------------------------------------------------------


class Append(StrEnum):
    """Verdict on one job's events of a flush."""

    ACCEPTED = "accepted"  # written and published, or found written by ourselves already
    FENCED = "fenced"  # the log belongs to a higher attempt: stop this job


class TokenStream(Protocol):
    """The replayable log of each job and the live channel beside it."""

    def append(self, events: Sequence[StreamEvent]) -> dict[str, Append]:
        """Append in order, publish what was accepted, one round trip for all jobs; the verdict per
        job. A terminal event makes the log expire after a minute. Raises Unavailable: the caller
        keeps the events and appends them again."""

    def read(self, job: str, after: Cursor) -> list[StreamEvent]:
        """The log's events after the cursor, oldest first; [] when the log is gone or has no more."""

    def last(self, job: str) -> Cursor | None:
        """The log's last event id, None when the log is gone."""

    def check(self) -> None:
        """Reachable, or Unavailable."""

    def close(self) -> None: ...


class Feed(Protocol):
    """One viewer's bounded queue at the fan-out."""

    def get(self, timeout: float) -> StreamEvent | None:
        """The next live event; None on timeout, or when ``lagging`` became true."""

    @property
    def lagging(self) -> bool:
        """Events were dropped (slow reader, reconnect): read the log again, then ``caught_up``."""

    def caught_up(self) -> None: ...


class FanOut(Protocol):
    """One subscription per process, owned by one thread, that feeds every viewer of it."""

    def open(self, job: str) -> Feed:
        """Register a viewer. Do it *before* reading the log, then drop live events that were read."""

    def close_feed(self, feed: Feed) -> None: ...


# -- results and workers --------------------------------------------------------------------------


class ResultCache(Protocol):
    """Results of deterministic requests, exact match; keyed by JobSpec.cache_key."""

    def get(self, tenant: str, key: str) -> Outcome | None:
        """None also when the cache cannot be reached: a cache never fails a request."""

    def put(self, tenant: str, key: str, outcome: Outcome) -> None: ...

    def evict(self) -> int:
        """Drop what is over the age or byte bound; the number of entries dropped."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A live worker, as it announces itself."""

    node: str
    models: Mapping[str, str]  # served name -> revision
    engine: str
    rows: int
    ready: bool
    metrics_url: str
    pid: int
    host: str


class WorkerDirectory(Protocol):
    """Who serves what now. Entries vanish by themselves 10 s after the last announcement."""

    def announce(self, info: WorkerInfo) -> None: ...

    def withdraw(self, node: str) -> None: ...

    def live(self) -> list[WorkerInfo]: ...
