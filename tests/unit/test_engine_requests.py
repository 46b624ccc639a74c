"""What single requests may ask of the engine loop, over the fake runner: choices, beams, scores, grammars,
pauses, resumed runs. Each alone, and all together in one batch, must give the same."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.engine import BatchingEngine
from batching.runner import BLOCK_TOKENS
from promptmill.core.engine import EngineEvent, Failed, Finished, GenRequest, Paused, Resumed, Started, Tokens
from promptmill.core.jobs import Beam, Grammar, Outcome, Priority
from tests.support.engine import (
    EOS,
    ROW_FAILS,
    FakeRunner,
    finished,
    make_engine,
    make_request,
    of,
    run_to_end,
    streamed,
    streams,
    tiny_tokenizer,
)

LONG = tuple(range(20, 20 + 2 * BLOCK_TOKENS + 5))
SCHEMA = Grammar(
    "json_schema", '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
)


def prepared(runner: FakeRunner | None = None, *, eos: tuple[int, ...] = (EOS,), **options: object) -> BatchingEngine:
    engine = make_engine(runner or FakeRunner(rows=8, context_length=400), eos=eos, **options)
    engine.prepare()
    return engine


def run(request: GenRequest, **options: object) -> list[EngineEvent]:
    engine = prepared(**options)  # type: ignore[arg-type]
    engine.submit(request)
    events = run_to_end(engine)
    assert engine.stats().kv_bytes_used == 0
    return events


def outcome(request: GenRequest, **options: object) -> Outcome:
    return finished(run(request, **options), request.id).outcome


def same(one: Outcome, other: Outcome) -> bool:
    """But for what was found in the cache."""
    return replace(one, usage=replace(one.usage, cached_tokens=0)) == replace(other, usage=replace(other.usage, cached_tokens=0))


def zoo() -> list[GenRequest]:
    """One of each kind."""
    return [
        make_request("plain", LONG[:70], max_tokens=20),
        make_request("n4", LONG[:80], max_tokens=12, n=4, temperature=1.0, seed=5),
        make_request("beam4", LONG[:66], max_tokens=10, beam=Beam(4), n=2),
        make_request("json", (40, 41), max_tokens=40, grammar=SCHEMA),
        make_request("echo", LONG[:75], max_tokens=5, prompt_logprobs=2, logprobs=3),
        make_request("score", LONG, max_tokens=0, prompt_logprobs=1),
        make_request("penalised", (50, 51, 52), max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
        make_request("sampled", LONG[:70], max_tokens=25, temperature=0.8, seed=-(2**63), logprobs=0),
    ]


# -- choices


def test_the_choices_of_a_request_share_one_prefill_and_each_draws_for_itself() -> None:
    request = make_request("a", LONG[:80], max_tokens=12, n=4, temperature=1.0, seed=5)
    runner = FakeRunner(rows=8, context_length=400)
    events = run(request, runner=runner, eos=())
    assert sum(len(work.token_ids) for step in runner.steps for work in step) == 80 + 4 * 11
    assert runner.copies == 3
    told, choices = streams(events, "a"), finished(events, "a").outcome.choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert {choice.index: (choice.text, choice.token_ids) for choice in choices} == told
    assert len({choice.token_ids for choice in choices}) == 4
    assert finished(events, "a").outcome.usage.completion_tokens == 48


def test_the_first_of_several_choices_is_the_only_one_of_a_lone_request() -> None:
    one = outcome(make_request("a", LONG[:80], max_tokens=12, temperature=1.0, seed=5))
    four = outcome(make_request("a", LONG[:80], max_tokens=12, temperature=1.0, seed=5, n=4))
    assert four.choices[0] == one.choices[0]


def test_greedy_choices_are_equal() -> None:
    choices = outcome(make_request("a", LONG[:80], max_tokens=12, n=3)).choices
    assert len({choice.token_ids for choice in choices}) == 1


def test_a_choice_that_ends_early_frees_its_row_for_others() -> None:
    runner = FakeRunner(rows=4, reserved=0, context_length=400)
    engine = prepared(runner)
    ragged = (make_request("wide", (30 + n,), max_tokens=60, n=4, temperature=1.0, seed=n) for n in range(200))
    request = next(one for one in ragged if len({len(choice.token_ids) for choice in outcome(one).choices}) > 2)
    engine.submit(request)
    engine.step()
    engine.submit(make_request("next", max_tokens=2))
    events = run_to_end(engine)
    order = [event.id for event in events if isinstance(event, Tokens) and event.finish_reason]
    assert order.index("next") < len(order) - 1  # before the longest choice ended


def test_choices_that_are_cancelled_before_their_prompt_is_done_are_as_many_as_asked_for() -> None:
    engine = prepared()
    engine.submit(make_request("a", LONG, max_tokens=8, n=4, temperature=1.0))
    engine.step()
    engine.cancel("a")
    choices = finished(engine.step(), "a").outcome.choices
    assert [(choice.index, choice.token_ids, choice.finish_reason) for choice in choices] == [(n, (), "cancelled") for n in range(4)]


# -- scores


def test_pure_scoring_draws_nothing_and_scores_every_token_but_the_first() -> None:
    events = run(make_request("a", LONG, max_tokens=0, prompt_logprobs=2))
    end = finished(events, "a")
    assert [type(event) for event in events] == [Started, type(end)]
    scores = end.outcome.prompt_logprobs
    assert scores is not None
    assert (len(scores), scores[0]) == (len(LONG), None)
    assert all(score is not None and len(score.top) == 2 for score in scores[1:])
    assert (end.outcome.usage.completion_tokens, end.outcome.choices[0].finish_reason, end.outcome.choices[0].text) == (0, "length", "")


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_scores_do_not_depend_on_chunks_or_on_what_the_prefix_cache_holds(chunk: int) -> None:
    request = make_request("a", LONG, max_tokens=3, prompt_logprobs=2, logprobs=1)
    engine = prepared(prefill_tokens=chunk)
    engine.submit(make_request("before", LONG, max_tokens=1))
    run_to_end(engine)
    engine.submit(request)
    assert same(finished(run_to_end(engine), "a").outcome, outcome(request))


def test_logprobs_come_with_their_tokens() -> None:
    events = run(make_request("a", max_tokens=6, logprobs=3))
    streamed_logprobs = [item for event in events if isinstance(event, Tokens) for item in event.logprobs or ()]
    choice = finished(events, "a").outcome.choices[0]
    assert tuple(streamed_logprobs) == choice.logprobs
    assert all(
        item.logprob == item.top[0][1] and item.top[0][0] == token for item, token in zip(choice.logprobs, choice.token_ids, strict=True)
    )


# -- beams


def test_beams_show_their_texts_when_the_search_ends_best_first() -> None:
    events = run(make_request("a", LONG[:66], max_tokens=10, beam=Beam(4), n=3))
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [event.index for event in tokens] == [0, 1, 2]
    choices = finished(events, "a").outcome.choices
    assert streams(events, "a") == {choice.index: (choice.text, choice.token_ids) for choice in choices}
    assert len({choice.token_ids for choice in choices}) == 3


def test_a_beam_search_that_is_paused_in_its_middle_finds_the_same() -> None:
    request = make_request("a", LONG[:66], max_tokens=10, beam=Beam(4))
    for mode in ("keep", "recompute"):
        engine = prepared()
        engine.submit(request)
        for _ in range(9):
            engine.step()
        engine.pause("a", mode)  # type: ignore[arg-type]
        engine.step()
        engine.resume("a")
        assert same(finished(run_to_end(engine), "a").outcome, outcome(request)), mode


def test_beams_under_a_grammar_all_fit_it() -> None:
    choices = outcome(make_request("a", (40, 41), max_tokens=40, beam=Beam(3), n=2, grammar=SCHEMA)).choices
    assert all(isinstance(json.loads(choice.text)["a"], bool) for choice in choices if choice.finish_reason == "stop")
    assert any(choice.finish_reason == "stop" for choice in choices)


def test_a_search_that_a_grammar_makes_narrow_keeps_its_rows_for_when_it_is_wide_again() -> None:
    engine = prepared(FakeRunner(rows=8, reserved=2, context_length=400))  # which refuses more than 10 rows
    engine.submit(make_request("beam", (10, 11), max_tokens=20, beam=Beam(8), grammar=Grammar("regex", "a[a-z ]{1,30}")))
    for n in range(12):
        engine.submit(make_request(f"beside-{n}", (12 + n, 13), max_tokens=30, ignore_eos=True))
    assert len([event for event in run_to_end(engine) if isinstance(event, Finished)]) == 13


# -- ends


def test_end_tokens_do_not_come_before_min_tokens_nor_at_all_when_they_are_to_be_ignored() -> None:
    requests = (make_request("a", (20 + n,), max_tokens=40) for n in range(200))
    request = next(one for one in requests if len(outcome(one).choices[0].token_ids) in range(3, 20))
    natural = outcome(request).choices[0].token_ids
    later = outcome(replace(request, sampling=replace(request.sampling, min_tokens=len(natural) + 2))).choices[0].token_ids
    assert later[: len(natural) - 1] == natural[:-1]
    assert len(later) >= len(natural) + 2
    never = outcome(replace(request, sampling=replace(request.sampling, ignore_eos=True))).choices[0]
    assert (len(never.token_ids), never.finish_reason) == (40, "length")
    assert EOS not in never.token_ids


def test_a_stop_token_ends_the_text_before_it() -> None:
    free = outcome(make_request("a", (30, 31), max_tokens=20), eos=()).choices[0]
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    stopped = outcome(make_request("a", (30, 31), max_tokens=20, stop_token_ids=(stop,)), eos=()).choices[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert free.text.startswith(stopped.text)


# -- grammars


def test_a_grammar_shapes_the_text_and_ends_it() -> None:
    choice = outcome(make_request("a", (40, 41), max_tokens=40, grammar=SCHEMA)).choices[0]
    assert isinstance(json.loads(choice.text)["a"], bool)
    assert choice.finish_reason == "stop"


def test_a_grammar_wins_over_ignore_eos_and_min_tokens_where_only_the_end_is_left() -> None:
    choice = outcome(make_request("a", max_tokens=40, grammar=Grammar("choice", '["red"]'), ignore_eos=True, min_tokens=30)).choices[0]
    assert (choice.text, choice.finish_reason) == ("red", "stop")


# -- pauses


@pytest.mark.parametrize("mode", ["auto", "keep", "recompute"])
@pytest.mark.parametrize("index", range(8))
def test_every_kind_of_request_goes_on_after_a_pause_as_if_there_had_been_none(index: int, mode: str) -> None:
    request = zoo()[index]
    unbroken = outcome(request)
    for steps in (0, 1, 4, 9):
        engine = prepared()
        engine.submit(request)
        events = [event for _ in range(steps) for event in engine.step()]
        if any(isinstance(event, Finished) for event in events):
            break
        engine.pause(request.id, mode)  # type: ignore[arg-type]
        events += engine.step()
        assert events[-1] == Paused(request.id, mode != "recompute", asked=True)
        assert engine.step() == []
        assert (engine.stats().paused, sum(engine.stats().running.values())) == (1, 0)
        if mode == "recompute":
            assert engine.stats().kv_bytes_used == 0
        engine.resume(request.id)
        events += run_to_end(engine)
        assert (Resumed(request.id) in events) == (steps > 0)
        assert same(finished(events, request.id).outcome, unbroken)
        assert engine.stats().kv_bytes_used == 0


def test_a_paused_request_can_be_cancelled_and_unknown_or_repeated_orders_are_ignored() -> None:
    engine = prepared(eos=())
    engine.submit(make_request("a", max_tokens=20))
    engine.step()
    for order in (engine.pause, engine.pause, engine.resume, engine.resume, engine.pause):
        order("nobody")
        order("a")
    events = engine.step()
    assert [type(event) for event in of(events, "a")].count(Paused) == 2
    engine.cancel("a")
    assert finished(engine.step(), "a").reason == "cancelled"
    assert engine.stats().kv_bytes_used == 0


def test_what_was_paused_keeping_its_cache_loses_it_when_others_need_it_and_still_says_the_same() -> None:
    runner = FakeRunner(rows=4, reserved=0, blocks=6, context_length=400)
    engine = prepared(runner, eos=(), prefix_cache=False)
    paused = make_request("paused", LONG, max_tokens=20)
    engine.submit(paused)
    for _ in range(12):
        engine.step()
    engine.pause("paused", "keep")
    engine.step()
    assert engine.stats().kv_bytes_used == 3 * runner.block_bytes
    engine.submit(make_request("needs", LONG, max_tokens=200))
    while "needs" not in [event.id for event in engine.step() if isinstance(event, Finished)]:
        pass
    assert engine.stats().kv_bytes_used == 0
    engine.resume("paused")
    assert same(finished(run_to_end(engine), "paused").outcome, outcome(paused, eos=()))


# -- resumed runs


@pytest.mark.parametrize("index", [0, 1, 3, 4, 6, 7])
@pytest.mark.parametrize("after", [1, 2, 5, 11])
def test_a_run_that_goes_on_behind_published_tokens_ends_as_the_unbroken_one(index: int, after: int) -> None:
    request = zoo()[index]
    events = run(request)
    unbroken = finished(events, request.id).outcome
    seen: list[EngineEvent] = []
    for event in events:
        seen.append(event)
        if sum(isinstance(event, Tokens) for event in seen) == after:
            break
    told = streams(seen, request.id)
    generated = tuple(told.get(choice, ("", ()))[1] for choice in range(request.sampling.n))
    more = run(replace(request, generated=generated))
    assert same(finished(more, request.id).outcome, unbroken)
    for choice in unbroken.choices:
        later = streams(more, request.id, sum(map(len, generated)))
        assert told.get(choice.index, ("", ()))[0] + later.get(choice.index, ("", ()))[0] == choice.text


def test_a_finished_run_that_is_resumed_ends_for_the_reason_it_ended_for() -> None:
    """The text's tail, a character cut short, completes the stop."""
    cut_short = next(token for token in range(8, 364) if tiny_tokenizer().decode([token]) == "\ufffd")
    request = make_request("a", (10,), max_tokens=1, stop=("\ufffd",), logit_bias=((cut_short, 100.0),))
    lone = outcome(request, eos=())
    assert lone.choices[0].finish_reason == "stop"
    assert same(outcome(replace(request, generated=(lone.choices[0].token_ids,)), eos=()), lone)


