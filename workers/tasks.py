"""Celery's names for what workers do. The work is elsewhere: ``workers.way``, ``workers.maintenance``."""

from typing import Any

from celery import Task
from celery.worker.control import control_command

from promptmill.core.logs import get_logger
from workers.app import app
from workers.transport import TASK

log = get_logger(__name__)


@app.task(bind=True, name=TASK, acks_late=True, ignore_result=True, Request="workers.requests:NoAckRequest")
def generate(self: Task, job_id: str) -> str:
    """Run a job. Whatever goes wrong here, its lease brings it back; nothing may reach the pool."""
    try:
        return self.app.runtime.way.run(job_id)
    except BaseException:  # a SystemExit that escapes leaves Celery's request open for ever
        log.exception("job left to its lease", job=job_id)
        return "left"


@control_command(args=[("job_id", str)], signature="<job_id>")
def cancel_job(state: Any, job_id: str) -> dict[str, bool]:
    """Stop a job at the next step, or when it comes."""
    runtime = state.app.runtime
    return {"ok": runtime is not None and runtime.way.cancel(job_id)}


@app.task(name="promptmill.maintenance.sweep", ignore_result=True)
def sweep() -> None:
    app.maintenance().sweep()


@app.task(name="promptmill.maintenance.feed", ignore_result=True)
def feed() -> None:
    app.maintenance().feed()


@app.task(name="promptmill.maintenance.evict", ignore_result=True)
def evict() -> None:
    app.maintenance().evict()
