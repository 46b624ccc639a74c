"""The kernel's nouns: what is written comes back the same, and ids and cursors keep their promises."""

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from promptmill.core import events, ids
from promptmill.core.errors import BadCursor
from promptmill.core.jobs import (
    TRANSITIONS,
    Beam,
    Choice,
    Grammar,
    JobError,
    JobSpec,
    Outcome,
    Priority,
    QueueName,
    SamplingParams,
    Status,
    Timings,
    TokenLogprob,
    Usage,
)

SPEC = JobSpec((1, 2, 3), SamplingParams(max_tokens=4, temperature=0.5, seed=-(2**63), stop=("\x00", "é")), "messages")
OUTCOME = Outcome((Choice(0, "a\x00🙂", (5, 6), "stop"), Choice(1, "", (), "cancelled")), Usage(3, 2, 1))


OTHER = {  # of each sampling field a value that is not its default
    "max_tokens": 5, "temperature": 0.25, "top_p": 0.5, "top_k": 3, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1.0,
    "frequency_penalty": 2.0, "logit_bias": ((3, -100.0), (7, 0.5)), "seed": 0, "stop": ("a", "b"), "stop_token_ids": (1, 2),
    "ignore_eos": True, "min_tokens": 2, "n": 3, "logprobs": 0, "prompt_logprobs": 20, "beam": Beam(4, 0.5, True),
    "grammar": Grammar("choice", '["é"]'),
}  # fmt: skip


def through_text(data):
    return json.loads(json.dumps(data))


def test_spec_and_outcome_survive_json():
    assert JobSpec.from_json(through_text(SPEC.to_json())) == SPEC
    assert Outcome.from_json(through_text(OUTCOME.to_json())) == OUTCOME
    assert OUTCOME.tokens == 2


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_sampling_field_survives_json_and_changes_the_cache_key(name):
    """A new field fails here until it has a value in OTHER."""
    sampling = replace(SamplingParams(max_tokens=4), **{name: OTHER[name]})
    assert SamplingParams.from_json(through_text(sampling.to_json())) == sampling != SamplingParams(max_tokens=4)
    assert JobSpec((1,), sampling).cache_key("r") != JobSpec((1,), SamplingParams(max_tokens=4)).cache_key("r")


def sampling_params():
    values = {name: st.just(value) | st.just(getattr(SamplingParams(max_tokens=4), name)) for name, value in OTHER.items()}
    floats = dict.fromkeys(("temperature", "min_p", "presence_penalty"), st.sampled_from([0.0, 0.5, 1.0]))
    return st.builds(SamplingParams, **{**values, **floats, "stop": st.lists(st.text("a,[]", max_size=3), max_size=2).map(tuple)})


@given(sampling_params(), sampling_params())
def test_two_requests_share_a_cache_key_only_if_they_are_equal(one, other):
    same = JobSpec((1,), one).cache_key("r") == JobSpec((1,), other).cache_key("r")
    assert same is (one == other)


def test_what_an_older_version_wrote_can_be_read():
    assert SamplingParams.from_json({"max_tokens": 4, "temperature": 0.0, "stop": ["x"]}) == SamplingParams(4, 0.0, stop=("x",))
    choice = {"index": 0, "text": "a", "token_ids": [1], "finish_reason": "stop"}
    outcome = Outcome.from_json({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}})
    assert (outcome.choices[0].logprobs, outcome.prompt_logprobs) == (None, None)


logprobs = st.builds(
    TokenLogprob,
    st.floats(-9999, 0, allow_nan=False),
    st.lists(st.tuples(st.integers(0, 2**31), st.floats(-9999, 0, allow_nan=False)), max_size=3).map(tuple),
)


@given(st.lists(logprobs, max_size=4).map(tuple), st.none() | st.lists(st.none() | logprobs, max_size=4).map(tuple))
def test_logprobs_come_back_bit_for_bit(scores, prompt_scores):
    choice = Choice(0, "x", tuple(range(len(scores))), "length", scores)
    outcome = Outcome((choice, Choice(1, "", (), "stop")), Usage(4, len(scores)), prompt_scores)
    assert Outcome.from_json(through_text(outcome.to_json())) == outcome


def test_terminal_states_are_those_without_a_way_out():
    assert {status for status in Status if status.terminal} == {Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED}
    assert all(target in Status for targets in TRANSITIONS.values() for target in targets)


