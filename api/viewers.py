"""Counts open streams for the gauge ``stream_viewers``."""

import threading

from promptmill.core.metrics import Metrics

TRANSPORTS = ("sse", "ws")


class Viewers:
    def __init__(self, metrics: Metrics):
        self._gauge = metrics.viewers
        self._counts = dict.fromkeys(TRANSPORTS, 0)
        self._lock = threading.Lock()
        for transport in TRANSPORTS:  # a restarted process finds the count of its killed forerunner in its file
            self._set(transport, 0)

    def joined(self, transport: str) -> None:
        with self._lock:
            self._set(transport, self._counts[transport] + 1)

    def left(self, transport: str) -> None:
        with self._lock:
            self._set(transport, self._counts[transport] - 1)

    def _set(self, transport: str, count: int) -> None:
        self._counts[transport] = count
        self._gauge.labels(transport=transport).set(count)
