"""Many threads at one store: one winner, no deadlock, no bound overrun."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from promptmill.core.jobs import Priority, Status
from storage.db import Database
from storage.jobs import SqlJobStore
from tests.support.factories import make_finish, make_job, make_key, queue_of
from tests.support.stores import Stand


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls at once, each in a thread; their results in order."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(run, call) for call in calls]]


def test_fifty_submits_of_one_key_make_one_job(stand: Stand) -> None:
    new = [make_job(clock=stand.clock, idempotency=make_key()) for _ in range(50)]
    answers = [answer for (answer,) in together([partial(stand.store.submit, [job]) for job in new])]
    assert len({answer.job.id for answer in answers}) == 1
    assert [answer.replayed for answer in answers].count(False) == 1
    assert len(stand.store.page(limit=100).jobs) == 1


def test_submits_of_the_same_keys_in_opposite_orders_do_not_lock_each_other_out(stand: Stand) -> None:
    def batch(round: int, reverse: bool) -> list[str]:
        keys = [f"{round}-{n}" for n in range(20)]
        new = [make_job(clock=stand.clock, idempotency=make_key(key)) for key in (reversed(keys) if reverse else keys)]
        return sorted(answer.job.id for answer in stand.store.submit(new))

    for round in range(10):
        one, two = together([partial(batch, round, False), partial(batch, round, True)])
        assert one == two


def test_a_job_claimed_by_many_has_one_winner(stand: Stand) -> None:
    for _ in range(10):
        ids = [job.id for job in stand.submit(*(make_job(clock=stand.clock) for _ in range(20)))]
        orders = [ids, list(reversed(ids)), ids[10:] + ids[:10], ids]
        claims = together([partial(stand.store.claim_many, order, f"w{n}", "n") for n, order in enumerate(orders)])
        won = [claim.id for part in claims for claim in part if claim is not None]
        assert sorted(won) == ids


def test_cancel_and_claim_of_one_job_agree(stand: Stand) -> None:
    for _ in range(20):
        new = make_job(clock=stand.clock)
        stand.submit(new)
        claims, job = together([partial(stand.store.claim_many, [new.id], "w1", "n1"), partial(stand.store.cancel, new.id)])
        (claim,) = claims
        if claim is None:
            assert (job.status, job.attempt) == (Status.CANCELLED, 1)
        else:
            assert (job.status, job.cancel_requested, job.attempt) == (Status.RUNNING, True, 1)
        assert stand.job(new.id) == job


def test_cancel_and_finish_of_one_job_agree(stand: Stand) -> None:
    for _ in range(20):
        new = make_job(clock=stand.clock)
        item = make_finish(stand.held(new), "w1")
        finished, job = together([partial(stand.store.finish_many, [item]), partial(stand.store.cancel, new.id)])
        assert finished == [True]
        assert stand.status(new.id) is Status.SUCCEEDED
        assert job.status in (Status.RUNNING, Status.SUCCEEDED)


def test_a_lost_lease_is_recovered_once_and_never_under_a_heartbeat(stand: Stand) -> None:
    for _ in range(10):
        held = [stand.held(make_job(clock=stand.clock)) for _ in range(10)]
        stand.passes(20)
        first, second, beat = together([stand.store.recover, stand.store.recover, partial(stand.store.heartbeat, "w1", held)])
        back = [job.id for job in [*first, *second]]
        assert len(back) == len(set(back))
        assert set(back).isdisjoint(claim.id for claim in beat.renewed)
        assert {*back, *(claim.id for claim in beat.renewed)} == {claim.id for claim in held}
        stand.store.release_many("w1", held)


def test_feeders_together_keep_the_bound(stand: Stand) -> None:
    for round in range(15):
        new = [make_job(Priority.BULK, clock=stand.clock, model=f"m{round}") for _ in range(60)]
        stand.submit(*new)
        fed = [ref for part in together([partial(stand.store.feed, queue_of(new[0]), 25)] * 6) for ref in part]
        assert sorted(ref.id for ref in fed) == [job.id for job in new[:25]]


@pytest.fixture
def store(postgres_url: str) -> Iterator[SqlJobStore]:
    store = SqlJobStore(Database.connect(postgres_url), lease_seconds=8.0)
    yield store
    store.close()


def test_statements_over_many_rows_in_opposite_orders_do_not_deadlock(store: SqlJobStore) -> None:
    new = [make_job() for _ in range(150)]
    store.submit(new)
    held = [claim.held for claim in store.claim_many([job.id for job in new], "w1", "n1") if claim is not None]

    def beats() -> bool:
        return all(len(store.heartbeat("w1", held).renewed) for _ in range(20))

    def beats_backwards() -> bool:
        return all(len(store.heartbeat("w1", held[::-1]).renewed) for _ in range(20))

    def finishes() -> bool:
        parts = [held[n : n + 30][::-1] for n in (90, 30, 60, 0)]
        return all(all(store.finish_many([make_finish(claim, "w1") for claim in part])) for part in parts)

    # A deadlock would be an Unavailable here.
    assert together([beats, beats_backwards, finishes]) == [True, True, True]


def test_postgresql_judges_a_lease_by_its_own_clock(postgres_url: str) -> None:
    store = SqlJobStore(Database.connect(postgres_url), lease_seconds=0.2)
    new = make_job()
    store.submit([new])
    (claim,) = store.claim_many([new.id], "w1", "n1")
    assert claim is not None
    pause = threading.Event()
    back = []
    for _ in range(500):
        back = store.recover()
        if back:
            break
        pause.wait(0.02)
    assert [(job.id, job.status, job.losses) for job in back] == [(new.id, Status.QUEUED, 1)]
    store.close()