@pytest.mark.parametrize(
    "other",
    [
        JobSpec((1, 2, 4), SPEC.sampling),
        JobSpec(SPEC.prompt_ids, SamplingParams(max_tokens=5, temperature=0.5, seed=SPEC.sampling.seed, stop=SPEC.sampling.stop)),
        JobSpec(SPEC.prompt_ids, SamplingParams(max_tokens=4, temperature=0.5, seed=1, stop=SPEC.sampling.stop)),
        JobSpec(SPEC.prompt_ids, SamplingParams(max_tokens=4, temperature=0.5, seed=SPEC.sampling.seed)),
    ],
)
def test_cache_key_changes_with_everything_that_changes_the_result(other):
    assert other.cache_key("r1") != SPEC.cache_key("r1")
    assert SPEC.cache_key("r2") != SPEC.cache_key("r1")


def test_cache_key_does_not_depend_on_the_shape_of_the_answer():
    assert JobSpec(SPEC.prompt_ids, SPEC.sampling, "prompt").cache_key("r") == SPEC.cache_key("r")


@given(st.sampled_from(Priority), st.text("abc./-", min_size=1))
def test_queue_names_can_be_parsed_back(priority, model):
    assert QueueName.parse(str(QueueName(priority, model))) == QueueName(priority, model)


@pytest.mark.parametrize("name", ["maintenance", "celery.pidbox", "interactive", "abc.model"])
def test_other_queues_are_not_job_queues(name):
    assert QueueName.parse(name) is None


class At:
    def __init__(self, time: float):
        self.now = time

    def time(self) -> float:
        return self.now

    monotonic = lease = time


def test_ids_sort_by_time_and_do_not_repeat():
    early, late = (ids.new_id("job", At(t)) for t in (1_000.0, 1_000.001))
    assert early < late
    assert early.startswith("job_") and len(early) == 4 + 26
    assert len({ids.new_id("job", At(1.0)) for _ in range(1000)}) == 1000


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_cursors_survive_text_and_sort_as_the_log(attempt, seq):
    cursor = events.Cursor(attempt, seq)
    assert events.Cursor.parse(str(cursor)) == cursor
    assert cursor < events.Cursor(attempt + 1, 0)
    assert cursor < events.Cursor(attempt, seq + 1)


@pytest.mark.parametrize("text", ["", "1", "1-", "-1", "1-2-3", "01-1", "1- 2", "x-1", "1-2\n", "١-١", "9" * 30 + "-1"])
def test_malformed_cursors_are_refused(text):
    with pytest.raises(BadCursor):
        events.Cursor.parse(text)


def test_events_of_an_attempt_sort_marker_tokens_terminal():
    first = events.tokens("j", 1, index=0, pos=0, text="a", token_ids=[7])
    second = events.tokens("j", 1, index=0, pos=1, text="", token_ids=[8, 9], finish_reason="stop")
    end = events.terminal("j", 1, Status.SUCCEEDED, outcome=None, error=None, timings=Timings(), cache="off")
    end_of_three = events.terminal_cursor(1, 3)
    assert events.started("j", 1, "m").cursor < first.cursor < second.cursor < end_of_three
    assert second.data["pos"] == 1 and second.data["finish_reason"] == "stop"
    assert "logprobs" not in second.data
    scored = events.tokens("j", 1, index=1, pos=3, text="b", token_ids=[7], logprobs=[TokenLogprob(-0.5, ((7, -0.5), (8, -1.5)))])
    assert scored.to_json()["logprobs"] == [[-0.5, [[7, -0.5], [8, -1.5]]]]
    assert end.cursor == events.terminal_cursor(1, 0)


def test_a_later_attempt_starts_with_a_reset():
    assert events.started("j", 1, "m").type is events.EventType.STARTED
    assert events.started("j", 2, "m").type is events.EventType.RESET


def test_terminal_events_say_how_it_ended():
    done = events.terminal("j", 2, Status.CANCELLED, outcome=OUTCOME, error=None, timings=Timings(total_ms=5), cache="miss").to_json()
    assert (done["type"], done["id"], done["status"]) == ("done", f"2-{256 * 2 + 255}", "cancelled")
    assert done["usage"]["total_tokens"] == 5
    failed = events.terminal("j", 1, Status.FAILED, outcome=None, error=JobError("c", "m"), timings=Timings(), cache="off").to_json()
    assert (failed["type"], failed["error"]) == ("error", {"code": "c", "message": "m"})


SHARED = """
import sys
from pathlib import Path
from promptmill.core import metrics
metrics.share(Path(sys.argv[1]), sys.argv[2])
mine = metrics.Metrics()
mine.generation_tokens.inc(int(sys.argv[3]))
sys.stdout.write(metrics.exposition(mine).decode())
"""


def test_processes_of_a_host_share_their_metrics_and_a_restart_goes_on_counting(tmp_path):
    def run(process: str, tokens: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", SHARED, str(tmp_path), process, str(tokens)], capture_output=True, text=True, check=True
        ).stdout

    run("worker-1", 5)
    run("worker-1", 5)
    assert "promptmill_generation_tokens_total 13.0" in run("api", 3)
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
