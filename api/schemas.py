"""The shapes of the wire. Request models validate strictly (no "5" for 5, no true for 1); all of
them make the OpenAPI document. null stands for absent everywhere, so no field here is nullable
on the way in.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_STOPS = 32
MAX_STOP_LENGTH = 1024
INT64 = 2**63

StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TextPart(_Request):
    type: Literal["text"]
    text: str


class Message(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = Field(
        "", description="Text, or text parts that are joined. Only an assistant's may be empty or absent."
    )


class JobRequest(_Request):
    """A job. Exactly one of `prompt` and `messages`. Unknown fields are ignored; known ones that are
    not built are refused."""

    prompt: str | list[int] | None = Field(None, description="Raw text, or token ids")
    messages: list[Message] | None = None
    model: str | None = Field(None, description="May be left out while one model is served")
    max_tokens: int | None = Field(None, ge=1, description="Default: 16 for a prompt, the rest of the context for messages; clamped")
    max_completion_tokens: int | None = Field(None, ge=1, description="Wins over max_tokens")
    temperature: Finite | None = Field(None, ge=0, le=2, description="Default 1; 0 is greedy")
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: off")
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    priority: Literal["interactive", "standard", "bulk"] | None = Field(None, description="Default standard")
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    cache: Literal["on", "off"] | None = Field(None, description="Default on: deterministic requests are answered from the result cache")
    metadata: dict[str, str] | None = Field(None, description="At most 16 pairs; keys up to 64 characters, values up to 512")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class AnswerChoice(BaseModel):
    index: int
    text: str | None = Field(None, description="Of a prompt")
    message: AnswerMessage | None = Field(None, description="Of messages")
    finish_reason: Literal["stop", "length", "cancelled"]
    logprobs: None = None


class Answer(BaseModel):
    """Shaped as OpenAI's completion or chat completion."""

    id: str
    object: Literal["text_completion", "chat.completion"]
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage


class JobFailure(BaseModel):
    code: str
    message: str


class TimingsMs(BaseModel):
    queue_ms: float | None
    window_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    total_ms: float | None


class Links(BaseModel):
    self: str
    events: str
    ws: str
    cancel: str


class Job(BaseModel):
    id: str
    object: Literal["job"]
    status: Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
    model: str
    model_revision: str
    priority: Literal["interactive", "standard", "bulk"]
    created_at: float
    started_at: float | None
    finished_at: float | None
    attempt: int
    cache: Literal["hit", "miss", "off"]
    cancel_requested: bool
    request: dict[str, Any]
    result: Answer | None
    error: JobFailure | None
    timings: TimingsMs
    estimate: None
    metadata: dict[str, str]
    batch_id: str | None
    links: Links


class JobList(BaseModel):
    object: Literal["list"]
    data: list[Job]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ServedModelObject(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    revision: str
    context_length: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ServedModelObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class FinishedError(ErrorBody):
    job: Job


class StreamEventBody(BaseModel):
    """One event. `pos`: tokens of the job published before it. Exactly one terminal event ends a
    stream: `done` (succeeded, cancelled, expired) or `error` (failed)."""

    id: str = Field(description="<attempt>-<seq>; send it as Last-Event-ID or ?after= to go on behind it")
    job: str
    type: Literal["queued", "started", "token", "paused", "resumed", "reset", "done", "error"]
    index: int | None = None
    pos: int | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    status: str | None = None
    usage: Usage | None = None
    timings: TimingsMs | None = None


class WorkerBody(BaseModel):
    node: str
    models: dict[str, str]
    engine: str
    rows: int
    ready: bool
    host: str
    metrics_url: str


class Health(BaseModel):
    status: Literal["ready", "live"]
    workers: list[WorkerBody] | None = None
    models: list[str] | None = None
    redis: Literal["ok", "unreachable"] | None = None
