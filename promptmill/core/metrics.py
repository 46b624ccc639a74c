"""Every metric, in one place. Names and units follow Prometheus (https://prometheus.io/docs/practices/naming/).

Processes of one host share a directory (prometheus_client's multiprocess mode), so that any of them
serves the metrics of all. A process keeps its file by its *name*, such as ``worker-1``: a
restarted child goes on counting, and the directory does not grow.
"""

import os
from pathlib import Path
from typing import Literal

import prometheus_client.values
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LONG = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


def share(directory: Path, process: str) -> None:
    """Keep this process's metrics in ``directory`` under ``process``. Call it before ``Metrics()``."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one process; made once by its composition root and handed to those who count."""

    def __init__(self, registry: CollectorRegistry | None = None):
        self.registry = registry or CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"promptmill_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"promptmill_{name}", text, labels, buckets=buckets, registry=self.registry)

        def gauge(name: str, text: str, *labels: str, over_processes: Literal["mostrecent", "sum"] = "mostrecent") -> Gauge:
            return Gauge(f"promptmill_{name}", text, labels, multiprocess_mode=over_processes, registry=self.registry)

        self.requests = counter("requests_total", "HTTP requests", "route", "code")
        self.jobs = counter("jobs_total", "Jobs that became terminal", "priority", "status")
        self.jobs_cancelled = counter("jobs_cancelled_total", "Jobs cancelled", "reason")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens run through a model")
        self.generation_tokens = counter("generation_tokens_total", "Tokens generated")
        self.cache_hits = counter("cache_hits_total", "Requests answered from a cache", "kind")
        self.preemptions = counter("preemptions_total", "Running requests paused, with their KV kept or to be computed again", "mode")
        self.prefix_cache_tokens = counter("prefix_cache_tokens_total", "Prompt tokens found in the prefix cache")
        self.leases_recovered = counter("leases_recovered_total", "Jobs taken back from a lost worker")
        self.messages_resent = counter("messages_resent_total", "Jobs sent to the broker again since their message was lost")
        self.queue_wait = histogram("queue_wait_seconds", "Creation to claim", LONG, "priority")
        self.claim_batch_size = histogram("claim_batch_size", "Jobs per claim statement", ROWS)
        self.finish_batch_size = histogram("finish_batch_size", "Jobs per finish commit", ROWS)
        self.decode_rows = histogram("engine_decode_rows", "Rows that decoded in a step, one sample a step", ROWS)
        self.step = histogram("engine_step_seconds", "Duration of an engine step", SHORT)
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Creation to first token", LONG, "priority")
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens of a job", SHORT)
        self.e2e = histogram("e2e_request_latency_seconds", "Creation to terminal state", LONG, "priority")
        self.kv_bytes = gauge("kv_cache_bytes", "KV cache", "state")
        self.engine_rows = gauge("engine_rows", "Rows of the engine", "state")
        self.viewers = gauge("stream_viewers", "Open streams of this host's api", "transport", over_processes="sum")


def exposition(metrics: Metrics, *collectors: object) -> bytes:
    """The text format: all processes of the host when ``share`` was called, else this one; plus
    ``collectors`` computed at scrape time."""
    registry = CollectorRegistry()
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    else:
        registry = metrics.registry
    text = generate_latest(registry)
    if collectors:
        extra = CollectorRegistry()
        for collector in collectors:
            extra.register(collector)  # type: ignore[arg-type]
        text += generate_latest(extra)
    return text
