"""Events on their way to the stream: in order per job, tokens joined, nothing lost by an outage."""

from dataclasses import replace

from promptmill.core.events import EventType, StreamEvent


class Outbox:
    """Not thread-safe; the flusher's lock guards it.

    ``fresh`` events still join with later ones. Once taken they are ``sent``: frozen, since the
    stream may have written some of them, and offered again first until ``settle``.
    """

    def __init__(self) -> None:
        self._fresh: dict[str, list[StreamEvent]] = {}
        self._sent: list[StreamEvent] = []

    def __bool__(self) -> bool:
        return bool(self._fresh or self._sent)

    def add(self, event: StreamEvent) -> None:
        events = self._fresh.setdefault(event.job, [])
        if events and (joined := join(events[-1], event)):
            events[-1] = joined
        else:
            events.append(event)

    def take(self) -> list[StreamEvent]:
        """All that must be appended now. ``settle`` it, or take again."""
        for events in self._fresh.values():
            self._sent += events
        self._fresh = {}
        return list(self._sent)

    def settle(self) -> None:
        """What was taken is in the stream."""
        self._sent = []

    def drop(self, job: str, attempt: int) -> None:
        """Forget what attempts up to ``attempt`` of the job still had to say."""
        kept = [event for event in self._fresh.pop(job, []) if event.cursor.attempt > attempt]
        if kept:
            self._fresh[job] = kept
        self._sent = [event for event in self._sent if event.job != job or event.cursor.attempt > attempt]


def join(first: StreamEvent, second: StreamEvent) -> StreamEvent | None:
    """One token event that says what both say, or None if they do not follow each other."""
    if not (first.type is second.type is EventType.TOKEN) or first.cursor.attempt != second.cursor.attempt:
        return None
    a, b = first.data, second.data
    if a["index"] != b["index"] or a["pos"] + len(a["token_ids"]) != b["pos"]:
        return None
    data = {**a, **b, "pos": a["pos"], "text": a["text"] + b["text"], "token_ids": a["token_ids"] + b["token_ids"]}
    if "logprobs" in b:
        data["logprobs"] = a["logprobs"] + b["logprobs"]
    return replace(second, data=data)