# -- memory that steps do not fit


@pytest.mark.parametrize("priority", [Priority.INTERACTIVE, Priority.STANDARD])
def test_rows_that_memory_does_not_bear_wait_and_are_not_moved_in_and_out_at_each_step(priority: Priority) -> None:
    engine = prepared(FakeRunner(rows=8, reserved=4, context_length=400, max_step_tokens=4), eos=())
    for n in range(6):
        engine.submit(make_request(f"r{n}", (10 + n, 11), priority, max_tokens=80))
    events = run_to_end(engine)
    assert sum(isinstance(event, Paused) for event in events) <= 6
    for n in range(6):
        mine = of(events, f"r{n}")
        assert same(finished(events, f"r{n}").outcome, outcome(make_request(f"r{n}", (10 + n, 11), max_tokens=80), eos=()))
        running = True
        for event in mine:
            running = isinstance(event, Resumed | Started) or (running and not isinstance(event, Paused))
            assert running or isinstance(event, Paused), "a paused request spoke"


# -- the prefix cache


def test_a_prompt_that_was_there_before_is_not_computed_again() -> None:
    runner = FakeRunner(rows=4, context_length=400)
    engine = prepared(runner, eos=())
    for name in ("first", "second"):
        engine.submit(make_request(name, LONG, max_tokens=2))
        end = finished(run_to_end(engine), name)
        assert end.outcome.usage.cached_tokens == (0 if name == "first" else 2 * BLOCK_TOKENS)
    assert sum(len(work.token_ids) for step in runner.steps for work in step) == len(LONG) + 5 + 2 * 1


