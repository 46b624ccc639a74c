"""Streams of jobs with several choices: their tokens come mixed, and every viewer can take them apart again."""

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptmill.core import events
from promptmill.core.errors import BadCursor
from promptmill.core.events import EventType, StreamEvent
from promptmill.core.jobs import Choice, Finish, Outcome, Status, TokenLogprob, Usage
from tests.support.factories import make_job, make_spec
from tests.unit.test_api_viewer import World

N = 3


class Choices(World):
    """``say`` publishes a token of one choice."""

    def __init__(self, max_tokens: int = 8) -> None:
        super().__init__()
        spec = make_spec(max_tokens=max_tokens, n=N, logprobs=0)
        (submitted,) = self.store.submit([make_job(clock=self.clock, spec=spec)])
        self.job = submitted.job.id
        self.drawn: dict[int, list[int]] = defaultdict(list)

    def say(self, index: int) -> None:
        token = 100 * index + len(self.drawn[index])
        self.drawn[index].append(token)
        score = score_of(token)
        event = events.tokens(self.job, self.attempt, index=index, pos=self.pos, text=letter(token), token_ids=[token], logprobs=[score])
        self.stream.append([event])
        self.pos += 1

    def outcome(self) -> Outcome:
        choices = tuple(
            Choice(index, "".join(map(letter, ids)), tuple(ids), "length", tuple(map(score_of, ids)))
            for index, ids in ((index, self.drawn[index]) for index in range(N))
        )
        return Outcome(choices, Usage(3, self.pos))

    def finish(self) -> None:
        assert self.store.finish_many([Finish(self.job, self.attempt, "w", Status.SUCCEEDED, self.outcome())]) == [True]
        self.tell_end()


def letter(token: int) -> str:
    return chr(0x4E00 + token)


def score_of(token: int) -> TokenLogprob:
    return TokenLogprob(-token / 7)


def shown(seen: Sequence[StreamEvent]) -> dict[int, tuple[str, list[int], list[object]]]:
    """Text, ids and logprobs by choice, as a strict client puts them together."""
    found: dict[int, tuple[str, list[int], list[object]]] = {}
    pos = 0
    for event in seen:
        if event.type in (EventType.STARTED, EventType.RESET):
            found, pos = {}, 0
        if event.type is EventType.TOKEN:
            data = event.data
            assert data["pos"] == pos, "a gap or a repeat"
            pos += len(data["token_ids"])
            text, ids, scores = found.get(data["index"], ("", [], []))
            found[data["index"]] = (text + data["text"], [*ids, *data["token_ids"]], [*scores, *data["logprobs"]])
    return found


def expected(world: Choices) -> dict[int, tuple[str, list[int], list[object]]]:
    return {
        choice.index: (choice.text, list(choice.token_ids), [score.to_json() for score in choice.logprobs or ()])
        for choice in world.outcome().choices
        if choice.token_ids
    }


@settings(deadline=None)
@given(st.lists(st.integers(0, N - 1), max_size=12), st.integers(0, 14), st.booleans())
def test_whoever_leaves_and_comes_back_has_every_choice_whole(order: list[int], leaves_after: int, expired: bool) -> None:
    """``expired``: when it comes back only the stored result is left."""
    world = Choices()
    world.start()
    for index in order:
        world.say(index)
    world.finish()
    seen: list[StreamEvent] = []
    first = world.view()
    for event in first.events():
        if event is None or len(seen) >= leaves_after:
            break
        seen.append(event)
    first.close()
    if expired:
        world.stream.drop(world.job)
    if not seen or not seen[-1].type.terminal:
        seen += [event for event in world.view(str(seen[-1].cursor) if seen else "").events() if event is not None]
    assert shown(seen) == expected(world)
    assert [event.type.terminal for event in seen].count(True) == 1


def test_a_cursor_may_count_the_tokens_of_all_choices() -> None:
    world = Choices(max_tokens=8)
    world.start()
    world.stream.drop(world.job)  # a running job's log may come back
    world.view(str(events.Cursor(1, events.SEQ_PER_TOKEN * 8 * N))).close()
    with pytest.raises(BadCursor):
        world.view(str(events.Cursor(1, events.SEQ_PER_TOKEN * (8 * N + 1))))
