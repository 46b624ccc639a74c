"""The micro-batched claim: many ids, one statement, each caller its own run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from promptmill.core.clock import Clock
from promptmill.core.logs import get_logger
from promptmill.core.metrics import Metrics
from promptmill.core.ports import JobStore
from workers.registry import Registry, Run

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job id that a task thread brings, and when (Clock.monotonic)."""

    job_id: str
    at: float


class Claims:
    """The batch function behind the claim window.

    The window tells ``on_batch`` and then calls ``claim``, both on the thread of the batch's leader.
    ``worker`` is unique per process start, ``node`` is the address for control commands.
    """

    def __init__(
        self,
        store: JobStore,
        registry: Registry,
        displace: Callable[[Run], None],
        metrics: Metrics,
        clock: Clock,
        worker: str,
        node: str,
    ):
        self._store = store
        self._registry = registry
        self._displace = displace
        self._metrics = metrics
        self._clock = clock
        self._worker = worker
        self._node = node
        self._reason = ""

    def on_batch(self, size: int, waited_s: float, reason: str) -> None:
        self._metrics.claim_batch_size.observe(size)
        self._reason = reason

    def claim(self, arrivals: Sequence[Arrival]) -> list[Run | None]:
        """Claim all and enter the won ones into the registry, before log or engine know of them, so
        that the next heartbeat holds them."""
        now = self._clock.monotonic()
        claims = self._store.claim_many([arrival.job_id for arrival in arrivals], self._worker, self._node)
        return [
            self._enter(Run(claim, now - arrival.at), len(arrivals)) if claim else None
            for claim, arrival in zip(claims, arrivals, strict=True)
        ]

    def _enter(self, run: Run, size: int) -> Run:
        older = self._registry.enter(run)
        if older is not None:
            self._displace(older)
        self._tell(run, size)
        return run

    def _tell(self, run: Run, size: int) -> None:
        claim = run.claim
        self._metrics.queue_wait.labels(claim.queue.priority).observe(claim.queued_ms / 1000)
        log.info(
            "batched",
            job=claim.id,
            tenant=claim.tenant,
            attempt=claim.attempt,
            worker=self._worker,
            size=size,
            waited_ms=round(run.window_s * 1000, 2),
            by=self._reason,
        )
