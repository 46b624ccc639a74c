from collections.abc import Iterator
from threading import Thread

import pytest

import workers.way
from promptmill.core.events import EventType, started
from promptmill.core.jobs import Held, Priority, Status
from tests.support.engine import ROW_FAILS
from tests.support.factories import make_spec, queue_of
from tests.support.way import WORKER, Walk
from workers.way import seeded

DONE, ERROR, STARTED, TOKEN = EventType.DONE, EventType.ERROR, EventType.STARTED, EventType.TOKEN
PROMPT = (10, 11, 12)


@pytest.fixture
def walk() -> Iterator[Walk]:
    with Walk() as walk:
        yield walk


def test_a_job_is_stored_cached_and_told_in_this_order(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT))
    status_when_told: list[Status] = []
    walk.stream.listen(lambda event: status_when_told.append(walk.job(job).status) if event.type is DONE else None)
    assert walk.run(job) == "succeeded"
    stored = walk.job(job)
    assert stored.status is Status.SUCCEEDED and stored.outcome is not None
    assert status_when_told == [Status.SUCCEEDED]
    assert walk.cache.get("default", job.spec.cache_key(job.model_revision)) == stored.outcome
    kinds = walk.kinds(job)
    assert (kinds[0], kinds[-1]) == (STARTED, DONE) and set(kinds[1:-1]) == {TOKEN}
    assert "".join(event.data["text"] for event in walk.events(job)[1:-1]) == stored.outcome.choices[0].text
    assert None not in (stored.timings.queue_ms, stored.timings.window_ms, stored.timings.decode_ms, stored.timings.total_ms)
    assert walk.registry.held() == []


def test_an_id_that_is_not_queued_is_dropped_without_a_trace(walk: Walk) -> None:
    job = walk.submit()
    walk.store.claim_many([job.id], "another", "node")
    assert walk.run(job) == "not ours"
    assert walk.job(job).worker == "another" and walk.events(job) == []


def test_a_doubled_message_runs_its_job_once(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT))
    words = sorted(word.result(20) for word in [walk.start(job), walk.start(job)])
    assert words == ["not ours", "succeeded"]
    assert walk.job(job).attempt == 1 and walk.kinds(job).count(DONE) == 1


def test_a_request_the_engine_rejects_fails_with_its_code(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT, max_tokens=100_000))
    assert walk.run(job) == "failed"
    error = walk.job(job).error
    assert error is not None and error.code in ("rejected_by_engine", "context_length_exceeded")
    assert walk.kinds(job) == [STARTED, ERROR]


def test_a_row_that_fails_takes_no_neighbour_with_it(walk: Walk) -> None:
    bad, good = walk.submit(spec=make_spec((10, ROW_FAILS))), walk.submit(spec=make_spec(PROMPT))
    assert [word.result(20) for word in (walk.start(bad), walk.start(good))] == ["failed", "succeeded"]
    assert walk.kinds(bad)[-1] is ERROR


def test_a_running_job_that_is_cancelled_keeps_what_it_had(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT, max_tokens=100))
    word = walk.start_and_pause(job)
    assert walk.way.cancel(job.id)
    walk.runner.go.set()
    assert word.result(20) == "cancelled"
    stored = walk.job(job)
    assert stored.outcome is not None and stored.outcome.choices[0].finish_reason == "cancelled"
    assert walk.kinds(job)[-1] is DONE
    assert walk.cache.get("default", job.spec.cache_key(job.model_revision)) is None


def test_a_cancel_that_overtakes_its_job_still_stops_it(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT, max_tokens=100))
    assert not walk.way.cancel(job.id)
    assert walk.run(job) == "cancelled"


def test_a_released_job_goes_back_to_its_queue_with_no_last_word(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT, max_tokens=100))
    word = walk.start_and_pause(job)
    walk.way.close()
    assert word.result(20) == "release"
    stored = walk.job(job)
    assert (stored.status, stored.attempt, stored.losses) == (Status.QUEUED, 1, 0)
    assert walk.queue.take(queue_of(job)) == job.id
    assert not any(kind.terminal for kind in walk.kinds(job))


def test_what_a_draining_engine_gives_up_goes_back_to_its_queue(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT, max_tokens=100))
    word = walk.start_and_pause(job)
    drain = Thread(target=lambda: walk.way.give_back(walk.thread.drain(0)))
    drain.start()
    walk.runner.go.set()
    assert word.result(20) == "release"
    drain.join(20)
    stored = walk.job(job)
    assert (stored.status, stored.losses) == (Status.QUEUED, 0)
    assert walk.queue.take(queue_of(job)) == job.id
    assert not any(kind.terminal for kind in walk.kinds(job))
    late = walk.submit(spec=make_spec(PROMPT))
    assert walk.run(late) == "release", "a drained engine takes nothing new"


def test_choices_and_their_logprobs_are_told_as_they_are_stored(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT, max_tokens=12, n=3, logprobs=2, temperature=1.0, seed=5))
    assert walk.run(job) == "succeeded"
    outcome = walk.job(job).outcome
    assert outcome is not None and [choice.index for choice in outcome.choices] == [0, 1, 2]
    told = [event.data for event in walk.events(job) if event.type is TOKEN]
    assert [data["pos"] for data in told] == [sum(len(d["token_ids"]) for d in told[:at]) for at in range(len(told))]
    for choice in outcome.choices:
        own = [data for data in told if data["index"] == choice.index]
        assert "".join(data["text"] for data in own) == choice.text
        assert choice.logprobs is not None
        assert [score for data in own for score in data["logprobs"]] == [score.to_json() for score in choice.logprobs]
        assert own[-1]["finish_reason"] == choice.finish_reason
    assert walk.cache.get("default", job.spec.cache_key(job.model_revision)) == outcome


