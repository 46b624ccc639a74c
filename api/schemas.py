"""The shapes of the wire. Request models validate strictly (no "5" for 5, no true for 1); all of
them make the OpenAPI document. null stands for absent everywhere, so no field here is nullable
on the way in. What a job answers with is in api/answer_schemas.py.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from api.answer_schemas import Answer, Usage
from promptmill.core.limits import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_LENGTH_PENALTY,
    MAX_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    MAX_WIDTH,
)

MAX_CHOICES = 1024  # of a guided choice
INT64 = 2**63

StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]
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


class JsonSchema(_Request):
    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Of no account: the schema always holds")


class ResponseFormat(_Request):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Request):
    """Exactly one."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JobRequest(_Request):
    """A job. Exactly one of `prompt` and `messages`. Unknown fields are ignored; known ones that are
    not built are refused."""

    prompt: str | list[int] | None = Field(None, description="Raw text, or token ids")
    messages: list[Message] | None = None
    model: str | None = Field(None, description="May be left out while one model is served")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="Default: 16 for a prompt, the rest of the context for messages; clamped. 0 with echo only scores the prompt",
    )
    max_completion_tokens: int | None = Field(None, ge=0, description="Wins over max_tokens")
    min_tokens: int | None = Field(None, ge=0, description="No end before so many tokens; at most max_tokens")
    temperature: Finite | None = Field(None, ge=0, le=2, description="Default 1; 0 is greedy")
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: off")
    min_p: Finite | None = Field(None, ge=0, le=1, description="Least probability, relative to that of the likeliest token")
    repetition_penalty: Finite | None = Field(None, gt=0, le=10, description="Over prompt and output; 1: off")
    presence_penalty: Finite | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: Finite | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: Annotated[dict[str, Annotated[Finite, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], Field(max_length=MAX_BIASES)] | None = Field(
        None, description="Token id -> what is added to its logit"
    )
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = Field(None, description="Go on behind the end-of-sequence token")
    n: int | None = Field(None, ge=1, le=MAX_WIDTH, description="Choices")
    best_of: int | None = Field(None, ge=1, description="Only as n")
    logprobs: bool | Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        None, description="Of messages: true or false. Of a prompt: how many alternatives per token"
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="Of messages, with logprobs")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="Alternatives per token of the prompt")
    echo: bool | None = Field(None, description="Of a prompt: the text, and the logprobs, begin with the prompt")
    use_beam_search: bool | None = Field(None, description="With temperature 0; without stop and logprobs")
    beam_width: int | None = Field(None, ge=2, le=MAX_WIDTH, description="Default: n")
    length_penalty: Finite | None = Field(None, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    early_stopping: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="A JSON schema, or its text")
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = Field(None, description="EBNF")
    structured_outputs: StructuredOutputs | None = None
    priority: Literal["interactive", "standard", "bulk"] | None = Field(None, description="Default standard")
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    cache: Literal["on", "off"] | None = Field(None, description="Default on: deterministic requests are answered from the result cache")
    metadata: dict[str, str] | None = Field(None, description="At most 16 pairs; keys up to 64 characters, values up to 512")


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
    finish_reason: Literal["stop", "length", "cancelled"] | None = None
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = Field(
        None, description="If asked for: of each token its logprob and [id, logprob] of the likeliest"
    )
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
