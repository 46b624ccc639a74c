"""The way of a submit: parse -> validate and tokenise -> result cache -> row committed -> sent."""

import hashlib
import json
import re
from typing import Any

from api.sampling import Limits
from api.services import Services
from api.validate import JobValidator, ValidJob
from promptmill.core.errors import BadRequest, Unavailable
from promptmill.core.ids import new_id
from promptmill.core.jobs import CacheUse, IdempotencyKey, JobRef, NewJob, Outcome, Priority, QueueName, Status
from promptmill.core.limits import MAX_WIDTH
from promptmill.core.logs import get_logger
from promptmill.core.ports import Submitted

log = get_logger(__name__)

_KEY = re.compile(r"[\x20-\x7e]{1,255}", re.ASCII)


class Submitter:
    """Takes jobs in. One per app."""

    def __init__(self, services: Services):
        self._services = services
        settings = services.settings
        limits = Limits(settings.max_tokens_cap, settings.job_tokens_cap, min(MAX_WIDTH, settings.engine_rows or MAX_WIDTH))
        self._validator = JobValidator(services.models, limits)

    def submit(self, body: dict[str, Any], *, route: str, key: str | None, default: Priority) -> Submitted:
        """The job, committed: from here on it is not lost. ``key``: the Idempotency-Key header.
        Raises what the validator raises, IdempotencyMismatch, Unavailable."""
        idempotency = idempotency_key(route, key, body)
        valid = self._validator.validate(body, default)
        outcome, cache = self._look_up(valid)
        services = self._services
        job = NewJob(
            id=new_id("job", services.clock),
            model=valid.model.card.name,
            model_revision=valid.model.card.revision,
            priority=valid.priority,
            spec=valid.spec,
            request=valid.request,
            created_at=services.clock.time(),
            metadata=dict(valid.metadata),
            cache=cache,
            outcome=outcome,
            idempotency=idempotency,
        )
        (submitted,) = services.store.submit([job])
        log.info(
            "received",
            job=submitted.job.id,
            tenant=job.tenant,
            model=job.model,
            priority=str(job.priority),
            prompt_tokens=len(job.spec.prompt_ids),
            cache=cache,
            replayed=submitted.replayed,
        )
        if not submitted.replayed:
            self._start(job)
        return submitted

    def _look_up(self, valid: ValidJob) -> tuple[Outcome | None, CacheUse]:
        """ "off" also for what a second run would answer differently: it is neither looked up nor kept."""
        if not (valid.cache and valid.spec.sampling.deterministic):
            return None, "off"
        outcome = self._services.cache.get("default", valid.spec.cache_key(valid.model.card.revision))
        return (None, "miss") if outcome is None else (outcome, "hit")

    def _start(self, job: NewJob) -> None:
        services = self._services
        if job.outcome is not None:
            services.metrics.cache_hits.labels(kind="exact").inc()
            services.metrics.jobs.labels(priority=str(job.priority), status=str(Status.SUCCEEDED)).inc()
            log.info("finished", job=job.id, tenant=job.tenant, status=str(Status.SUCCEEDED), cache="hit")
            return
        queue = QueueName(job.priority, job.model)
        if job.priority is Priority.INTERACTIVE:
            services.queue.send([JobRef(job.id, queue)])
            return
        try:
            services.feeder(queue)
        except Unavailable as error:  # the row is committed: the maintenance feeds it
            log.warning("cannot feed now", queue=str(queue), error=error.message)


def idempotency_key(route: str, key: str | None, body: dict[str, Any]) -> IdempotencyKey | None:
    """Raises BadRequest for a key that is empty, longer than 255 or not printable ASCII."""
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise BadRequest("an Idempotency-Key has 1..255 printable ASCII characters", param="Idempotency-Key")
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return IdempotencyKey(route, key, hashlib.sha256(canonical.encode()).hexdigest())
