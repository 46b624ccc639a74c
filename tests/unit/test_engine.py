from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Condition, Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.engine import BatchingEngine
from batching.options import EngineOptions
from batching.runner import BLOCK_TOKENS, RowResult, RowWork, Runner
from promptmill.core.engine import EngineEvent, Failed, Finished, GenRequest, Started, Tokens
from promptmill.core.errors import Rejected, Unavailable
from promptmill.core.jobs import Priority
from tests.support.clock import FakeClock
from tests.support.engine import (
    DEADLINE_S,
    EOS,
    ROW_FAILS,
    WHOLE_STEP_FAILS,
    FakeRunner,
    StepLaw,
    ends,
    finished,
    make_engine,
    make_request,
    of,
    run_to_end,
    serving,
    streamed,
    streams,
    tiny_model,
    tiny_tokenizer,
)

INTERACTIVE, STANDARD, BULK = Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def runner(clock: FakeClock) -> FakeRunner:
    return FakeRunner(rows=4, reserved=2, clock=clock)


@pytest.fixture
def engine(runner: FakeRunner, clock: FakeClock) -> BatchingEngine:
    """Prepared, and without end tokens; turned by hand."""
    engine = make_engine(runner, clock, eos=())
    engine.prepare()
    return engine


def alone(request: GenRequest, eos: tuple[int, ...] = (EOS,)) -> Finished:
    """What the request gives on an engine of its own."""
    engine = make_engine(FakeRunner(), eos=eos)
    engine.prepare()
    engine.submit(request)
    return finished(run_to_end(engine), request.id)


# -- one request


def test_a_request_yields_started_then_its_tokens_then_one_end(engine: BatchingEngine) -> None:
    engine.submit(make_request("a", max_tokens=5))
    events = run_to_end(engine)
    assert [type(event) for event in events] == [Started, *[Tokens] * 5, Finished]
    end = finished(events, "a")
    text, ids = streamed(events, "a")
    assert (end.outcome.choices[0].text, end.outcome.choices[0].token_ids) == (text, ids)
    assert (end.outcome.usage.prompt_tokens, end.outcome.usage.completion_tokens) == (3, 5)
    assert end.reason == end.outcome.choices[0].finish_reason == events[-2].finish_reason == "length"  # type: ignore[union-attr]
    assert text == tiny_tokenizer().decode(ids)


def test_the_end_token_counts_but_has_no_text() -> None:
    request = next(r for n in range(200) if alone(r := make_request("a", (20 + n,), max_tokens=40)).reason == "stop")
    choice = alone(request).outcome.choices[0]
    assert choice.token_ids[-1] == EOS
    assert EOS not in choice.token_ids[:-1]
    assert choice.text == tiny_tokenizer().decode(choice.token_ids[:-1])
    assert choice.text == alone(request, eos=(EOS,)).outcome.choices[0].text
    assert len(choice.token_ids) == alone(request).outcome.usage.completion_tokens


def test_a_stop_string_ends_the_text_before_it_and_its_last_token_counts(engine: BatchingEngine) -> None:
    free = alone(make_request("a", (30, 31), max_tokens=40), eos=()).outcome.choices[0]
    stop = next(free.text[at : at + 2] for at in range(12, len(free.text)) if free.text[at : at + 3].isascii())
    engine.submit(make_request("a", (30, 31), max_tokens=40, stop=(stop,)))
    events = run_to_end(engine)
    end = finished(events, "a")
    assert end.reason == "stop"
    assert end.outcome.choices[0].text == free.text[: free.text.index(stop)] == streamed(events, "a")[0]
    ids = end.outcome.choices[0].token_ids
    assert ids == free.token_ids[: len(ids)]
    assert stop in tiny_tokenizer().decode(ids)
    assert stop not in tiny_tokenizer().decode(ids[:-1])


