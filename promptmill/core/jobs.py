"""The nouns of a job. Frozen, standard library only; docs/states.md draws the states."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

Json = dict[str, Any]


class Status(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return not TRANSITIONS[self]


TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RUNNING, Status.CANCELLED, Status.EXPIRED}),
    Status.RUNNING: frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.QUEUED}),
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.EXPIRED: frozenset(),
}


class Priority(StrEnum):
    """One word everywhere: field, column, label and the first half of a queue's name."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


CacheUse = Literal["hit", "miss", "off"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. ``temperature`` under 1e-5 is greedy; ``top_k`` 0 and ``top_p`` 1 are off.

    ``max_tokens`` is already clamped to the room that the context leaves (the API does it).
    ``stop``: strings; the text ends before the first match.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def deterministic(self) -> bool:
        """Whether a second run gives the same text, so that its result may be cached."""
        return self.greedy or self.seed is not None

    def to_json(self) -> Json:
        return {**asdict(self), "stop": list(self.stop)}

    @classmethod
    def from_json(cls, data: Json) -> "SamplingParams":
        return cls(**{**data, "stop": tuple(data["stop"])})


@dataclass(frozen=True, slots=True)
class JobSpec:
    """All that an engine needs to run a job; fixed at submit. ``shape`` is that of the answer."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    shape: Literal["prompt", "messages"] = "prompt"

    def to_json(self) -> Json:
        return {"prompt_ids": list(self.prompt_ids), "sampling": self.sampling.to_json(), "shape": self.shape}

    def cache_key(self, model_revision: str) -> str:
        """sha256 over everything that changes the result: revision, final ids, sampling. Hex."""
        text = json.dumps([model_revision, list(self.prompt_ids), self.sampling.to_json()], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_json(cls, data: Json) -> "JobSpec":
        return cls(tuple(data["prompt_ids"]), SamplingParams.from_json(data["sampling"]), data["shape"])


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated text. ``token_ids`` holds every id drawn, also the end-of-sequence one."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run produced; a cancelled job keeps what it had."""

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def tokens(self) -> int:
        """Tokens published for the job, all choices: the ``pos`` after its last token event."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Json) -> "Outcome":
        choices = tuple(Choice(**{**c, "token_ids": tuple(c["token_ids"])}) for c in data["choices"])
        return cls(choices, Usage(**data["usage"]))


@dataclass(frozen=True, slots=True)
class JobError:
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds, each None until known. ``window_ms`` is the part of the queue time spent in windows."""

    queue_ms: float | None = None
    window_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    total_ms: float | None = None


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """Scope is (tenant, route). ``body_hash`` is a hash of the parsed body, blind to key order."""

    route: str
    key: str
    body_hash: str


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job as the API hands it to the store. With ``outcome`` (a cache hit) it is born succeeded."""

    id: str
    model: str
    model_revision: str
    priority: Priority
    spec: JobSpec
    request: Json
    created_at: float
    tenant: str = "default"
    metadata: Json = field(default_factory=dict)
    cache: CacheUse = "miss"
    outcome: Outcome | None = None
    idempotency: IdempotencyKey | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job as stored. Times are UNIX seconds. ``attempt`` is the fence: it counts the claims."""

    id: str
    tenant: str
    status: Status
    model: str
    model_revision: str
    priority: Priority
    spec: JobSpec
    request: Json
    metadata: Json
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    attempt: int = 0
    losses: int = 0
    worker: str | None = None
    node: str | None = None
    cancel_requested: bool = False
    cache: CacheUse = "miss"
    outcome: Outcome | None = None
    error: JobError | None = None
    timings: Timings = Timings()
    batch_id: str | None = None


@dataclass(frozen=True, slots=True)
class QueueName:
    """``<priority>.<model>``, the name of a broker queue."""

    priority: Priority
    model: str

    def __str__(self) -> str:
        return f"{self.priority}.{self.model}"

    @classmethod
    def parse(cls, name: str) -> "QueueName | None":
        """The parts of a queue's name, or None for a queue that does not hold jobs."""
        head, dot, model = name.partition(".")
        if not dot or head not in Priority.__members__.values():
            return None
        return cls(Priority(head), model)


@dataclass(frozen=True, slots=True)
class JobRef:
    """What a queue needs to know of a job: nothing but its id and where it belongs."""

    id: str
    queue: QueueName


@dataclass(frozen=True, slots=True)
class Held:
    """A claim in the hands of a worker: the fence (id, attempt)."""

    id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A won claim and all that is needed to run it. ``queued_ms``: creation to claim, wall time."""

    id: str
    attempt: int
    tenant: str
    queue: QueueName
    model_revision: str
    spec: JobSpec
    cache: CacheUse
    created_at: float
    queued_ms: float

    @property
    def held(self) -> Held:
        return Held(self.id, self.attempt)


@dataclass(frozen=True, slots=True)
class Finish:
    """A run's end, to be committed under the fence (id, attempt, worker)."""

    id: str
    attempt: int
    worker: str
    status: Status
    outcome: Outcome | None = None
    error: JobError | None = None
    timings: Timings = Timings()
