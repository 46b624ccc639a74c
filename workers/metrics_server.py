"""A worker's own port: /metrics, /health/live and /health/ready."""

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from promptmill.core.logs import get_logger

log = get_logger(__name__)


class MetricsServer:
    """``metrics`` gives the text exposition, ``ready`` whether jobs are taken and run.

    A taken ``port`` falls back to a free one, as 0 does; ``url`` tells which it is.
    """

    def __init__(self, host: str, port: int, metrics: Callable[[], bytes], ready: Callable[[], bool]):
        handler = _handler(metrics, ready)
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            log.warning("metrics port taken", port=port, reason=str(error))
            self._server = ThreadingHTTPServer((host, 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _handler(metrics: Callable[[], bytes], ready: Callable[[], bool]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(HTTPStatus.OK, metrics(), "text/plain; version=0.0.4; charset=utf-8")
            elif self.path == "/health/live":
                self._say(HTTPStatus.OK, "live")
            elif self.path in ("/health", "/health/ready"):
                fine = ready()
                self._say(HTTPStatus.OK if fine else HTTPStatus.SERVICE_UNAVAILABLE, "ready" if fine else "not ready")
            else:
                self._say(HTTPStatus.NOT_FOUND, "not found")

        def _say(self, status: HTTPStatus, word: str) -> None:
            self._answer(status, json.dumps({"status": word}).encode(), "application/json")

        def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape is no news."""

    return Handler
