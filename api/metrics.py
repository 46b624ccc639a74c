"""/metrics: all processes of this host, and the depths of the queues as SQL sees them."""

import threading
from collections.abc import Iterator

from flask import Blueprint, Flask, Response, g, request
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily

from api.services import services
from promptmill.core.clock import Clock
from promptmill.core.errors import Unavailable
from promptmill.core.jobs import Priority
from promptmill.core.logs import get_logger
from promptmill.core.metrics import exposition
from promptmill.core.ports import Depth, JobStore

log = get_logger(__name__)
FRESH_S = 1.0  # many scrapers cost SQL one query a second


class QueueDepths:
    """Computed at scrape time; missing while SQL is away."""

    def __init__(self, store: JobStore, clock: Clock):
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._depths: list[Depth] | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        depths = self._fresh()
        if depths is None:
            return
        queued = GaugeMetricFamily("promptmill_queue_depth", "Queued jobs", labels=["priority"])
        oldest = GaugeMetricFamily("promptmill_queue_oldest_seconds", "Age of the oldest queued job", labels=["priority"])
        for priority in Priority:
            own = [depth for depth in depths if depth.queue.priority is priority]
            queued.add_metric([priority], sum(depth.queued for depth in own))
            oldest.add_metric([priority], max((depth.oldest_s for depth in own), default=0.0))
        yield queued
        yield oldest

    def _fresh(self) -> list[Depth] | None:
        with self._lock:
            if self._clock.monotonic() - self._read_at >= FRESH_S:
                try:
                    self._depths = self._store.depths()
                except Unavailable as error:
                    log.warning("cannot read the depths of the queues", error=error.message)
                    self._depths = None
                self._read_at = self._clock.monotonic()
            return self._depths


def install(app: Flask, depths: QueueDepths) -> None:
    routes = Blueprint("metrics", __name__)

    @routes.get("/metrics")
    def metrics() -> Response:
        return Response(exposition(services().metrics, depths), content_type=CONTENT_TYPE_LATEST)

    app.register_blueprint(routes)
    app.after_request(_count)


def _count(response: Response) -> Response:
    """By the rule of the route, not by the path: paths are without number."""
    route = request.url_rule.rule if request.url_rule else "unknown"
    services().metrics.requests.labels(route=route, code=str(response.status_code)).inc()
    log.debug("answered", method=request.method, route=route, code=response.status_code, request_id=g.get("request_id"))
    return response
