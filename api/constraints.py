"""What the output must match: OpenAI's ``response_format``, vLLM's ``guided_*`` and ``structured_outputs``."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from api.body import parse_object
from api.schemas import MAX_CHOICES
from promptmill.core.errors import BadRequest, Unsupported
from promptmill.core.jobs import Grammar
from promptmill.core.limits import MAX_GRAMMAR_CHARS

MAX_NAME = 64
BY_HAND = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


def grammar_of(fields: Mapping[str, Any]) -> tuple[Grammar, str] | None:
    """The constraint of a request and the field it came from. ``fields``: as sent, without nulls. Raises
    BadRequest for one that is malformed, and for two; whether it compiles is not looked at."""
    found = [(grammar, name) for name in BY_HAND if name in fields and (grammar := _READERS[name](fields[name], name)) is not None]
    if len(found) > 1:
        raise BadRequest(f"{found[0][1]} and {found[1][1]} exclude each other", param=found[1][1])
    if found and len(found[0][0].text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"a grammar may have {MAX_GRAMMAR_CHARS} characters", param=found[0][1])
    return found[0] if found else None


def _response_format(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise BadRequest("response_format must be an object with a type", param=name)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_object")
        case "json_schema":
            return _openai_schema(value.get("json_schema"), f"{name}.json_schema")
    raise BadRequest("the type of response_format must be text, json_object or json_schema", param=f"{name}.type")


def _openai_schema(value: Any, name: str) -> Grammar:
    if not isinstance(value, dict):
        raise BadRequest("json_schema must be an object with name and schema", param=name)
    title, strict = value.get("name"), value.get("strict")
    if not isinstance(title, str) or not 1 <= len(title) <= MAX_NAME:
        raise BadRequest(f"a schema needs a name of 1..{MAX_NAME} characters", param=f"{name}.name")
    if strict is not None and not isinstance(strict, bool):
        raise BadRequest("strict must be true or false", param=f"{name}.strict")
    if not isinstance(value.get("schema"), dict):
        raise BadRequest("schema must be an object", param=f"{name}.schema")
    return _json_schema(value["schema"], f"{name}.schema")


def _json_schema(value: Any, name: str) -> Grammar:
    """The order of keys is kept: it is the order of the output."""
    if isinstance(value, str):
        try:
            value = parse_object(value.encode())
        except BadRequest:
            raise BadRequest("the text is not a JSON object", param=name) from None
    if not isinstance(value, dict):
        raise BadRequest("a JSON schema must be an object, or its text", param=name)
    return Grammar("json_schema", json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def _regex(value: Any, name: str) -> Grammar:
    return Grammar("regex", _text(value, name))


def _ebnf(value: Any, name: str) -> Grammar:
    return Grammar("ebnf", _text(value, name))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest("this must be a text that is not empty", param=name)
    return value


def _choice(value: Any, name: str) -> Grammar:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise BadRequest(f"choices must be a list of 1..{MAX_CHOICES} texts", param=name)
    for at, text in enumerate(value):
        _text(text, f"{name}[{at}]")
    return Grammar("choice", json.dumps(list(dict.fromkeys(value)), separators=(",", ":"), ensure_ascii=False))


def _json_object(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise BadRequest("json_object must be true or false", param=name)
    return Grammar("json_object") if value else None


def _structured_outputs(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise BadRequest("structured_outputs must be an object", param=name)
    found: list[Grammar] = []
    for key, item in value.items():
        path = f"{name}.{key[:100]}"
        if key in _STRUCTURED and item is not None:
            grammar = _STRUCTURED[key](item, path)
            found += [grammar] if grammar else []
        elif item:  # of vLLM's other options those that are on
            raise Unsupported(f"structured_outputs takes {', '.join(_STRUCTURED)}", param=path.encode("ascii", "backslashreplace").decode())
    if len(found) != 1:
        raise BadRequest(f"structured_outputs takes exactly one of {', '.join(_STRUCTURED)}", param=name)
    return found[0]


Reader = Callable[[Any, str], Grammar | None]
_STRUCTURED: Mapping[str, Reader] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _json_object,
}
_READERS: Mapping[str, Reader] = {
    "response_format": _response_format,
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "structured_outputs": _structured_outputs,
}
