"""The nouns of a job. Frozen, standard library only; docs/states.md draws the states."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
class Grammar:
    """What the output must match. ``text``: the schema as JSON, the expression, the choices as a JSON
    list, or the rules; "" for ``json_object`` (any JSON object)."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "ebnf"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam search, with the meaning of transformers' ``num_beams``, ``length_penalty`` and ``early_stopping``:
    a finished text scores sum(logprobs) / tokens ** length_penalty; ``early_stopping`` ends the search at
    ``width`` finished texts, else it goes on while a running one could still beat the worst of them."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The defaults ask for nothing; docs/sampling.md has the order of the steps.

    ``max_tokens`` is already clamped to the room that the context leaves (the API does it); 0 only scores
    the prompt. ``temperature`` under 1e-5 is greedy; ``top_k`` 0 is off. ``repetition_penalty`` counts
    prompt and output, the two others the output. ``logit_bias``: (id, addend), by id. ``seed``: any int64.
    ``stop``: strings; the text ends before the first match. ``min_tokens``: no end before so many.
    ``n``: choices drawn from one prompt. ``logprobs``, ``prompt_logprobs``: how many alternatives beside
    the token's own, None = none at all.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam: Beam | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def deterministic(self) -> bool:
        """Whether a second run gives the same text, so that its result may be cached."""
        return self.greedy or self.seed is not None

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on the tokens before it by more than the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def width(self) -> int:
        """Rows that the request runs in, side by side."""
        return self.beam.width if self.beam else self.n

    @property
    def total_tokens(self) -> int:
        """The most tokens that all choices together can have."""
        return self.n * self.max_tokens

    def to_json(self) -> Json:
        """A JSON object that is the same for equal parameters."""
        data = asdict(self)
        lists = {name: [list(item) if isinstance(item, tuple) else item for item in data[name]] for name in _TUPLES}
        return {**data, **lists}

    @classmethod
    def from_json(cls, data: Json) -> "SamplingParams":
        """Fields that the writer did not know have their defaults."""
        values = {**data, **{name: tuple(data[name]) for name in _TUPLES if name in data}}
        values["logit_bias"] = tuple((int(token), float(bias)) for token, bias in values.get("logit_bias", ()))
        if values.get("beam"):
            values["beam"] = Beam(**values["beam"])
        if values.get("grammar"):
            values["grammar"] = Grammar(**values["grammar"])
        return cls(**values)


_TUPLES = ("logit_bias", "stop", "stop_token_ids")


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
class TokenLogprob:
    """Natural logarithm of the probability that the model itself gave a token, before penalties, masks
    and temperature. ``top``: (id, logprob) of the likeliest at its place, by (logit descending, id
    ascending). Never infinite: -inf is -9999.0, so that it can be sent as JSON and summed."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> list[Any]:
        return [self.logprob, [list(pair) for pair in self.top]]

    @classmethod
    def from_json(cls, data: list[Any]) -> "TokenLogprob":
        return cls(data[0], tuple((token, logprob) for token, logprob in data[1]))


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated text. ``token_ids`` holds every id drawn, also the end-of-sequence one;
    ``logprobs``, if asked for, is as long."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None

    def to_json(self) -> Json:
        logprobs = None if self.logprobs is None else [item.to_json() for item in self.logprobs]
        return {**_shallow(self), "token_ids": list(self.token_ids), "logprobs": logprobs}

    @classmethod
    def from_json(cls, data: Json) -> "Choice":
        logprobs = data.get("logprobs")
        return cls(
            **{
                **data,
                "token_ids": tuple(data["token_ids"]),
                "logprobs": None if logprobs is None else tuple(map(TokenLogprob.from_json, logprobs)),
            }
        )


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run produced; a cancelled job keeps what it had. ``prompt_logprobs``, if asked for, has
    one entry per prompt token, None for the first."""

    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def tokens(self) -> int:
        """Tokens published for the job, all choices: the ``pos`` after its last token event."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def to_json(self) -> Json:
        scores = self.prompt_logprobs
        return {
            "choices": [choice.to_json() for choice in self.choices],
            "usage": asdict(self.usage),
            "prompt_logprobs": None if scores is None else [item and item.to_json() for item in scores],
        }

    @classmethod
    def from_json(cls, data: Json) -> "Outcome":
        """Raises TypeError, KeyError or ValueError for what is no outcome."""
        choices, scores = tuple(map(Choice.from_json, data["choices"])), data.get("prompt_logprobs")
        return cls(
            choices,
            Usage(**data["usage"]),
            None if scores is None else tuple(item and TokenLogprob.from_json(item) for item in scores),
        )


def _shallow(value: Any) -> Json:
    return {field.name: getattr(value, field.name) for field in fields(value)}


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