def test_the_engine_knows_whose_request_it_is(walk: Walk) -> None:
    job = walk.submit(tenant="alice")
    (claim,) = walk.store.claim_many([job.id], WORKER, "node")
    assert claim is not None and walk.way.request(claim).tenant == "alice"


def test_a_job_that_comes_after_the_close_is_given_back_at_once(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT))
    walk.way.close()
    assert walk.run(job) == "release"
    assert walk.job(job).status is Status.QUEUED


def test_a_flagged_job_that_is_released_becomes_cancelled_and_says_so(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT, max_tokens=100))
    word = walk.start_and_pause(job)
    walk.store.cancel(job.id)
    walk.way.close()
    word.result(20)
    assert walk.job(job).status is Status.CANCELLED
    assert walk.kinds(job)[-1] is DONE


def test_a_lost_claim_writes_nothing_more(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT, max_tokens=100))
    word = walk.start_and_pause(job)
    walk.way.lose(job.id, attempt=7)  # another attempt: not this one
    assert not word.done()
    walk.way.lose(job.id, attempt=1)
    assert word.result(20) == "lost"
    assert walk.job(job).status is Status.RUNNING  # its row is for the sweep
    assert not any(kind.terminal for kind in walk.kinds(job))


def test_a_log_of_a_higher_attempt_stops_the_job_before_the_engine(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT))
    walk.stream.append([started(job.id, 9, "tiny")])
    assert walk.run(job) == "lost"
    assert not walk.runner.stepped.is_set()


def test_a_log_that_cannot_be_opened_gives_the_job_back(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.way, "MARKER_SECONDS", 0.05)
    walk.stream.away = True
    job = walk.submit(spec=make_spec(PROMPT))
    assert walk.run(job) == "release"
    assert walk.job(job).status is Status.QUEUED and not walk.runner.stepped.is_set()


def test_a_result_outlives_an_outage_of_sql(walk: Walk) -> None:
    walk.store.failures = 2
    job = walk.submit(spec=make_spec(PROMPT))
    assert walk.run(job) == "succeeded"
    assert walk.store.finishes == 3 and walk.kinds(job)[-1] is DONE


def test_a_commit_whose_answer_was_lost_counts(walk: Walk) -> None:
    walk.store.failures, walk.store.after = 1, True
    job = walk.submit(spec=make_spec(PROMPT))
    assert walk.run(job) == "succeeded"
    assert walk.kinds(job).count(DONE) == 1


def test_a_fenced_result_is_discarded(walk: Walk) -> None:
    job = walk.submit(spec=make_spec(PROMPT))
    word = walk.start_and_pause(job)
    walk.store.release_many(WORKER, [Held(job.id, 1)])
    walk.store.claim_many([job.id], "another", "node")
    stolen = walk.job(job)
    walk.runner.go.set()
    assert word.result(20) == "fenced"
    assert walk.job(job) == stolen
    assert walk.cache.get("default", job.spec.cache_key(job.model_revision)) is None


def test_a_terminal_event_that_cannot_be_told_is_left_to_sql(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.way, "DELIVERY_SECONDS", 0.05)
    job = walk.submit(spec=make_spec(PROMPT))
    word = walk.start_and_pause(job)
    walk.stream.away = True
    walk.runner.go.set()
    assert word.result(20) == "succeeded"
    assert walk.flusher.due_in() is None  # nothing is kept for a job that is over


@pytest.mark.parametrize(
    ("sampling", "cache", "cached"),
    [({}, "miss", True), ({}, "off", False), ({"temperature": 1.0}, "miss", False), ({"temperature": 1.0, "seed": 5}, "miss", True)],
)
def test_only_deterministic_results_are_cached_and_only_if_asked(walk: Walk, sampling: dict[str, object], cache: str, cached: bool) -> None:
    job = walk.submit(spec=make_spec(PROMPT, **sampling), cache=cache)
    assert walk.run(job) == "succeeded"
    assert (walk.cache.get("default", job.spec.cache_key(job.model_revision)) is not None) is cached


def test_the_feeder_is_told_of_bulk_and_standard_finishes(walk: Walk) -> None:
    for priority in Priority:
        job = walk.submit(priority=priority, spec=make_spec(PROMPT))
        walk.store.feed(queue_of(job), 10)
        assert walk.run(job) == "succeeded"
    assert [claim.queue.priority for claim in walk.fed] == [Priority.STANDARD, Priority.BULK]


def test_unseeded_sampling_gets_a_seed_of_its_job() -> None:
    sampling = make_spec(PROMPT, temperature=1.0).sampling
    one, again, other = seeded(sampling, "job_a"), seeded(sampling, "job_a"), seeded(sampling, "job_b")
    assert one == again and one.seed is not None and 0 <= one.seed < 2**63
    assert other.seed != one.seed
    greedy = make_spec(PROMPT).sampling
    assert seeded(greedy, "job_a") is greedy