def test_requests_that_come_together_compute_their_common_beginning_once() -> None:
    runner = FakeRunner(rows=6, reserved=0, context_length=400)
    engine = prepared(runner, eos=(), prefill_tokens=BLOCK_TOKENS)
    requests = [make_request(f"r{n}", (*LONG[: 2 * BLOCK_TOKENS], 200 + n), max_tokens=3) for n in range(6)]
    for request in requests:
        engine.submit(request)
    events = run_to_end(engine)
    computed = sum(len(work.token_ids) for step in runner.steps for work in step)
    assert computed == 2 * BLOCK_TOKENS + 6 + 6 * 2
    assert all(same(finished(events, request.id).outcome, outcome(request, eos=())) for request in requests)


def test_tenants_share_nothing() -> None:
    runner = FakeRunner(rows=4, context_length=400)
    engine = prepared(runner, eos=())
    for tenant in ("a", "b", "a"):
        engine.submit(make_request(tenant, LONG, max_tokens=1, tenant=tenant))
        end = finished(run_to_end(engine), tenant)
    assert end.outcome.usage.cached_tokens == 2 * BLOCK_TOKENS
    assert sum(len(work.token_ids) for step in runner.steps for work in step) == 2 * len(LONG) + 5


def test_a_follower_of_a_request_that_is_cancelled_computes_for_itself() -> None:
    engine = prepared(FakeRunner(rows=4, context_length=400), eos=(), prefill_tokens=16)
    for name in ("leader", "follower"):
        engine.submit(make_request(name, LONG, max_tokens=3))
    engine.step()
    engine.cancel("leader")
    assert same(finished(run_to_end(engine), "follower").outcome, outcome(make_request("follower", LONG, max_tokens=3), eos=()))


