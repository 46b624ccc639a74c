"""What every JobStore promises to requests and workers. Maintenance: test_job_store_sweep.py."""

import pytest

from promptmill.core.errors import IdempotencyMismatch
from promptmill.core.jobs import Beam, Grammar, Held, JobError, Priority, Status, Timings
from tests.support.factories import make_finish, make_id, make_job, make_key, make_outcome, make_scored_outcome, make_spec, queue_of
from tests.support.stores import KEY_LIFE, LEASE, Stand

NASTY = "nul \x00, lone surrogate \ud800, emoji \N{PARTY POPPER}, quote ' \" \\u0000"


# -- submit, get, page ----------------------------------------------------------------------------


def test_a_submitted_job_comes_back_as_it_was_given(stand: Stand) -> None:
    new = make_job(
        Priority.BULK,
        clock=stand.clock,
        spec=make_spec((5, 6), 3, temperature=0.7, top_k=4, seed=2**63, stop=(NASTY, "b")),
        request={"prompt": NASTY, "n": [1, None, True]},
        metadata={"who": NASTY},
        cache="off",
    )
    (answer,) = stand.store.submit([new])
    assert not answer.replayed
    assert answer.job == stand.job(new.id)
    for field in ("id", "tenant", "model", "model_revision", "priority", "spec", "request", "metadata", "created_at", "cache"):
        assert getattr(answer.job, field) == getattr(new, field)
    assert (answer.job.status, answer.job.attempt, answer.job.losses) == (Status.QUEUED, 0, 0)
    assert answer.job.started_at is None and answer.job.finished_at is None and answer.job.outcome is None


def test_a_cache_hit_is_born_succeeded_and_is_never_run(stand: Stand) -> None:
    new = make_job(clock=stand.clock, cache="hit", outcome=make_outcome(NASTY))
    (job,) = stand.submit(new)
    assert job == stand.job(new.id)
    assert (job.status, job.attempt, job.finished_at, job.outcome) == (Status.SUCCEEDED, 0, new.created_at, make_outcome(NASTY))
    assert stand.store.claim_many([new.id], "w1", "n1") == [None]
    assert stand.store.published() == stand.store.feedable() == []


def test_submitting_nothing_and_asking_for_nothing_is_allowed(stand: Stand) -> None:
    assert stand.store.submit([]) == []
    assert stand.store.claim_many([], "w1", "n1") == []
    assert stand.store.finish_many([]) == []
    assert stand.store.release_many("w1", []) == []
    assert stand.store.heartbeat("w1", []).renewed == frozenset()
    assert stand.store.get("job_unknown") is None
    assert stand.store.cancel("job_unknown") is None


def test_a_job_is_seen_by_its_tenant_alone(stand: Stand) -> None:
    new = make_job(clock=stand.clock, tenant="other")
    stand.submit(new)
    assert stand.store.get(new.id) is None
    assert stand.store.cancel(new.id) is None
    assert stand.store.page().jobs == ()
    assert stand.store.get(new.id, "other") is not None
    assert [job.id for job in stand.store.page("other").jobs] == [new.id]


def test_pages_run_from_the_newest_to_the_oldest_without_gap(stand: Stand) -> None:
    new = [make_job(clock=stand.clock) for _ in range(5)]
    stand.submit(*new)
    newest_first = [job.id for job in reversed(new)]
    first = stand.store.page(limit=2)
    second = stand.store.page(limit=2, after=first.jobs[-1].id)
    third = stand.store.page(limit=2, after=second.jobs[-1].id)
    assert [job.id for page in (first, second, third) for job in page.jobs] == newest_first
    assert [page.has_more for page in (first, second, third)] == [True, True, False]


def test_a_page_holds_the_asked_status_or_batch_only(stand: Stand) -> None:
    one, two = make_job(clock=stand.clock), make_job(clock=stand.clock)
    stand.submit(one, two)
    stand.store.cancel(one.id)
    assert [job.id for job in stand.store.page(status=Status.CANCELLED).jobs] == [one.id]
    assert [job.id for job in stand.store.page(status=Status.QUEUED).jobs] == [two.id]
    assert stand.store.page(batch_id="batch_1").jobs == ()


# -- idempotency ----------------------------------------------------------------------------------


