"""The token log in Redis: a stream per job for replay, a channel of the same name for live viewers."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from promptmill.core.errors import BadCursor
from promptmill.core.events import Cursor, EventType, StreamEvent
from promptmill.core.ports import Append
from storage import keys
from storage.redis_client import connect, reaching

RUNNING_SECONDS = 3600  # life of a log after its last append, so that a lost job leaves nothing for ever


class RedisTokenStream:
    """``ttl_seconds``: life of a log after its terminal event."""

    def __init__(self, url: str, *, ttl_seconds: float = 60.0):
        self._redis = connect(url)
        self._ended_seconds = max(1, round(ttl_seconds))
        self._append = self._redis.register_script(files("storage").joinpath("append.lua").read_text(encoding="utf-8"))

    def append(self, events: Sequence[StreamEvent]) -> dict[str, Append]:
        by_job: dict[str, list[StreamEvent]] = {}
        for event in events:
            by_job.setdefault(event.job, []).append(event)
        if not by_job:
            return {}
        argv: list[str | int] = [RUNNING_SECONDS, self._ended_seconds]
        for own in by_job.values():
            argv.append(len(own))
            for event in own:
                argv += [event.cursor.attempt, event.cursor.seq, int(event.type.terminal), encode(event)]
        with reaching("token log"):
            verdicts: Any = self._append(keys=[keys.tokens(job) for job in by_job], args=argv)
        return {job: Append.ACCEPTED if ok else Append.FENCED for job, ok in zip(by_job, verdicts, strict=True)}

    def read(self, job: str, after: Cursor) -> list[StreamEvent]:
        with reaching("token log"):
            entries: Any = self._redis.xrange(keys.tokens(job), f"({after}", "+")
        return [decode(fields[keys.EVENT_FIELD.encode()]) for _, fields in entries]

    def last(self, job: str) -> Cursor | None:
        with reaching("token log"):
            entries: Any = self._redis.xrevrange(keys.tokens(job), count=1)
        return Cursor.parse(entries[0][0].decode()) if entries else None

    def check(self) -> None:
        with reaching("token log"):
            self._redis.ping()

    def close(self) -> None:
        self._redis.close()


def encode(event: StreamEvent) -> str:
    """JSON in ASCII, so that half a surrogate pair or U+0000 of a model's text survives every hop."""
    return json.dumps(event.to_json(), separators=(",", ":"), ensure_ascii=True)


def decode(text: bytes) -> StreamEvent:
    """Raises ValueError for what is no event."""
    try:
        data = json.loads(text)
        return StreamEvent(data.pop("job"), Cursor.parse(data.pop("id")), EventType(data.pop("type")), data)
    except (LookupError, TypeError, AttributeError, BadCursor) as error:
        raise ValueError(f"no event: {error}") from error
