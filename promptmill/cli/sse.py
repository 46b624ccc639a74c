"""Server-sent events, as far as a job's stream needs them (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

import json
from collections.abc import Iterable, Iterator
from typing import Any


def parse(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of the ``data`` of each whole event. Comments and other fields are skipped
    (the id stands in the object too); an event without its closing blank line is dropped."""
    data: list[bytes] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield json.loads(b"\n".join(data))
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines ended by LF or CRLF and by nothing else: httpx's own would also split at U+2028."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
