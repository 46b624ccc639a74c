"""What `stats` shows, computed from one or two samples of /metrics. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
PREFIX = "promptmill_"


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of one scrape: (name without prefix, labels) -> value."""

    values: Mapping[tuple[str, Labels], float]

    @classmethod
    def parse(cls, text: str) -> "Sample":
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    found[sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())] = sample.value
        return cls(found)

    def since(self, earlier: "Sample") -> "Sample":
        """What was added; a counter that is lower than before was reset and counts from zero."""
        return Sample({key: value - old if value >= (old := earlier.values.get(key, 0.0)) else value for key, value in self.values.items()})

    def total(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return math.fsum(value for (own, have), value in self.values.items() if own == name and wanted <= have)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values of a metric, summed per value of ``label``."""
        found: dict[str, float] = {}
        for (own, have), value in self.values.items():
            if own == name and label in (labels := dict(have)):
                found[labels[label]] = found.get(labels[label], 0.0) + value
        return found

    def mean(self, name: str) -> float | None:
        """Of a histogram; None without observations."""
        count = self.total(f"{name}_count")
        return self.total(f"{name}_sum") / count if count else None

    def quantile(self, name: str, q: float) -> float | None:
        """Of a histogram, linear inside its bucket as PromQL's histogram_quantile; over all labels.
        In the last, open bucket: that bucket's lower bound."""
        buckets = sorted((float(bound), count) for bound, count in self.by(f"{name}_bucket", "le").items())
        if not buckets or not buckets[-1][1]:
            return None
        rank, low, below = q * buckets[-1][1], 0.0, 0.0
        for bound, count in buckets:
            if count >= rank and count > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            low, below = bound, count
        return low


def summary(first: Sample, last: Sample, seconds: float, rows: float = 0) -> dict[str, Any]:
    """Rates over the interval; latencies and batches over it too, or over all time if it saw none.

    Latencies are seconds. ``occupancy`` = mean decode rows / ``rows``, those of one worker for all
    priorities; None when they are not known (0).
    """
    delta = last.since(first)
    window = delta if delta.total("engine_decode_rows_count") or delta.total("e2e_request_latency_seconds_count") else last
    decoding = window.mean("engine_decode_rows")
    return {
        "interval_s": seconds,
        "window": "interval" if window is delta else "total",
        "requests_per_s": _rate(delta.total("requests_total"), seconds),
        "jobs_per_s": _rate(delta.total("jobs_total"), seconds),
        "generation_tokens_per_s": _rate(delta.total("generation_tokens_total"), seconds),
        "time_to_first_token_s": _percentiles(window, "time_to_first_token_seconds"),
        "inter_token_s": _percentiles(window, "inter_token_latency_seconds"),
        "e2e_s": _percentiles(window, "e2e_request_latency_seconds"),
        "queue_wait_s": _percentiles(window, "queue_wait_seconds"),
        "decode_rows_mean": decoding,
        "occupancy": decoding / rows if decoding is not None and rows else None,
        "claim_batch_mean": window.mean("claim_batch_size"),
        "queue_depth": last.by("queue_depth", "priority"),
        "queue_oldest_s": last.by("queue_oldest_seconds", "priority"),
        "jobs_total": last.by("jobs_total", "status"),
        "cache_hits_total": last.total("cache_hits_total"),
    }


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _percentiles(sample: Sample, name: str) -> dict[str, float | None]:
    return {f"p{round(q * 100)}": sample.quantile(name, q) for q in (0.5, 0.9, 0.99)}