def test_a_known_key_with_the_same_body_gives_the_earlier_job(stand: Stand) -> None:
    first, second = (make_job(clock=stand.clock, idempotency=make_key()) for _ in range(2))
    stand.submit(first)
    stand.store.cancel(first.id)
    (answer,) = stand.store.submit([second])
    assert answer.replayed
    assert answer.job == stand.job(first.id)
    assert stand.store.get(second.id) is None


def test_a_known_key_with_another_body_is_refused_and_nothing_is_inserted(stand: Stand) -> None:
    stand.submit(make_job(clock=stand.clock, idempotency=make_key()))
    neighbour = make_job(clock=stand.clock, idempotency=make_key("key-0"))
    wrong = make_job(clock=stand.clock, idempotency=make_key(body_hash="hash-2"))
    with pytest.raises(IdempotencyMismatch):
        stand.store.submit([neighbour, wrong])
    assert stand.store.get(neighbour.id) is None and stand.store.get(wrong.id) is None
    (answer,) = stand.store.submit([make_job(clock=stand.clock, idempotency=make_key("key-0", "hash-9"))])
    assert not answer.replayed, "a refused submit must not have taken its keys"


def test_one_key_twice_in_a_submit_is_one_job(stand: Stand) -> None:
    one, other, same = (make_job(clock=stand.clock, idempotency=make_key(key)) for key in ("a", "b", "a"))
    answers = stand.store.submit([one, other, same])
    assert [(answer.job.id, answer.replayed) for answer in answers] == [(one.id, False), (other.id, False), (one.id, True)]
    assert stand.store.get(same.id) is None


def test_a_key_counts_per_tenant_and_route(stand: Stand) -> None:
    new = [
        make_job(clock=stand.clock, idempotency=make_key(body_hash="1")),
        make_job(clock=stand.clock, idempotency=make_key(body_hash="2", route="POST /v1/completions")),
        make_job(clock=stand.clock, idempotency=make_key(body_hash="3"), tenant="other"),
    ]
    assert [answer.replayed for answer in stand.store.submit(new)] == [False, False, False]


def test_an_expired_key_may_be_used_again(stand: Stand) -> None:
    first, second, third = (make_job(clock=stand.clock, idempotency=make_key(body_hash=str(n))) for n in (1, 2, 2))
    stand.submit(first)
    stand.clock.advance(KEY_LIFE + 1)
    assert [answer.replayed for answer in stand.store.submit([second])] == [False]
    assert [answer.job.id for answer in stand.store.submit([third])] == [second.id]


# -- claim ----------------------------------------------------------------------------------------


def test_a_claim_carries_all_that_is_needed_to_run(stand: Stand) -> None:
    new = make_job(Priority.STANDARD, clock=stand.clock, spec=make_spec((9, 8, 7)), tenant="other")
    stand.submit(new)
    stand.clock.advance(1.5)
    claim = stand.claim(new.id, "w7", "node7")
    assert (claim.id, claim.attempt, claim.tenant, claim.queue) == (new.id, 1, "other", queue_of(new))
    assert (claim.model_revision, claim.spec, claim.cache, claim.created_at) == (new.model_revision, new.spec, "miss", new.created_at)
    assert claim.queued_ms == pytest.approx(1500, abs=0.01)
    job = stand.store.get(new.id, "other")
    assert job is not None
    assert (job.status, job.attempt, job.worker, job.node) == (Status.RUNNING, 1, "w7", "node7")
    assert job.started_at == pytest.approx(new.created_at + 1.5)


def test_claims_come_in_the_order_asked_and_only_once_each(stand: Stand) -> None:
    a, b, running, cancelled = (make_job(clock=stand.clock) for _ in range(4))
    stand.submit(a, b, running, cancelled)
    stand.claim(running.id)
    stand.store.cancel(cancelled.id)
    asked = [b.id, running.id, "job_unknown", a.id, b.id, cancelled.id]
    claims = stand.store.claim_many(asked, "w2", "n2")
    assert [claim and claim.id for claim in claims] == [b.id, None, None, a.id, None, None]


