import threading
from dataclasses import replace

from promptmill.core.engine import Tokens
from promptmill.core.jobs import Claim, JobSpec, Priority, QueueName, SamplingParams, TokenLogprob
from tests.support.clock import FakeClock
from workers.gate import Capacity
from workers.registry import MARK_SECONDS, MAX_MARKS, Abort, Registry, Run


def make_claim(job_id: str = "job_a", attempt: int = 1) -> Claim:
    spec = JobSpec((1, 2, 3), SamplingParams(max_tokens=4))
    return Claim(job_id, attempt, "default", QueueName(Priority.BULK, "tiny"), "rev", spec, "miss", 0.0, 0.0)


def make_registry(clock: FakeClock | None = None) -> Registry:
    return Registry(Capacity(2, 1), clock or FakeClock())


def test_a_run_is_found_by_its_attempt_only() -> None:
    registry, run = make_registry(), Run(make_claim(attempt=2))
    registry.enter(run)
    assert registry.of_request("job_a/2") is run
    assert registry.of_request("job_a/1") is None
    assert registry.held() == [run.claim.held]
    registry.leave(run)
    assert registry.of_request("job_a/2") is None


def test_a_new_attempt_displaces_the_old_one_and_outlives_its_leaving() -> None:
    registry, old, new = make_registry(), Run(make_claim(attempt=1)), Run(make_claim(attempt=2))
    assert registry.enter(old) is None
    assert registry.enter(new) is old
    registry.leave(old)
    assert registry.of_job("job_a") is new


def test_the_first_end_counts() -> None:
    run = Run(make_claim())
    assert run.resolve(Abort.LOST)
    assert not run.resolve(Abort.RELEASE)
    assert run.end.result(0) is Abort.LOST


def test_cancel_of_a_submitted_run_goes_to_the_engine() -> None:
    registry, run = make_registry(), Run(make_claim())
    registry.enter(run)
    assert registry.submitted(run) is False
    assert registry.cancel("job_a") is run


def test_cancel_before_submit_is_told_to_the_submitter() -> None:
    registry, run = make_registry(), Run(make_claim())
    registry.enter(run)
    assert registry.cancel("job_a") is None
    assert registry.submitted(run) is True


def test_a_mark_stops_a_job_that_comes_within_a_minute() -> None:
    clock = FakeClock()
    registry = make_registry(clock)
    for job_id in ("job_a", "job_b"):
        assert registry.cancel(job_id) is None
    clock.advance(MARK_SECONDS - 1)
    soon = Run(make_claim("job_a"))
    registry.enter(soon)
    assert soon.cancelled
    clock.advance(2)
    late = Run(make_claim("job_b"))
    registry.enter(late)
    assert not late.cancelled


def test_marks_do_not_grow_without_bound() -> None:
    registry = make_registry()
    for number in range(MAX_MARKS + 1):
        registry.cancel(f"job_{number}")
    last = Run(make_claim(f"job_{MAX_MARKS}"))
    registry.enter(last)
    assert not last.cancelled


def test_idle_means_that_no_fetched_job_is_left() -> None:
    registry = make_registry()
    registry.arrive(Priority.BULK)
    registry.arrive(Priority.INTERACTIVE)
    assert not registry.wait_idle(0)
    registry.depart(Priority.BULK)
    idle = threading.Event()

    def wait() -> None:
        if registry.wait_idle(10):
            idle.set()

    thread = threading.Thread(target=wait)
    thread.start()
    registry.depart(Priority.INTERACTIVE)
    thread.join()
    assert idle.is_set()


def test_a_consumer_that_stopped_asking_is_noticed_unless_it_is_full() -> None:
    clock = FakeClock()
    registry = make_registry(clock)
    assert registry.fetching(5)
    clock.advance(6)
    assert not registry.fetching(5)
    for _ in range(3):
        registry.arrive(Priority.INTERACTIVE)
    assert registry.fetching(5)


def test_the_partial_outcome_counts_what_was_published() -> None:
    run = Run(make_claim())
    assert run.partial() is None
    run.drawn = {0: [Tokens(run.id, 0, 0, (7, 8), "he"), Tokens(run.id, 0, 2, (9,), "y")]}
    outcome = run.partial()
    assert outcome is not None
    assert (outcome.choices[0].text, outcome.choices[0].token_ids, outcome.tokens) == ("hey", (7, 8, 9), 3)
    assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (3, 3)


def test_the_partial_outcome_has_every_choice_with_its_logprobs_and_its_own_end() -> None:
    claim = make_claim()
    run = Run(replace(claim, spec=JobSpec((1, 2, 3), SamplingParams(max_tokens=4, n=3, logprobs=0))))
    one, two, three = (TokenLogprob(-0.5 * place) for place in (1, 2, 3))
    run.drawn = {
        2: [Tokens(run.id, 2, 0, (7,), "h", logprobs=(one,)), Tokens(run.id, 2, 2, (9,), "i", "stop", (three,))],
        0: [Tokens(run.id, 0, 1, (8,), "x", logprobs=(two,))],
    }
    outcome = run.partial()
    assert outcome is not None
    assert [(c.index, c.text, c.token_ids, c.finish_reason, c.logprobs) for c in outcome.choices] == [
        (0, "x", (8,), "cancelled", (two,)),
        (1, "", (), "cancelled", ()),
        (2, "hi", (7, 9), "stop", (one, three)),
    ]
    assert (outcome.tokens, outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (3, 3, 3)