def test_a_sampled_request_follows_its_seed_alone() -> None:
    def ids(name: str, seed: int | None) -> tuple[int, ...]:
        return alone(make_request(name, temperature=1.0, seed=seed), eos=()).outcome.choices[0].token_ids

    assert ids("a", 7) == ids("b", 7) != ids("a", 8)
    assert ids("a", None) == ids("a", None) != ids("b", None)  # without one, the id is the seed


def test_times_are_measured_from_enqueue_to_row_to_first_token_to_end(clock: FakeClock) -> None:
    engine = make_engine(FakeRunner(clock=clock, law=StepLaw(base_s=0.5)), clock, eos=(), prefill_tokens=4)
    engine.prepare()
    engine.submit(make_request("a", (10,) * 8, max_tokens=3, enqueued_at=clock.monotonic() - 2))
    events = run_to_end(engine)
    started = events[0]
    assert isinstance(started, Started)
    assert (started.waited_s, started.window_s) == (2.0, 0.0)
    end = finished(events, "a")
    assert (end.prefill_s, end.decode_s) == (1.0, 1.0)  # two chunks, the second draws; two more tokens


def test_a_target_latency_is_kept_from_the_first_step_on(clock: FakeClock) -> None:
    """What a trial learned: neither does the first decode take longer, nor do rows come one by one."""
    law = StepLaw(base_s=0.005, token_s=0.001)
    runner = FakeRunner(rows=32, reserved=0, blocks=64, clock=clock, law=law)
    engine = make_engine(runner, clock, eos=(), prefill_tokens=64, target_itl_s=0.02)
    engine.prepare()
    rehearsed = len(runner.steps)
    for number in range(32):
        engine.submit(make_request(f"r{number}", max_tokens=6, enqueued_at=clock.monotonic()))
    engine.step()
    assert 8 <= engine.stats().running[Priority.STANDARD] <= 15
    run_to_end(engine)
    decoding = [work for work in runner.steps[rehearsed:] if any(row.past >= 3 for row in work)]
    assert max(law.seconds(works, 0) for works in decoding) <= 1.2 * 0.02


def test_a_trial_that_does_not_fit_the_memory_is_no_failure(clock: FakeClock) -> None:
    engine = make_engine(FakeRunner(rows=4, max_step_tokens=3, clock=clock), clock, target_itl_s=1.0)
    engine.prepare()
    engine.submit(make_request("a", max_tokens=4))
    assert finished(run_to_end(engine), "a").outcome.choices[0].finish_reason == "length"


# -- refusals


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request("a", ()), "prompt"),
        (make_request("a", (-1,)), "prompt"),
        (make_request("a", (10**6,)), "prompt"),
        (make_request("a", max_tokens=0), "max_tokens"),
        (make_request("a", (10,) * 100, max_tokens=29), "max_tokens"),
        (make_request("a", temperature=float("nan")), "temperature"),
        (make_request("a", temperature=-0.1), "temperature"),
        (make_request("a", top_p=0.0), "top_p"),
        (make_request("a", top_p=float("nan")), "top_p"),
        (make_request("a", top_k=-1), "top_k"),
        (make_request("a", stop=("x", "")), "stop"),
        (make_request("a", model="other"), "model"),
    ],
)
def test_what_can_never_run_is_rejected_at_the_door(engine: BatchingEngine, request_: GenRequest, param: str) -> None:
    with pytest.raises(Rejected) as caught:
        engine.submit(request_)
    assert caught.value.param == param
    assert engine.stats().waiting == 0


def test_a_request_that_fills_the_context_exactly_runs(engine: BatchingEngine) -> None:
    engine.submit(make_request("a", (10,) * 100, max_tokens=28))
    assert finished(run_to_end(engine), "a").outcome.usage.completion_tokens == 28