def test_a_wall_clock_that_steps_back_makes_no_negative_times(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    stand.submit(new)
    stand.clock.step_wall(-100)
    claim = stand.claim(new.id)
    assert claim.queued_ms == 0
    stand.clock.step_wall(-100)
    assert stand.store.finish_many([make_finish(claim.held, "w1")]) == [True]
    job = stand.job(new.id)
    assert job.started_at is not None and job.finished_at is not None
    assert job.created_at <= job.started_at <= job.finished_at


def test_started_at_is_the_first_claim(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    held = stand.held(new)
    started = stand.job(new.id).started_at
    stand.store.release_many("w1", [held])
    stand.clock.advance(5)
    assert stand.claim(new.id).attempt == 2
    assert stand.job(new.id).started_at == started


# -- heartbeat ------------------------------------------------------------------------------------


def test_a_heartbeat_renews_only_what_is_still_ours_and_names_the_cancelled(stand: Stand) -> None:
    kept, flagged, finished, others = (make_job(clock=stand.clock) for _ in range(4))
    held = [stand.held(new) for new in (kept, flagged, finished)]
    foreign = stand.held(others, "w2")
    stand.store.cancel(flagged.id)
    stand.store.finish_many([make_finish(held[2], "w1")])
    stale = Held(kept.id, 0)
    beat = stand.store.heartbeat("w1", [*held, foreign, stale, Held("job_unknown", 1)])
    assert beat.renewed == {held[0], held[1]}
    assert beat.cancelled == {flagged.id}


def test_a_heartbeat_keeps_a_lease_alive(stand: Stand) -> None:
    held = stand.held(make_job(clock=stand.clock))
    for _ in range(3):
        stand.passes(LEASE * 0.75)
        assert stand.store.heartbeat("w1", [held]).renewed == {held}
    assert stand.store.recover() == []


# -- finish ---------------------------------------------------------------------------------------


def test_a_finish_stores_result_error_and_timings(stand: Stand) -> None:
    good, bad = make_job(clock=stand.clock), make_job(clock=stand.clock)
    held_good, held_bad = stand.held(good), stand.held(bad)
    stand.clock.advance(2)
    error = JobError("engine_error", NASTY)
    items = [
        make_finish(held_good, "w1", outcome=make_outcome(NASTY), timings=Timings(queue_ms=0.1, decode_ms=12.625)),
        make_finish(held_bad, "w1", Status.FAILED, error=error),
    ]
    assert stand.store.finish_many(items) == [True, True]
    job = stand.job(good.id)
    assert (job.status, job.outcome, job.error) == (Status.SUCCEEDED, make_outcome(NASTY), None)
    assert (job.timings, job.finished_at) == (Timings(queue_ms=0.1, decode_ms=12.625), stand.clock.time())
    assert (job.attempt, job.worker) == (1, "w1")
    job = stand.job(bad.id)
    assert (job.status, job.error, job.outcome) == (Status.FAILED, error, None)


def test_sampling_and_logprobs_are_kept_whole(stand: Stand) -> None:
    sampling = {"n": 2, "logprobs": 1, "prompt_logprobs": 0, "logit_bias": ((3, -0.5),), "stop_token_ids": (7,), "min_p": 0.1}
    new = make_job(clock=stand.clock, spec=make_spec(beam=Beam(3, 0.5, True), grammar=Grammar("regex", "a\x00|é"), **sampling))
    held = stand.held(new)
    assert stand.job(new.id).spec == new.spec
    assert stand.store.finish_many([make_finish(held, "w1", outcome=make_scored_outcome())]) == [True]
    assert stand.job(new.id).outcome == make_scored_outcome()


def test_a_finish_that_is_repeated_is_recognised(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    item = make_finish(stand.held(new), "w1")
    assert stand.store.finish_many([item]) == [True]
    before = stand.job(new.id)
    stand.clock.advance(60)
    assert stand.store.finish_many([item, item]) == [True, True]
    assert stand.job(new.id) == before


def test_of_two_finishes_of_one_run_in_a_commit_the_first_counts(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    held = stand.held(new)
    first, echo = (make_finish(held, "w1", outcome=make_outcome(text)) for text in ("first", "echo"))
    assert stand.store.finish_many([first, echo]) == [True, True]
    assert stand.job(new.id).outcome == make_outcome("first")


def test_the_fence_is_checked_for_each_row_of_a_commit(stand: Stand) -> None:
    queued, other, done, fine = (make_job(clock=stand.clock) for _ in range(4))
    stand.submit(queued)
    foreign = stand.held(other, "w2")
    old = stand.held(done)
    stand.store.finish_many([make_finish(old, "w1")])
    held = stand.held(fine)
    items = [
        make_finish(Held(queued.id, 0), "w1"),  # never claimed
        make_finish(foreign, "w1"),  # another worker's
        make_finish(Held(held.id, 2), "w1"),  # another attempt
        make_finish(old, "w1", Status.FAILED),  # ours and terminal, but with another end
        make_finish(Held("job_unknown", 1), "w1"),
        make_finish(held, "w1"),
    ]
    assert stand.store.finish_many(items) == [False, False, False, False, False, True]
    assert [stand.status(new.id) for new in (queued, other, done)] == [Status.QUEUED, Status.RUNNING, Status.SUCCEEDED]
    assert stand.job(queued.id).outcome is None


def test_a_worker_s_own_earlier_attempt_is_fenced_too(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    old = stand.held(new)
    stand.store.release_many("w1", [old])
    held = stand.claim(new.id).held
    assert stand.store.heartbeat("w1", [old]).renewed == frozenset()
    assert stand.store.release_many("w1", [old]) == []
    assert stand.store.finish_many([make_finish(old, "w1")]) == [False]
    assert stand.status(new.id) is Status.RUNNING
    assert stand.store.finish_many([make_finish(held, "w1")]) == [True]


def test_a_finish_with_a_live_status_is_a_mistake(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    with pytest.raises(ValueError, match="terminal"):
        stand.store.finish_many([make_finish(stand.held(new), "w1", Status.QUEUED)])
    assert stand.status(new.id) is Status.RUNNING


# -- release --------------------------------------------------------------------------------------


def test_a_released_job_is_queued_again_without_blame(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    held = stand.held(new)
    (job,) = stand.store.release_many("w1", [held])
    assert job == stand.job(new.id)
    assert (job.status, job.attempt, job.losses, job.worker, job.node) == (Status.QUEUED, 1, 0, None, None)
    assert stand.claim(new.id, "w2").attempt == 2
    assert stand.store.finish_many([make_finish(held, "w1")]) == [False]


def test_a_released_job_with_a_cancel_flag_is_cancelled(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    held = stand.held(new)
    stand.store.cancel(new.id)
    (job,) = stand.store.release_many("w1", [held])
    assert (job.status, job.attempt, job.finished_at) == (Status.CANCELLED, 1, stand.clock.time())


def test_release_never_opens_what_is_terminal_or_anothers(stand: Stand) -> None:
    done, other, queued = (make_job(clock=stand.clock) for _ in range(3))
    held = stand.held(done)
    stand.store.finish_many([make_finish(held, "w1")])
    foreign = stand.held(other, "w2")
    stand.submit(queued)
    assert stand.store.release_many("w1", [held, foreign, Held(queued.id, 0), Held("job_unknown", 1)]) == []
    assert [stand.status(new.id) for new in (done, other, queued)] == [Status.SUCCEEDED, Status.RUNNING, Status.QUEUED]


def test_released_jobs_come_sorted_by_id(stand: Stand) -> None:
    held = [stand.held(make_job(clock=stand.clock)) for _ in range(4)]
    released = stand.store.release_many("w1", list(reversed(held)))
    assert [job.id for job in released] == [claim.id for claim in held]


# -- cancel ---------------------------------------------------------------------------------------


def test_cancelling_a_queued_job_ends_it_and_raises_the_fence(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    stand.submit(new)
    stand.clock.advance(3)
    job = stand.store.cancel(new.id)
    assert job is not None and job == stand.job(new.id)
    assert (job.status, job.attempt, job.started_at, job.finished_at) == (Status.CANCELLED, 1, None, stand.clock.time())
    assert stand.store.claim_many([new.id], "w1", "n1") == [None]
    assert stand.store.published() == []


def test_cancelling_a_running_job_flags_it_and_names_its_node(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    held = stand.held(new)
    job = stand.store.cancel(new.id)
    assert job is not None
    assert (job.status, job.cancel_requested, job.node, job.attempt, job.finished_at) == (Status.RUNNING, True, "n1", 1, None)
    assert stand.store.finish_many([make_finish(held, "w1", Status.CANCELLED, outcome=make_outcome())]) == [True]
    assert stand.job(new.id).outcome == make_outcome()


def test_cancelling_a_terminal_job_changes_nothing(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    stand.store.finish_many([make_finish(stand.held(new), "w1")])
    before = stand.job(new.id)
    stand.clock.advance(1)
    assert stand.store.cancel(new.id) == before == stand.job(new.id)


def test_a_ready_store_passes_its_check(stand: Stand) -> None:
    stand.store.check()
    assert stand.store.get(make_id()) is None
