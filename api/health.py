"""Is this process alive, and can it take jobs?"""

from typing import Any

from flask import Blueprint, Response, jsonify

from api.services import services
from promptmill.core.errors import Unavailable
from promptmill.core.ports import WorkerInfo

blueprint = Blueprint("health", __name__)


@blueprint.get("/health/live")
def live() -> Response:
    return jsonify({"status": "live"})


@blueprint.get("/health")
@blueprint.get("/health/ready")
def ready() -> Response:
    """503 in the common shape while SQL is away or not migrated. Without Redis jobs are still taken
    in: they are rows, and run when it is back."""
    own = services()
    own.store.check()
    body: dict[str, Any] = {"status": "ready", "redis": "ok", "models": list(own.models), "workers": []}
    try:
        body["workers"] = [_worker_json(worker) for worker in own.workers.live()]
    except Unavailable:
        body["redis"] = "unreachable"
    return jsonify(body)


def _worker_json(worker: WorkerInfo) -> dict[str, Any]:
    return {
        "node": worker.node,
        "models": dict(worker.models),
        "engine": worker.engine,
        "rows": worker.rows,
        "ready": worker.ready,
        "host": worker.host,
        "metrics_url": worker.metrics_url,
    }