def test_a_request_larger_than_the_whole_kv_cache_is_rejected() -> None:
    engine = make_engine(FakeRunner(blocks=1))
    engine.prepare()
    engine.submit(make_request("fits", (10,) * 10, max_tokens=BLOCK_TOKENS - 10))
    with pytest.raises(Rejected, match="KV cache"):
        engine.submit(make_request("never", (10,) * 10, max_tokens=BLOCK_TOKENS - 9))
    assert finished(run_to_end(engine), "fits").outcome.usage.completion_tokens > 0


def test_an_id_that_is_still_here_is_rejected_and_may_come_again_afterwards(engine: BatchingEngine) -> None:
    engine.submit(make_request("a"))
    with pytest.raises(Rejected, match="already"):
        engine.submit(make_request("a"))
    run_to_end(engine)
    engine.submit(make_request("a"))
    assert finished(run_to_end(engine), "a").reason == "length"


# -- many requests

requests_st = st.lists(
    st.tuples(
        st.lists(st.integers(7, 300), min_size=1, max_size=40),
        st.integers(1, 30),
        st.sampled_from(Priority),
        st.sampled_from([{}, {"temperature": 1.0, "seed": 3}, {"stop": ("e", "th")}]),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(requests_st)
def test_batched_output_equals_one_at_a_time_output(specs: list) -> None:  # type: ignore[type-arg]
    runner = FakeRunner(rows=4, reserved=2, blocks=5)
    engine = make_engine(runner)
    engine.prepare()
    requests = [make_request(f"r{n}", p, priority, max_tokens=m, **s) for n, (p, m, priority, s, _) in enumerate(specs)]
    events: list[EngineEvent] = []
    for request, spec in zip(requests, specs, strict=True):
        engine.submit(request)
        for _ in range(spec[4]):
            events += engine.step()
    events += run_to_end(engine)
    assert set(ends(events)) == {request.id for request in requests}
    for request in requests:
        end = finished(events, request.id)
        assert (end.outcome, end.reason) == ((one := alone(request)).outcome, one.reason)
        assert streamed(events, request.id) == (end.outcome.choices[0].text, end.outcome.choices[0].token_ids)
    assert engine.stats().kv_bytes_used == 0


def test_an_interactive_request_starts_next_behind_a_bulk_flood(engine: BatchingEngine) -> None:
    for n in range(50):
        engine.submit(make_request(f"bulk-{n}", priority=BULK))
    events = [event for _ in range(3) for event in engine.step()]
    assert engine.stats().running == {BULK: 4}
    engine.submit(make_request("now", priority=INTERACTIVE))
    assert engine.step()[0] == Started("now", 0.0, 0.0)
    events += run_to_end(engine)
    done = [event.id for event in events if isinstance(event, Finished)]
    assert done.index("now") == 4  # behind the four that had rows before it, before the 46 that waited
    assert sum(name.startswith("bulk") for name in done) == 50


def test_bulk_keeps_going_under_a_steady_flow_of_interactive_requests(engine: BatchingEngine) -> None:
    for n in range(5):
        engine.submit(make_request(f"bulk-{n}", priority=BULK, max_tokens=4))
    done: list[str] = []
    for n in range(60):
        for k in range(3):
            engine.submit(make_request(f"i-{n}-{k}", priority=INTERACTIVE, max_tokens=6))
        done += [event.id for event in engine.step() if isinstance(event, Finished)]
    assert {f"bulk-{n}" for n in range(5)} <= set(done)


# -- the idle window


def test_an_idle_engine_waits_for_company_but_not_when_busy(clock: FakeClock, runner: FakeRunner) -> None:
    engine = make_engine(runner, clock, idle_window_s=0.02, eos=())
    engine.prepare()
    engine.submit(make_request("a", enqueued_at=clock.monotonic()))
    assert engine.step() == []
    assert engine.idle_s() == pytest.approx(0.02)
    clock.advance(0.015)
    engine.submit(make_request("b", enqueued_at=clock.monotonic()))
    assert engine.step() == []
    clock.advance(0.006)
    started = [event for event in engine.step() if isinstance(event, Started)]
    assert [(s.id, s.waited_s, s.window_s) for s in started] == [
        ("a", pytest.approx(0.021), pytest.approx(0.021)),
        ("b", pytest.approx(0.006), pytest.approx(0.006)),
    ]
    engine.submit(make_request("c", enqueued_at=clock.monotonic()))
    assert Started("c", 0.0, 0.0) in engine.step()


def test_a_job_that_has_waited_elsewhere_does_not_wait_again(clock: FakeClock, runner: FakeRunner) -> None:
    engine = make_engine(runner, clock, idle_window_s=0.02)
    engine.prepare()
    engine.submit(make_request("old", enqueued_at=clock.monotonic() - 60))
    assert Started("old", 60.0, 0.0) in engine.step()


def test_interactive_or_full_rows_close_the_window_at_once(clock: FakeClock) -> None:
    for requests in ([make_request("i", priority=INTERACTIVE)], [make_request(f"s{n}", enqueued_at=clock.monotonic()) for n in range(4)]):
        engine = make_engine(FakeRunner(rows=4), clock, idle_window_s=1000.0)
        engine.prepare()
        for request in requests:
            engine.submit(request)
        assert len([event for event in engine.step() if isinstance(event, Started)]) == len(requests)


# -- cancel


def test_a_cancel_ends_a_request_at_the_next_turn_in_every_state(engine: BatchingEngine, runner: FakeRunner) -> None:
    for n in range(6):
        engine.submit(make_request(f"r{n}", (10,) * 40, max_tokens=20))
    engine.step()  # r0 prefills, r1..r3 have rows, r4 and r5 wait
    engine.cancel("r5")  # waiting
    engine.cancel("r1")  # admitted, prompt untouched
    engine.cancel("r0")  # in the middle of its prompt
    engine.submit(make_request("late"))
    engine.cancel("late")  # not yet seen by the loop
    events = engine.step()
    ended = ends(events)
    assert set(ended) == {"r5", "r1", "r0", "late"}
    assert all(isinstance(end, Finished) and end.reason == "cancelled" and end.outcome.tokens == 0 for end in ended.values())
    events += run_to_end(engine)
    assert {name for name, end in ends(events).items() if end.reason == "length"} == {"r2", "r3", "r4"}  # type: ignore[union-attr]
    assert engine.stats().kv_bytes_used == 0


def test_a_cancelled_request_keeps_exactly_the_text_that_was_streamed(engine: BatchingEngine) -> None:
    engine.submit(make_request("a", (30, 31), max_tokens=60, stop=("never-there",)))
    events = [event for _ in range(10) for event in engine.step()]
    engine.cancel("a")
    events += engine.step()
    end = finished(events, "a")
    assert end.reason == "cancelled"
    assert streamed(events, "a") == (end.outcome.choices[0].text, end.outcome.choices[0].token_ids)
    assert len(end.outcome.choices[0].token_ids) == 10
    assert engine.step() == []


def test_a_cancel_of_an_unknown_or_finished_request_is_ignored(engine: BatchingEngine) -> None:
    engine.submit(make_request("a"))
    run_to_end(engine)
    engine.cancel("a")
    engine.cancel("nobody")
    assert engine.step() == []
    engine.submit(make_request("a"))
    assert finished(run_to_end(engine), "a").reason == "length"


# -- failures


def submit_neighbours(engine: BatchingEngine, bad: int) -> list[GenRequest]:
    good = [make_request(f"good-{n}", (40 + n, 50), max_tokens=6) for n in range(3)]
    for request in good[:2]:
        engine.submit(request)
    engine.step()
    engine.submit(make_request("bad", (30, bad, 31)))
    engine.submit(good[2])
    return good


def assert_unharmed(events: Sequence[EngineEvent], good: Sequence[GenRequest]) -> None:
    for request in good:
        assert finished(events, request.id).outcome == alone(request, eos=()).outcome


def test_a_row_that_fails_does_not_harm_its_neighbours(engine: BatchingEngine, runner: FakeRunner) -> None:
    good = submit_neighbours(engine, ROW_FAILS)
    events = run_to_end(engine)
    assert of(events, "bad")[-1] == Failed("bad", "non_finite_logits", "the model produced values that are not numbers for this request")
    assert_unharmed(events, good)
    assert engine.stats().kv_bytes_used == 0


def test_a_step_that_fails_as_a_whole_costs_only_the_culprit(engine: BatchingEngine, runner: FakeRunner) -> None:
    good = submit_neighbours(engine, WHOLE_STEP_FAILS)
    events = run_to_end(engine)
    failed = of(events, "bad")[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_error"
    assert_unharmed(events, good)
    assert engine.stats().kv_bytes_used == 0


def test_a_runner_that_fails_for_everybody_fails_them_and_serves_the_next(engine: BatchingEngine, runner: FakeRunner) -> None:
    for n in range(3):
        engine.submit(make_request(f"r{n}"))
    runner.fail_always = True
    assert Counter(type(event) for event in run_to_end(engine)) == {Started: 3, Failed: 3}
    runner.fail_always = False
    engine.submit(make_request("next"))
    assert finished(run_to_end(engine), "next").reason == "length"


# -- the thread


class Events:
    """A sink that a test can wait on."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._events: list[EngineEvent] = []

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        with self._changed:
            self._events += events
            self._changed.notify_all()

    def wait_for_ends(self, count: int) -> list[EngineEvent]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(ends(self._events)) >= count, DEADLINE_S), self._events
            return list(self._events)


class GatedRunner(FakeRunner):
    """Each step waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = Event()
        self.gate = Event()

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        self.stepping.set()
        assert self.gate.wait(DEADLINE_S)
        return super().step(rows)


class LosingRunner(FakeRunner):
    """Breaks the contract: one result too few. That is a bug of the loop's world, not of a request."""

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        return super().step(rows)[1:]


def test_requests_from_many_threads_all_end_on_the_engine_thread() -> None:
    engine, sink = make_engine(eos=()), Events()
    with serving(engine, sink):
        assert engine.alive
        for n in range(40):
            engine.submit(make_request(f"r{n}", (20 + n,)))
        events = sink.wait_for_ends(40)
    assert all(finished(events, f"r{n}").outcome == alone(make_request(f"r{n}", (20 + n,)), eos=()).outcome for n in range(40))
    assert engine.stats().steps < 40 * 8


def test_close_ends_what_runs_and_what_waits_as_cancelled() -> None:
    runner, sink = GatedRunner(), Events()
    engine = make_engine(runner, eos=())
    with serving(engine, sink):
        for n in range(9):
            engine.submit(make_request(f"r{n}", max_tokens=100))
        assert runner.stepping.wait(DEADLINE_S)
        engine.submit(make_request("inbox"))
        engine.close()
        engine.close()
        runner.gate.set()
    assert {name: end.reason for name, end in ends(sink.wait_for_ends(10)).items()} == dict.fromkeys(  # type: ignore[union-attr]
        [*(f"r{n}" for n in range(9)), "inbox"], "cancelled"
    )
    assert not engine.alive
    with pytest.raises(Unavailable):
        engine.submit(make_request("later"))


def test_a_bug_of_the_loop_is_loud_every_request_fails_and_the_engine_is_dead() -> None:
    sink = Events()
    engine = make_engine(LosingRunner())
    with serving(engine, sink):
        engine.submit(make_request("a"))
        events = sink.wait_for_ends(1)
    failed = ends(events)["a"]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_error"
    assert not engine.alive
    with pytest.raises(Unavailable):
        engine.submit(make_request("b"))


def test_a_sink_that_raises_ends_the_engine_without_a_hanging_close() -> None:
    def sink(events: Sequence[EngineEvent]) -> None:
        raise RuntimeError("the sink is broken")

    engine = make_engine()
    with serving(engine, sink):
        engine.submit(make_request("a"))
    assert not engine.alive


def test_run_raises_what_loading_raised() -> None:
    def load() -> Runner:
        raise MemoryError("too large")

    engine = BatchingEngine(load, {"tiny": tiny_model()}, EngineOptions("instant", ()))
    with pytest.raises(MemoryError, match="too large"):
        engine.run(lambda events: None, lambda: None)
    assert not engine.alive
    with pytest.raises(Unavailable):
        engine.submit(make_request("a"))


def test_drain_lets_running_requests_end_and_gives_the_rest_up_so_that_they_go_on_elsewhere() -> None:
    runner, sink = GatedRunner(), Events()
    engine = make_engine(runner, eos=())
    requests = [make_request(f"r{n}", (30 + n, 31), max_tokens=60 if n else 2) for n in range(6)]
    with serving(engine, sink):
        for request in requests:
            engine.submit(request)
        runner.gate.set()
        sink.wait_for_ends(1)
        runner.gate.clear()
        runner.stepping.clear()
        assert runner.stepping.wait(DEADLINE_S)
        with ThreadPoolExecutor(1) as threads:
            drained = threads.submit(engine.drain, 0.0)
            while True:  # drain has begun: nothing new is taken
                try:
                    engine.submit(make_request("late"))
                except Unavailable:
                    break
                engine.cancel("late")
            runner.gate.set()
            left = drained.result(DEADLINE_S)
    events = sink.wait_for_ends(1)
    assert set(ends(events)) - {"late"} == {"r0"}
    assert {item.id for item in left} - {"late"} == {f"r{n}" for n in range(1, 6)}
    for item in left:
        if item.id == "late":
            continue
        request = requests[int(item.id[1:])]
        told = streamed(events, item.id)
        assert item.generated == (told[1],)
        resumed = replace(request, generated=item.generated)
        next_engine = make_engine(eos=())
        next_engine.prepare()
        next_engine.submit(resumed)
        more = run_to_end(next_engine)
        assert finished(more, item.id).outcome == alone(request, eos=()).outcome
        later = streams(more, item.id, len(told[1])).get(0, ("", ()))
        assert told[0] + later[0] == alone(request, eos=()).outcome.choices[0].text


def test_drain_returns_as_soon_as_all_have_ended() -> None:
    sink = Events()
    engine = make_engine(eos=())
    with serving(engine, sink):
        engine.submit(make_request("a"))
        assert engine.drain(DEADLINE_S) == ()
        assert finished(sink.wait_for_ends(1), "a").reason == "length"


# -- numbers


def test_stats_and_metrics_tell_what_ran(clock: FakeClock) -> None:
    engine = make_engine(FakeRunner(clock=clock, law=StepLaw(base_s=0.25)), clock, eos=())
    engine.prepare()
    for n in range(6):
        engine.submit(make_request(f"r{n}", (10, 11, 12), max_tokens=4))
    assert engine.stats().waiting == 6
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.rows) == ({STANDARD: 4}, 2, 4)
    assert stats.kv_bytes_used == 4 * FakeRunner.block_bytes
    run_to_end(engine)
    value = engine._options.metrics.registry.get_sample_value
    assert value("promptmill_generation_tokens_total") == 24
    assert value("promptmill_prompt_tokens_total") == 18
    assert value("promptmill_engine_step_seconds_count") == engine.stats().steps
    assert value("promptmill_engine_decode_rows_sum") == 18  # the first token of a row is drawn by its prefill
    assert value("promptmill_inter_token_latency_seconds_sum") == pytest.approx(18 * 0.25)
    assert value("promptmill_engine_rows", {"state": "running"}) == 0
    assert value("promptmill_kv_cache_bytes", {"state": "total"}) == 64 * FakeRunner.block_bytes
