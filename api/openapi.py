"""The OpenAPI document, from the schemas of api/schemas.py. Version 3.0: the bundled Swagger UI 4 reads no later one."""

from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api import schemas
from promptmill import __version__

Json = dict[str, Any]
REF = "#/components/schemas/"
_SHOWN: tuple[type[BaseModel], ...] = (
    schemas.JobRequest,
    schemas.Job,
    schemas.JobList,
    schemas.FinishedError,
    schemas.ErrorBody,
    schemas.ModelList,
    schemas.ServedModelObject,
    schemas.StreamEventBody,
    schemas.Health,
)
_WORDS = {
    400: "The request is wrong; `param` names the field",
    403: "Host or Origin is not allowed",
    404: "No such job, model or route",
    409: "The job is over already",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "The Idempotency-Key came with another body before",
    500: "A fault of the server",
    503: "A store is away, or no room for a further stream; see Retry-After",
}


@lru_cache(maxsize=1)
def document() -> Json:
    return {
        "openapi": "3.0.3",
        "info": {"title": "promptmill", "version": __version__, "description": "A queue-backed job system for LLM inference."},
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }


def _paths() -> Json:
    job, after = _parameter("job_id", "path"), _parameter("after", "query", "Go on behind this event id")
    last_event = _parameter("Last-Event-ID", "header", "The same as after")
    key = _parameter("Idempotency-Key", "header", "1..255 printable ASCII characters; a retry with the same key gives the same job")
    wait = _parameter(
        "wait", "query", "Hold the answer until the job is over, at most so many seconds", {"type": "number", "minimum": 0, "maximum": 60}
    )
    status = _parameter(
        "status", "query", schema={"type": "string", "enum": ["queued", "running", "succeeded", "failed", "cancelled", "expired"]}
    )
    page_after = _parameter("after", "query", "The last id of the page before")
    limit = _parameter("limit", "query", schema={"type": "integer", "minimum": 1, "maximum": 100, "default": 20})
    cancel = {
        200: _json("It is cancelled", "Job"),
        202: _json("It runs and will be stopped", "Job"),
        409: _json(_WORDS[409], "FinishedError"),
    }
    submit = _operation("Submit a job", {202: _json("Accepted and durable", "Job")}, (400, 403, 404, 413, 415, 422, 503), key)
    submit["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"$ref": f"{REF}JobRequest"}}}}
    events: dict[int, Json] = {
        200: {
            "description": "Server-sent events; `data` is one event",
            "content": {"text/event-stream": {"schema": {"$ref": f"{REF}StreamEventBody"}}},
        },
        204: {"description": "The cursor is at the terminal event: nothing more will come"},
    }
    codes = "1000 over, 4400 bad cursor, 4404 unknown job, 1012 and 1013 come back later"
    socket: dict[int, Json] = {101: {"description": f"A WebSocket whose messages are the events. Close codes: {codes}"}}
    return {
        "/v1/jobs": {
            "post": submit,
            "get": _operation("List jobs, newest first", {200: _json("A page", "JobList")}, (400, 403, 503), status, page_after, limit),
        },
        "/v1/jobs/{job_id}": {
            "get": _operation("Read a job", {200: _json("The job", "Job")}, (400, 403, 404, 503), job, wait),
            "delete": _operation("Cancel a job", cancel, (403, 404, 503), job),
        },
        "/v1/jobs/{job_id}/cancel": {"post": _operation("Cancel a job", cancel, (403, 404, 503), job)},
        "/v1/jobs/{job_id}/events": {"get": _operation("A job's events over SSE", events, (400, 403, 404, 503), job, after, last_event)},
        "/v1/jobs/{job_id}/ws": {"get": _operation("A job's events over a WebSocket", socket, (400, 403), job, after)},
        "/v1/models": {"get": _operation("Served models", {200: _json("All of them", "ModelList")}, (403,))},
        "/v1/models/{model_id}": {
            "get": _operation("One model", {200: _json("The model", "ServedModelObject")}, (403, 404), _parameter("model_id", "path"))
        },
        "/health": {"get": _operation("The same as /health/ready", {200: _json("Ready", "Health")}, (403, 503))},
        "/health/live": {"get": _operation("Whether the process answers", {200: _json("Alive", "Health")}, (403,))},
        "/health/ready": {"get": _operation("Whether jobs are taken in; lists the workers", {200: _json("Ready", "Health")}, (403, 503))},
        "/metrics": {"get": _operation("Prometheus metrics of all processes of this host", {200: _text("text/plain")}, (403,))},
        "/openapi.json": {"get": _operation("This document", {200: _text("application/json")}, (403,))},
        "/docs": {"get": _operation("This document as a page", {200: _text("text/html")}, (403,))},
        "/": {"get": _operation("Where to go from here", {200: _text("text/html")}, (403,))},
    }


def _operation(summary: str, good: dict[int, Json], bad: tuple[int, ...], *parameters: Json) -> Json:
    answers = {**good, **{code: _json(_WORDS[code], "ErrorBody") for code in (*bad, 500)}}
    return {"summary": summary, "parameters": list(parameters), "responses": {str(code): answer for code, answer in answers.items()}}


def _parameter(name: str, place: str, text: str = "", schema: Json | None = None) -> Json:
    return {"name": name, "in": place, "required": place == "path", "description": text, "schema": schema or {"type": "string"}}


def _json(text: str, schema: str) -> Json:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": f"{REF}{schema}"}}}}


def _text(kind: str) -> Json:
    return {"description": "OK", "content": {kind: {"schema": {"type": "string"}}}}


def _schemas() -> Json:
    _, made = models_json_schema([(model, "validation") for model in _SHOWN], ref_template=REF + "{model}")
    return {name: _as_30(schema) for name, schema in made["$defs"].items()}


def _as_30(schema: Any) -> Any:
    """JSON Schema 2020-12 as pydantic writes it -> the dialect of OpenAPI 3.0."""
    if isinstance(schema, list):
        return [_as_30(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    new = {name: _as_30(value) for name, value in schema.items() if not (name == "default" and value is None)}
    for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(new.get(name), int | float):
            new[bound], new[name] = new[name], True
    if "const" in new:
        new["enum"] = [new.pop("const")]
    if new.get("type") == "null":
        return {"nullable": True, "type": "object", **{name: value for name, value in new.items() if name != "type"}}
    kinds = [kind for kind in new.get("anyOf", []) if kind != {"nullable": True, "type": "object"}]
    if "anyOf" in new and len(kinds) < len(new["anyOf"]):
        new["nullable"] = True
        if len(kinds) == 1:
            new.pop("anyOf")
            new.update({"allOf": kinds} if "$ref" in kinds[0] else kinds[0])
        else:
            new["anyOf"] = kinds
    return new