def test_blocks_of_a_row_that_failed_with_values_that_are_no_numbers_are_never_read_by_others() -> None:
    runner = FakeRunner(rows=4, reserved=0, blocks=4, context_length=400)
    engine = prepared(runner, eos=())
    good = make_request("good", (*LONG[:BLOCK_TOKENS], 90), max_tokens=60)
    for n in range(3):
        engine.submit(make_request(f"bad{n}", (*LONG[:BLOCK_TOKENS], ROW_FAILS, *LONG[:70]), max_tokens=4))
    events = run_to_end(engine)
    assert all(isinstance(of(events, f"bad{n}")[-1], Failed) for n in range(3))
    engine.submit(good)
    assert same(finished(run_to_end(engine), "good").outcome, outcome(good, eos=()))


# -- all kinds in one batch


def test_requests_of_all_kinds_in_one_batch_each_equal_their_lone_run() -> None:
    requests = zoo()
    engine = prepared(FakeRunner(rows=24, context_length=400, blocks=200), prefill_tokens=64)
    for request in requests:
        engine.submit(request)
    events = run_to_end(engine)
    for request in requests:
        assert same(finished(events, request.id).outcome, outcome(request)), request.id
        told = {
            choice.index: (choice.text, choice.token_ids) for choice in finished(events, request.id).outcome.choices if choice.token_ids
        }
        assert streams(events, request.id) == told


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5), st.sampled_from(Priority)), min_size=2, max_size=10),
    st.integers(5, 30),
    st.sampled_from([5, 16, 64]),
    st.sampled_from([None, None, 17, 40]),
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["pause", "resume", "cancel"]), st.sampled_from(["auto", "keep", "recompute"])),
        max_size=12,
    ),
)
def test_in_a_cache_too_small_for_all_everybody_still_gets_its_own_answer(picks, blocks, chunk, bearable, orders) -> None:  # type: ignore[no-untyped-def]
    lone = {request.id: outcome(request) for request in zoo()}
    runner = FakeRunner(rows=8, reserved=4, blocks=blocks, context_length=400, max_step_tokens=bearable)
    engine = prepared(runner, prefill_tokens=chunk)
    events: list[EngineEvent] = []
    cancelled = set()
    kinds = {}
    for n, (index, steps, priority) in enumerate(picks):
        request = replace(zoo()[index], id=f"{n}", priority=priority)
        kinds[request.id] = zoo()[index].id
        engine.submit(request)
        for _ in range(steps):
            events += engine.step()
        for who, what, mode in orders[n : n + 2]:
            name = f"{who % (n + 1)}"
            if what == "pause":
                engine.pause(name, mode)
            elif what == "resume":
                engine.resume(name)
            else:
                engine.cancel(name)
                cancelled.add(name)
    events += run_to_end(engine)
    for name in kinds:
        engine.resume(name)
    events += run_to_end(engine)
    for name, kind in kinds.items():
        end = finished(events, name)
        if end.reason == "cancelled":
            assert name in cancelled
        else:
            assert same(end.outcome, lone[kind]), kind
        assert end.outcome.tokens == sum(len(ids) for _, ids in streams(events, name).values())
    assert engine.stats().kv_bytes_used == 0


def test_a_resumed_request_streams_on_from_where_it_was() -> None:
    request = make_request("a", LONG[:70], max_tokens=40)
    whole = run(request, eos=())
    text, ids = streamed(whole, "a")
    more = run(replace(request, generated=(ids[:20],)), eos=())
    assert streams(more, "a", 20)[0][1] == ids[20:]
    assert finished(more, "a").outcome.choices[0].text == text
