"""Engines to be measured: made of a prepared model, driven by hand or in time. Shared by the benchmarks here."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batching.engine import BatchingEngine
from batching.engines import create_engine
from batching.options import EngineOptions
from bench.workloads import Request
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.engine import EngineEvent, Failed, Finished, GenRequest, Tokens
from promptmill.core.jobs import Priority, SamplingParams
from promptmill.core.models import ModelCard, chosen_models
from promptmill.core.settings import load_settings


def model_folder(name: str = "") -> Path:
    """The folder of the model ``name``, default: the one that is served."""
    return chosen_models(load_settings().models_path, name)[0]


def make_engine(folder: Path, **options: Any) -> BatchingEngine:
    """A torch engine that is loaded and ready to be stepped on this thread."""
    defaults = {"kernels_dir": load_settings().kernels_dir, "idle_window_s": 0.0, "reserved_rows": 0}
    engine = create_engine(EngineOptions("torch", (folder,), **{**defaults, **options}))
    engine.prepare()
    return engine


def gen_request(name: str, request: Request, folder: Path, tenant: str = "default", **sampling: Any) -> GenRequest:
    """Exactly ``request.max_tokens`` tokens, greedy unless ``sampling`` says otherwise."""
    params = SamplingParams(**{"max_tokens": request.max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    model, priority = ModelCard.load(folder).name, Priority(request.priority)
    return GenRequest(name, model, tuple(request.prompt_ids), params, priority, SYSTEM_CLOCK.monotonic(), tenant)


@dataclass
class Measured:
    """``gaps``: seconds between two tokens of a row. ``seconds``: first arrival to last token."""

    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    def gap_quantile(self, share: float) -> float:
        ordered = sorted(self.gaps)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def serve(engine: BatchingEngine, requests: Sequence[tuple[float, GenRequest]]) -> Measured:
    """Step the engine until all have ended; each request is submitted at its time, seconds after the start."""
    todo = sorted(requests, key=lambda pair: pair[0])
    found = Measured()
    came: dict[tuple[str, int], float] = {}
    began = SYSTEM_CLOCK.monotonic()
    left = len(todo)
    while left:
        while todo and todo[0][0] <= SYSTEM_CLOCK.monotonic() - began:
            engine.submit(todo.pop(0)[1])
        events = engine.step()
        if not events and todo and not sum(engine.stats().running.values()):
            time.sleep(max(0.0, todo[0][0] - (SYSTEM_CLOCK.monotonic() - began)))
        now = SYSTEM_CLOCK.monotonic()
        for event in events:
            left -= note(found, came, event, now)
    found.seconds = SYSTEM_CLOCK.monotonic() - began
    return found


def note(found: Measured, came: dict[tuple[str, int], float], event: EngineEvent, now: float) -> bool:
    """Count an event; whether it ended a request. Raises RuntimeError for one that failed."""
    if isinstance(event, Tokens):
        found.tokens += len(event.token_ids)
        key = (event.id, event.index)
        if key in came:
            found.gaps.append(now - came[key])
        came[key] = now
    elif isinstance(event, Finished):
        found.outputs[event.id] = event.outcome.choices[0].token_ids
        return True
    elif isinstance(event, Failed):
        raise RuntimeError(f"{event.id} failed: {event.code} {event.message}")
    return False


def machine() -> str:
    """What a result has to name."""
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"
