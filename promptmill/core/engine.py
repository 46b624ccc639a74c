"""The engine's port: what a worker may ask of an engine, and what the engine tells.

Errors: what can never run is refused by ``submit`` with Rejected; what fails later fails alone, with
Failed. Methods are thread-safe, but for ``run``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from promptmill.core.jobs import FinishReason, Outcome, Priority, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class GenRequest:
    """One run of a job as the engine sees it. ``id`` is opaque and unique per run (the worker uses
    ``<job>/<attempt>``, so that an old attempt and a new one never meet); a seed is always set for
    sampled requests (the worker derives one from the job's id). ``tenant``: nothing is shared between
    tenants. ``generated``: token ids per choice that an earlier run has published; this run goes on
    behind them, as if it had never stopped."""

    id: str
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: Priority
    enqueued_at: float  # Clock.monotonic
    tenant: str = "default"
    generated: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request got its rows, for the first time."""

    id: str
    waited_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """``pos``: tokens of the request before these, all choices. ``text`` may be empty or lag behind.
    ``logprobs``, if asked for, is as long as ``token_ids``."""

    id: str
    index: int
    pos: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Paused:
    """The request runs no further until it is resumed. ``kept``: its KV stays; else it will be recomputed.
    ``asked``: by ``pause``; else for want of memory, and the engine resumes it by itself."""

    id: str
    kept: bool
    asked: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    id: str


@dataclass(frozen=True, slots=True)
class Finished:
    id: str
    outcome: Outcome
    reason: FinishReason
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """This request failed alone; its neighbours go on."""

    id: str
    code: str
    message: str


EngineEvent = Started | Tokens | Paused | Resumed | Finished | Failed
PauseMode = Literal["auto", "keep", "recompute"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; what it cannot is refused by name at submit.

    ``top_logprobs``: the most alternatives per token, None = no logprobs at all. ``pause``: how far an
    engine can go on behind a pause. ``batch_invariant``: a request's tokens do not depend on its company,
    by a check at load.
    """

    top_logprobs: int | None = 20
    prompt_logprobs: bool = True
    seed: bool = True
    logit_bias: bool = True
    min_p: bool = True
    penalties: bool = True
    grammar: bool = True
    stop: bool = True
    n: bool = True
    beam: bool = True
    pause: Literal["keep", "recompute", "none"] = "keep"
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """``running``: rows by priority. ``waiting`` and ``paused``: requests."""

    waiting: int
    running: Mapping[Priority, int] = field(default_factory=dict)
    paused: int = 0
    rows: int = 0
    kv_bytes_used: int = 0  # by requests; what only the prefix cache holds is free
    kv_bytes_total: int = 0
    steps: int = 0
    stepped_at: float = 0.0  # Clock.monotonic of the last step or idle turn


@dataclass(frozen=True, slots=True)
class Resumable:
    """A request that a draining engine gave up: as GenRequest.generated it goes on elsewhere. The seed, the
    grammar's state and the penalties follow from the ids."""

    id: str
    generated: tuple[tuple[int, ...], ...]


class Engine(Protocol):
    """Continuous batching in one process; one thread owns the loop."""

    caps: Capabilities  # final once ``run`` has called ``ready``

    def submit(self, request: GenRequest) -> None:
        """Thread-safe. Raises Rejected for what can never run here (length, ids, ranges, grammar, model,
        and by name what the engine cannot do), Unavailable while it does not run."""

    def cancel(self, request_id: str) -> None:
        """Takes effect at the next step boundary; yields Finished(reason="cancelled"). An unknown id is
        ignored: the worker's registry keeps the marks for jobs that are not here yet."""

    def pause(self, request_id: str, mode: PauseMode = "auto") -> None:
        """Stop the request at the next step boundary, yields Paused. ``auto`` keeps its KV until memory is
        wanted; the text after ``resume`` is the same in every mode. Unknown ids are ignored."""

    def resume(self, request_id: str) -> None:
        """Undo ``pause``; yields Resumed when the request runs again."""

    def run(self, sink: Callable[[Sequence[EngineEvent]], None], ready: Callable[[], None]) -> None:
        """Load, call ``ready``, then serve on the calling thread until ``close``; what still runs then ends
        with Finished(reason="cancelled"). ``sink`` is called after each step with the step's events and
        must not block. Raises what loading raised; a broken loop ends with Failed for every request."""

    def drain(self, seconds: float) -> tuple[Resumable, ...]:
        """Take nothing new, let what is here finish for ``seconds``, then give the rest up without a further
        event. Blocks; for another thread than that of ``run``."""

    def stats(self) -> EngineStats: ...

    @property
    def alive(self) -> bool:
        """Between ``ready`` and the end of ``run``."""

    def close(self) -> None:
        """End ``run``; does not wait for it."""
