"""What it takes to build an engine; made from Settings by the worker's composition root."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.metrics import Metrics


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``models``: folders of prepared models, the first one is served by a torch engine; the instant
    engine serves all. ``rows`` 0 = 32 on CPU, 128 on CUDA. ``target_itl_s`` 0 = throughput only.
    ``kv_cache_bytes`` 0 = automatic. ``kernels_dir``: where built kernels are kept, None = a folder of
    the user's cache."""

    kind: Literal["torch", "instant"]
    models: tuple[Path, ...]
    rows: int = 0
    reserved_rows: int = 4
    prefill_tokens: int = 256
    target_itl_s: float = 0.0
    idle_window_s: float = 0.02
    prefix_cache: bool = True
    kv_cache_bytes: int = 0
    threads: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    kernels_dir: Path | None = None
    instant_step_s: float = 0.0
    clock: Clock = SYSTEM_CLOCK
    metrics: Metrics = field(default_factory=Metrics)
