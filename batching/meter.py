"""What the loop reports to Prometheus. Labelled children are looked up once: a step is a few milliseconds."""

from batching.scheduler import Plan
from promptmill.core.engine import EngineStats
from promptmill.core.metrics import Metrics


class EngineMeter:
    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._running = metrics.engine_rows.labels("running")
        self._waiting = metrics.engine_rows.labels("waiting")
        self._paused = metrics.engine_rows.labels("paused")
        self._kv_used = metrics.kv_bytes.labels("used")
        self._kv_total = metrics.kv_bytes.labels("total")

    def step(self, plan: Plan, seconds: float) -> None:
        self._metrics.step.observe(seconds)
        if plan.decode_rows:
            self._metrics.decode_rows.observe(plan.decode_rows)
        if plan.prompt_tokens:
            self._metrics.prompt_tokens.inc(plan.prompt_tokens)

    def tokens(self, count: int, gap_s: float | None) -> None:
        """Tokens of a row came, ``gap_s`` after those before (None: its first)."""
        self._metrics.generation_tokens.inc(count)
        if gap_s is not None:
            self._metrics.inter_token.observe(gap_s)

    def cached(self, tokens: int) -> None:
        """So many prompt tokens of a request were found in the prefix cache."""
        if tokens:
            self._metrics.prefix_cache_tokens.inc(tokens)

    def pause(self, mode: str) -> None:
        self._metrics.preemptions.labels(mode).inc()

    def occupancy(self, stats: EngineStats) -> None:
        self._running.set(sum(stats.running.values()))
        self._waiting.set(stats.waiting)
        self._paused.set(stats.paused)
        self._kv_used.set(stats.kv_bytes_used)
        self._kv_total.set(stats.kv_bytes_total)
