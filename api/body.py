"""Reads a request's body as strict JSON, so that every later reader sees the same values.

Python's ``json`` alone takes NaN, keeps the last of two equal keys, and recurses; here all of that
is a 400. The depth is checked on the text, before anything is built.
"""

import json
import re
from typing import Any

from flask import Request
from gunicorn.http.errors import ParseException

from promptmill.core.errors import BadRequest, PayloadTooLarge, UnsupportedMediaType

MAX_DEPTH = 100
MAX_CONTAINERS = 200_000  # lists and objects of a body: each costs memory far beyond its two bytes
READ_BYTES = 64 * 1024
MAX_DRAINED = 64 * 1024 * 1024  # of a body over the limit
_BOM = b"\xef\xbb\xbf"
# Strings as a whole, else a lone quote or a bracket. Possessive: linear, also for a hostile text.
_STRUCTURE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the request's body of at most ``limit`` bytes. Raises BadRequest,
    UnsupportedMediaType, PayloadTooLarge."""
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("a compressed body is not taken; send it plain")
    if not (request.mimetype == "application/json" or (request.mimetype.startswith("application/") and request.mimetype.endswith("+json"))):
        raise UnsupportedMediaType("the body must be JSON with Content-Type: application/json")
    if request.mimetype_params.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("JSON must be encoded as UTF-8")
    return parse_object(_read(request, limit))


def _read(request: Request, limit: int) -> bytes:
    """The whole body. Not by Flask's MAX_CONTENT_LENGTH: that cuts a chunked body off without a word."""
    promised = request.content_length or 0
    if promised <= limit:
        body = bytearray()
        while chunk := _next_chunk(request, min(READ_BYTES, limit + 1 - len(body))):
            body += chunk
            if len(body) > limit:
                break
        else:
            if len(body) < promised:
                raise BadRequest("the body ended before its Content-Length", code="invalid_json")
            return bytes(body)
    if "Expect" not in request.headers:  # else the client waits for leave to send, which it does not get
        _drain(request)
    raise PayloadTooLarge(f"the body is larger than {limit} bytes")


def _drain(request: Request) -> None:
    """Take in the rest, so that the client comes to read the answer instead of a broken pipe."""
    left = MAX_DRAINED
    while left > 0 and (chunk := _next_chunk(request, READ_BYTES)):
        left -= len(chunk)


def _next_chunk(request: Request, size: int) -> bytes:
    """Raises BadRequest when the transfer is broken. The server's own words about it hold pieces of the body: they go nowhere."""
    try:
        return request.stream.read(size)
    except (OSError, ParseException):
        raise BadRequest("the body did not arrive whole", code="invalid_json") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """The object that ``raw`` holds. Raises BadRequest."""
    if not raw.strip():
        raise BadRequest("the body is empty; send a JSON object", code="invalid_json")
    try:
        text = raw.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8", code="invalid_json") from None
    _check_structure(text)
    floats = _Floats()
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_float=floats.parse, parse_constant=floats.parse)
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise BadRequest(f"the body is not valid JSON{where}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    if not floats.finite or _SURROGATE.search(text):
        _refuse_flaws(value)
    return value


def _check_structure(text: str) -> None:
    depth = containers = 0
    for match in _STRUCTURE.finditer(text):
        first = text[match.start()]
        if first in "[{":
            depth += 1
            containers += 1
            if depth > MAX_DEPTH:
                raise BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
            if containers > MAX_CONTAINERS:
                raise BadRequest(f"the body holds more than {MAX_CONTAINERS} lists and objects", code="invalid_json")
        elif first in "]}":
            depth -= 1
        elif match.end() - match.start() == 1:
            raise BadRequest("the body is not valid JSON: a string has no end", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadRequest("an object has the same key twice", param=_printable(twice), code="duplicate_key")
    return value


class _Floats:
    """Parses floats and remembers whether all were finite; the flaw is named once its place is known."""

    def __init__(self) -> None:
        self.finite = True

    def parse(self, text: str) -> float:
        value = float(text)
        self.finite = self.finite and abs(value) < float("inf")
        return value


def _refuse_flaws(root: dict[str, Any]) -> None:
    """Raises BadRequest with the path of a number that is not finite, or of half a surrogate pair."""
    _refuse_flaw(root, ())


def _refuse_flaw(value: Any, path: tuple[str | int, ...]) -> None:
    """``path``: keys and places from the root; made into a text only for an answer, since keys may be long."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not _whole(key):
                raise BadRequest("a key holds half a surrogate pair", param=_path_text(path) or None, code="invalid_json")
            _refuse_flaw(item, (*path, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _refuse_flaw(item, (*path, at))
    elif isinstance(value, float) and not abs(value) < float("inf"):
        raise BadRequest("a number must be finite", param=_path_text(path))
    elif isinstance(value, str) and not _whole(value):
        raise BadRequest("a text holds half a surrogate pair", param=_path_text(path))


def _path_text(path: tuple[str | int, ...]) -> str:
    """Such as ``messages[2].role``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in path)
    return _printable(text.removeprefix("."))


def _whole(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _printable(path: str) -> str:
    """A path that is safe to show: keys come from the client and may be of any length."""
    return path[:100].encode("ascii", "backslashreplace").decode()
