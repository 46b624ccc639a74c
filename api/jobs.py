"""Routes of jobs: submit, read, list, cancel."""

import re
from typing import Any

from flask import Blueprint, Response, jsonify, request

from api import errors
from api.body import read_object
from api.services import Services, services
from api.shape import job_json, list_json, without_logprobs
from api.submit import Submitter
from api.waiting import wait_for_end
from promptmill.core import events
from promptmill.core.errors import AlreadyFinished, BadRequest, NotFound, Unavailable, Unsupported
from promptmill.core.jobs import Job, Priority, Status
from promptmill.core.logs import get_logger

log = get_logger(__name__)

MAX_WAIT_S = 60.0
MAX_PAGE, DEFAULT_PAGE = 100, 20
_JOB_ID = re.compile(r"job_[0-9a-z]{26}", re.ASCII)


def blueprint(submitter: Submitter) -> Blueprint:
    """``submitter``: where new jobs go in."""
    routes = Blueprint("jobs", __name__)

    @routes.post("/v1/jobs")
    def submit() -> Response:
        submitted = submitter.submit(
            read_object(request, services().settings.max_body_bytes),
            route="POST /v1/jobs",
            key=request.headers.get("Idempotency-Key"),
            default=Priority.STANDARD,
        )
        answer = jsonify(_shown(submitted.job))
        answer.status_code = 202
        answer.headers["Location"] = f"/v1/jobs/{submitted.job.id}"
        if submitted.replayed:
            answer.headers["Idempotent-Replayed"] = "true"
        return answer

    routes.add_url_rule("/v1/jobs", view_func=list_jobs, methods=["GET"])
    routes.add_url_rule("/v1/jobs/<job_id>", view_func=get_job, methods=["GET"])
    routes.add_url_rule("/v1/jobs/<job_id>", view_func=cancel_job, methods=["DELETE"])
    routes.add_url_rule("/v1/jobs/<job_id>/cancel", view_func=cancel_job, methods=["POST"])
    return routes


def checked_id(job_id: str) -> str:
    """An id that a job may have. Nothing else reaches a store: SQL cannot hold every text."""
    if not _JOB_ID.fullmatch(job_id):
        raise NotFound("no such job")
    return job_id


def get_job(job_id: str) -> Response:
    own, seconds = services(), _wait_seconds()
    job = own.store.get(checked_id(job_id))
    if seconds and job is not None and not job.status.terminal:
        with own.long_lived.enter():
            job = wait_for_end(own, job_id, seconds)
    if job is None:
        raise NotFound("no such job")
    if job.status.terminal:
        log.info("delivered", job=job.id, tenant=job.tenant, transport="poll")
    return jsonify(_shown(job))


def list_jobs() -> Response:
    if request.args.get("batch_id"):
        raise Unsupported("batches are not available in this version", param="batch_id")
    status, after = request.args.get("status"), request.args.get("after")
    if status is not None and status not in Status.__members__.values():
        raise BadRequest(f"status must be one of {', '.join(Status)}", param="status")
    if after is not None and not _JOB_ID.fullmatch(after):
        raise BadRequest("after must be the id of a job", param="after")
    page = services().store.page(status=Status(status) if status else None, after=after, limit=_page_size())
    return jsonify(list_json([_shown(without_logprobs(job)) for job in page.jobs], has_more=page.has_more))


def cancel_job(job_id: str) -> Response:
    """200: it is cancelled. 202: it runs, and its worker was told to stop. 409: it is over."""
    own = services()
    before = own.store.get(checked_id(job_id))
    if before is None:
        raise NotFound("no such job")
    job = before if before.status.terminal else own.store.cancel(job_id)
    if job is None:
        raise NotFound("no such job")
    if job.status.terminal and (before.status.terminal or job.status is not Status.CANCELLED):
        return errors.answer(AlreadyFinished(f"the job is {job.status} already"), job=_shown(job))
    answer = jsonify(_shown(job))
    if job.status is Status.RUNNING:
        if job.node:
            own.queue.cancel(job.id, job.node)
        answer.status_code = 202
    else:
        _end_log(own, job)
    return answer


def _shown(job: Job) -> dict[str, Any]:
    model = services().models.get(job.model)
    return job_json(job, model.texts if model else None)


def _end_log(own: Services, job: Job) -> None:
    """A job cancelled in the queue has no worker that could tell its viewers."""
    own.metrics.jobs.labels(priority=str(job.priority), status=str(job.status)).inc()
    own.metrics.jobs_cancelled.labels(reason="requested").inc()  # that of a running job is counted by its worker
    log.info("finished", job=job.id, tenant=job.tenant, attempt=job.attempt, status=str(job.status))
    marker = events.started(job.id, job.attempt, job.model)
    end = events.terminal(job.id, job.attempt, job.status, outcome=job.outcome, error=job.error, timings=job.timings, cache=job.cache)
    try:
        own.stream.append([marker, end])
    except Unavailable as error:  # viewers ask SQL
        log.warning("cannot end a log now", job=job.id, error=error.message)


def _wait_seconds() -> float:
    text = request.args.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise BadRequest(f"wait must be a number of seconds in 0..{MAX_WAIT_S:g}", param="wait")
    return seconds


def _page_size() -> int:
    text = request.args.get("limit", str(DEFAULT_PAGE))
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= MAX_PAGE):
        raise BadRequest(f"limit must be an integer in 1..{MAX_PAGE}", param="limit")
    return int(text)
