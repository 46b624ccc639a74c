"""The one validator: from a parsed body to what an engine runs. Everything is checked before the
job exists, so a bad request costs no worker anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from api import constraints, sampling
from api.prompts import chat_messages, prompt_ids
from api.sampling import Limits, Prompt, sampling_params
from api.schemas import JobRequest
from api.tokenizing import ServedModel, too_long
from api.unbuilt import HARMLESS, NEUTRAL, PREFIXES, UnknownFields, refuse_unbuilt
from promptmill.core.errors import BadRequest, ModelNotFound
from promptmill.core.jobs import JobSpec, Priority

METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512
TIERS = {"auto": None, "default": None, "priority": Priority.INTERACTIVE, "flex": Priority.BULK}
_BY_HAND = (
    "prompt",
    "messages",
    "priority",
    "metadata",
    *sampling.BY_HAND,
    *constraints.BY_HAND,
)  # pydantic's words for unions help nobody


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
    def __init__(self, models: Mapping[str, ServedModel], limits: Limits):
        self._models = models
        self._limits = limits
        self._unknown = UnknownFields()

    def validate(self, body: Mapping[str, Any], default: Priority) -> ValidJob:
        """Raises BadRequest, Unsupported, ContextLengthExceeded or ModelNotFound with the field at fault."""
        body = {name: value for name, value in body.items() if value is not None}
        refuse_unbuilt(body)
        self._unknown.note(
            {name for name in body.keys() - JobRequest.model_fields.keys() - NEUTRAL.keys() - HARMLESS if not name.startswith(PREFIXES)}
        )
        fields = {name: value for name, value in body.items() if name in JobRequest.model_fields}
        sent = _scalars({name: value for name, value in fields.items() if name not in _BY_HAND})
        metadata = _metadata(fields.get("metadata", {}))
        priority = _priority(fields.get("priority"), sent.service_tier, default)
        constraint = constraints.grammar_of(fields)
        model = self._model(sent.model)
        shape = _shape(fields)
        ids = self._ids(model, fields)
        prompt = Prompt(shape == "messages", len(ids), model.card.context_length - len(ids), model.card.vocab_size)
        params = sampling_params(fields, sent, prompt, self._limits, constraint[0] if constraint else None)
        if constraint:
            model.check_grammar(*constraint)
        return ValidJob(model, JobSpec(ids, params, shape), priority, sent.cache != "off", metadata, fields)

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
            ids = model.encode_chat(chat_messages(fields["messages"]))
        elif isinstance(fields["prompt"], str):
            ids = model.encode_prompt(fields["prompt"])
        else:
            ids = prompt_ids(fields["prompt"], model)
        if len(ids) >= model.card.context_length:
            raise too_long(model.card.context_length, str(len(ids)), _shape(fields))
        return ids


def _shape(fields: Mapping[str, Any]) -> Literal["prompt", "messages"]:
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


def _priority(priority: Any, tier: str | None, default: Priority) -> Priority:
    """null and 0 are the route's default; ``service_tier`` is OpenAI's word for the same."""
    if priority is None or (type(priority) is int and priority == 0):
        return (TIERS[tier] if tier else None) or default
    if not isinstance(priority, str) or priority not in Priority.__members__.values():
        raise BadRequest(f"priority must be one of {', '.join(Priority)}", param="priority")
    return Priority(priority)


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
