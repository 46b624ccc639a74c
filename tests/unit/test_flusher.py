from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest

from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.errors import Unavailable
from promptmill.core.events import START, StreamEvent, started, tokens
from promptmill.core.jobs import TokenLogprob
from promptmill.core.ports import Append
from storage.memory import MemoryTokenStream
from tests.support.clock import FakeClock
from workers.flusher import INTERVAL_S, Flusher


class FlakyStream(MemoryTokenStream):
    """A stream that can be away, also after it has written: its answer is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.away = self.answer_lost = False
        self.calls: list[list[StreamEvent]] = []

    def append(self, events: Sequence[StreamEvent]) -> dict[str, Append]:
        if self.away:
            raise Unavailable("away")
        self.calls.append(list(events))
        verdicts = super().append(events)
        if self.answer_lost:
            raise Unavailable("no answer")
        return verdicts


def token(pos: int, text: str = "a", job: str = "job_a", attempt: int = 1, index: int = 0) -> StreamEvent:
    return tokens(job, attempt, index=index, pos=pos, text=text, token_ids=[pos])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def stream() -> FlakyStream:
    return FlakyStream()


@pytest.fixture
def fenced() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def flusher(stream: FlakyStream, clock: FakeClock, fenced: list[tuple[str, int]]) -> Flusher:
    return Flusher(stream, clock, lambda job, attempt: fenced.append((job, attempt)))


def test_tokens_of_a_flush_become_one_event(flusher: Flusher, stream: FlakyStream) -> None:
    flusher.tokens([token(0, "he"), token(1, "llo"), token(2, "!", index=1), token(3, "x", index=1)], urgent=True)
    flusher.run_once()
    first, second = stream.read("job_a", START)
    assert (first.data["text"], first.data["token_ids"], first.data["pos"]) == ("hello", [0, 1], 0)
    assert (second.data["text"], second.data["index"], second.data["pos"]) == ("!x", 1, 2)
    assert second.cursor == token(3).cursor  # the id counts all tokens up to the last


def test_joined_tokens_keep_their_logprobs(flusher: Flusher, stream: FlakyStream) -> None:
    scores = [TokenLogprob(-0.5, ((7, -0.5),)), TokenLogprob(-1.5)]
    parts = [tokens("job_a", 1, index=0, pos=pos, text="a", token_ids=[pos], logprobs=[score]) for pos, score in enumerate(scores)]
    flusher.tokens(parts, urgent=True)
    flusher.run_once()
    (event,) = stream.read("job_a", START)
    assert event == tokens("job_a", 1, index=0, pos=0, text="aa", token_ids=[0, 1], logprobs=scores)


def test_one_append_carries_the_events_of_all_jobs(flusher: Flusher, stream: FlakyStream) -> None:
    flusher.tokens([token(0, job="job_a"), token(0, job="job_b")], urgent=True)
    flusher.publish(started("job_c", 1, "tiny"))
    flusher.run_once()
    assert [{event.job for event in call} for call in stream.calls] == [{"job_a", "job_b", "job_c"}]


def test_first_tokens_and_markers_go_at_once_others_every_25_ms(flusher: Flusher, clock: FakeClock) -> None:
    assert flusher.due_in() is None
    flusher.publish(started("job_a", 1, "tiny"))
    assert flusher.due_in() == 0
    flusher.run_once()
    flusher.tokens([token(0)], urgent=True)
    assert flusher.due_in() == 0
    flusher.run_once()
    flusher.tokens([token(1)], urgent=False)
    assert flusher.due_in() == pytest.approx(INTERVAL_S)
    clock.advance(INTERVAL_S + 0.001)
    assert flusher.due_in() == 0


def test_an_outage_loses_nothing_and_keeps_the_order(flusher: Flusher, stream: FlakyStream, clock: FakeClock) -> None:
    marker = flusher.publish(started("job_a", 1, "tiny"))
    stream.away = True
    for pos in range(4):
        flusher.tokens([token(pos, str(pos))], urgent=True)
        flusher.run_once()
        delay = flusher.due_in()
        assert delay is not None and delay > 0  # it backs off, urgent or not
        clock.advance(delay)
    assert not marker.done()
    stream.away = False
    flusher.run_once()
    assert marker.result(0) is Append.ACCEPTED
    assert "".join(event.data.get("text", "") for event in stream.read("job_a", START)) == "0123"
    assert flusher.due_in() is None


def test_a_lost_answer_repeats_the_same_events(flusher: Flusher, stream: FlakyStream) -> None:
    stream.answer_lost = True
    flusher.tokens([token(0, "a")], urgent=True)
    flusher.run_once()
    stream.answer_lost = False
    flusher.tokens([token(1, "b")], urgent=True)
    flusher.run_once()
    assert [event.data["text"] for event in stream.read("job_a", START)] == ["a", "b"]
    assert stream.calls[1][0] == stream.calls[0][0]  # not joined with what came later: its id would be another


def test_a_fenced_attempt_is_reported(flusher: Flusher, stream: FlakyStream, fenced: list[tuple[str, int]]) -> None:
    stream.append([started("job_a", 2, "tiny")])
    flusher.tokens([token(0, job="job_a"), token(0, job="job_b")], urgent=True)
    flusher.run_once()
    assert fenced == [("job_a", 1)]
    assert flusher.due_in() is None


def test_a_dropped_attempt_says_nothing_more_but_a_later_one_does(flusher: Flusher, stream: FlakyStream) -> None:
    marker = flusher.publish(started("job_a", 1, "tiny"))
    flusher.tokens([token(0)], urgent=False)
    later = flusher.publish(started("job_a", 2, "tiny"))
    flusher.drop("job_a", 1)
    flusher.run_once()
    with pytest.raises(CancelledError):
        marker.result(0)
    assert later.result(0) is Append.ACCEPTED
    assert [event.cursor.attempt for event in stream.read("job_a", START)] == [2]


def test_what_was_sent_during_an_outage_can_be_dropped_too(flusher: Flusher, stream: FlakyStream) -> None:
    stream.away = True
    flusher.tokens([token(0)], urgent=True)
    flusher.run_once()
    flusher.drop("job_a", 1)
    assert flusher.due_in() is None


def test_closing_flushes_what_is_left(flusher: Flusher, stream: FlakyStream) -> None:
    flusher.start()
    flusher.publish(started("job_a", 1, "tiny")).result(10)
    flusher.tokens([token(0)], urgent=False)
    flusher.close()
    assert len(stream.read("job_a", START)) == 2


def test_the_thread_survives_an_error_nobody_foresaw() -> None:
    class Broken(MemoryTokenStream):
        broken = True

        def append(self, events: Sequence[StreamEvent]) -> dict[str, Append]:
            if self.broken:
                self.broken = False
                raise ValueError("a bug")
            return super().append(events)

    flusher = Flusher(Broken(), SYSTEM_CLOCK, lambda job, attempt: None)
    flusher.start()
    assert flusher.publish(started("job_a", 1, "tiny")).result(10) is Append.ACCEPTED
    flusher.close()
