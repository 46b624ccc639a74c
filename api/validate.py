"""The one validator: from a parsed body to what an engine runs. Everything is checked before the
job exists, so a bad request costs no worker anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from api.schemas import MAX_STOP_LENGTH, MAX_STOPS, JobRequest
from api.tokenizing import ServedModel, too_long
from api.unbuilt import HARMLESS, NEUTRAL, PREFIXES, UnknownFields, refuse_unbuilt
from promptmill.core.errors import BadRequest, ModelNotFound, Unsupported
from promptmill.core.jobs import JobSpec, Priority, SamplingParams

PROMPT_MAX_TOKENS = 16  # OpenAI's default of a completion
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512
ROLES = ("system", "developer", "user", "assistant")
TIERS = {"auto": None, "default": None, "priority": Priority.INTERACTIVE, "flex": Priority.BULK}
_BY_HAND = ("prompt", "messages", "stop", "priority", "metadata")  # pydantic's words for unions help nobody


@dataclass(frozen=True, slots=True)
class ValidJob:
    """A request that can run. ``request``: the fields that counted, as sent."""

    model: ServedModel
    spec: JobSpec
    priority: Priority
    cache: bool
    metadata: dict[str, str]
    request: dict[str, Any]


class JobValidator:
    """``max_tokens_cap``: largest ``max_tokens`` of a job; larger ones are clamped."""

    def __init__(self, models: Mapping[str, ServedModel], *, max_tokens_cap: int):
        self._models = models
        self._cap = max_tokens_cap
        self._unknown = UnknownFields()

    def validate(self, body: Mapping[str, Any], default: Priority) -> ValidJob:
        """Raises BadRequest, Unsupported, ContextLengthExceeded or ModelNotFound with the field at fault."""
        body = {name: value for name, value in body.items() if value is not None}
        refuse_unbuilt(body)
        self._unknown.note(
            {name for name in body.keys() - JobRequest.model_fields.keys() - NEUTRAL.keys() - HARMLESS if not name.startswith(PREFIXES)}
        )
        fields = {name: value for name, value in body.items() if name in JobRequest.model_fields}
        scalars = _scalars({name: value for name, value in fields.items() if name not in _BY_HAND})
        metadata = _metadata(fields.get("metadata", {}))
        priority = _priority(fields.get("priority"), scalars.service_tier, default)
        stop = _stop(fields.get("stop", []))
        model = self._model(scalars.model)
        shape = _shape(fields)
        ids = self._ids(model, fields)
        sampling = SamplingParams(
            max_tokens=self._max_tokens(model, scalars, len(ids), shape),
            temperature=1.0 if scalars.temperature is None else abs(scalars.temperature),
            top_p=1.0 if scalars.top_p is None else scalars.top_p,
            top_k=_top_k(scalars.top_k, model.card.vocab_size),
            seed=scalars.seed,
            stop=stop,
        )
        spec = JobSpec(ids, sampling, "messages" if shape == "messages" else "prompt")
        return ValidJob(model, spec, priority, scalars.cache != "off", metadata, fields)

    def _model(self, name: str | None) -> ServedModel:
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise BadRequest("several models are served here: name one", param="model")
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound("no such model is served here; GET /v1/models lists them", param="model")
        return model

    def _ids(self, model: ServedModel, fields: Mapping[str, Any]) -> tuple[int, ...]:
        if "messages" in fields:
            ids = model.encode_chat(_messages(fields["messages"]))
        elif isinstance(fields["prompt"], str):
            ids = model.encode_prompt(fields["prompt"])
        else:
            ids = _prompt_ids(fields["prompt"], model)
        if len(ids) >= model.card.context_length:
            raise too_long(model.card.context_length, str(len(ids)), _shape(fields))
        return ids

    def _max_tokens(self, model: ServedModel, scalars: JobRequest, prompt_tokens: int, shape: str) -> int:
        room = model.card.context_length - prompt_tokens
        default = room if shape == "messages" else PROMPT_MAX_TOKENS
        asked = next((n for n in (scalars.max_completion_tokens, scalars.max_tokens) if n is not None), default)
        return min(asked, room, self._cap)


def _shape(fields: Mapping[str, Any]) -> str:
    if ("prompt" in fields) == ("messages" in fields):
        raise BadRequest("send exactly one of prompt and messages", param="messages" if "messages" in fields else "prompt")
    return "messages" if "messages" in fields else "prompt"


def _scalars(fields: Mapping[str, Any]) -> JobRequest:
    try:
        return JobRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        name = str(first["loc"][0])
        raise BadRequest(f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}", param=name) from None


def _prompt_ids(prompt: Any, model: ServedModel) -> tuple[int, ...]:
    if not isinstance(prompt, list):
        raise BadRequest("prompt must be a text or a list of token ids", param="prompt")
    if not prompt:
        raise BadRequest("prompt must not be an empty list", param="prompt")
    if isinstance(prompt[0], str | list):
        raise Unsupported("a job takes one prompt; send one job for each", param="prompt")
    if len(prompt) >= model.card.context_length:
        raise too_long(model.card.context_length, str(len(prompt)), "prompt")
    for at, token in enumerate(prompt):
        if type(token) is not int:
            raise BadRequest("a token id must be an integer", param=f"prompt[{at}]")
        if not 0 <= token < model.card.vocab_size:
            raise BadRequest(f"a token id must be in 0..{model.card.vocab_size - 1}", param=f"prompt[{at}]")
    return tuple(prompt)


def _messages(messages: Any) -> list[tuple[str, str]]:
    if not isinstance(messages, list):
        raise BadRequest("messages must be a list", param="messages")
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Any, path: str) -> tuple[str, str]:
    """Other keys of a message are ignored; calls of tools are refused."""
    if not isinstance(message, dict):
        raise BadRequest("a message must be an object with role and content", param=path)
    role = message.get("role")
    if role in ("tool", "function"):
        raise Unsupported("tools are not supported by this version", param=f"{path}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"a role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    for calls in ("tool_calls", "function_call"):
        if message.get(calls):
            raise Unsupported("tools are not supported by this version", param=f"{path}.{calls}")
    content = message.get("content")
    if content is None and role == "assistant":
        return role, ""
    return "system" if role == "developer" else role, _content(content, f"{path}.content")


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest("content must be a text or a list of text parts", param=path)
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise BadRequest("a content part must be an object with type and text", param=f"{path}[{at}]")
        if kind != "text":
            raise Unsupported("only text parts are supported by this version", param=f"{path}[{at}].type")
        if not isinstance(part.get("text"), str):
            raise BadRequest("a text part must have a text", param=f"{path}[{at}].text")
        texts.append(part["text"])
    return "".join(texts)


def _stop(stop: Any) -> tuple[str, ...]:
    members: Sequence[Any] = [stop] if isinstance(stop, str) else stop
    if not isinstance(members, list):
        raise BadRequest("stop must be a text or a list of texts", param="stop")
    if len(members) > MAX_STOPS:
        raise BadRequest(f"stop takes at most {MAX_STOPS} texts", param="stop")
    for member in members:
        if not isinstance(member, str) or not 1 <= len(member) <= MAX_STOP_LENGTH:
            raise BadRequest(f"each member of stop must be a text of 1..{MAX_STOP_LENGTH} characters", param="stop")
    return tuple(members)


def _priority(priority: Any, tier: str | None, default: Priority) -> Priority:
    """null and 0 are the route's default; ``service_tier`` is OpenAI's word for the same."""
    if priority is None or (type(priority) is int and priority == 0):
        return (TIERS[tier] if tier else None) or default
    if not isinstance(priority, str) or priority not in Priority.__members__.values():
        raise BadRequest(f"priority must be one of {', '.join(Priority)}", param="priority")
    return Priority(priority)


def _top_k(top_k: int | None, vocab_size: int) -> int:
    """0 = off; so are -1 and all that excludes no token."""
    return 0 if top_k is None or top_k < 1 or top_k >= vocab_size else top_k


def _metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise BadRequest("metadata must be an object of texts", param="metadata")
    if len(metadata) > METADATA_PAIRS:
        raise BadRequest(f"metadata takes at most {METADATA_PAIRS} pairs", param="metadata")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > METADATA_KEY or len(value) > METADATA_VALUE:
            raise BadRequest(
                f"metadata takes keys of up to {METADATA_KEY} and texts of up to {METADATA_VALUE} characters", param="metadata"
            )
    return metadata
