"""What every JobStore promises to maintenance: feeding, leases, lost messages, counts."""

import pytest

from promptmill.core.jobs import JobRef, NewJob, Priority, QueueName, Status
from tests.support.factories import MODEL, make_finish, make_job, queue_of, ref_of
from tests.support.stores import LEASE, Stand

BULK = QueueName(Priority.BULK, MODEL)
STANDARD = QueueName(Priority.STANDARD, MODEL)
INTERACTIVE = QueueName(Priority.INTERACTIVE, MODEL)


def many(stand: Stand, count: int, priority: Priority = Priority.BULK, **fields: object) -> list[NewJob]:
    new = [make_job(priority, clock=stand.clock, **fields) for _ in range(count)]
    stand.submit(*new)
    return new


# -- feed -----------------------------------------------------------------------------------------


def test_feeding_takes_the_oldest_up_to_the_bound(stand: Stand) -> None:
    new = many(stand, 5)
    assert stand.store.feed(BULK, 3) == [ref_of(job) for job in new[:3]]
    assert stand.store.feed(BULK, 3) == []
    stand.claim(new[1].id)
    assert stand.store.feed(BULK, 3) == [ref_of(new[3])], "a claimed job leaves the published window"
    assert stand.store.feed(BULK, 100) == [ref_of(new[4])]


def test_feeding_is_per_queue(stand: Stand) -> None:
    bulk, standard = many(stand, 2), many(stand, 1, Priority.STANDARD)
    other = many(stand, 1, model="a.b")
    assert stand.store.feedable() == [QueueName(Priority.BULK, "a.b"), BULK, STANDARD]
    assert stand.store.feed(STANDARD, 10) == [ref_of(standard[0])]
    assert stand.store.feed(QueueName(Priority.BULK, "a.b"), 10) == [ref_of(other[0])]
    assert stand.store.feedable() == [BULK]
    assert stand.store.feed(BULK, 10) == [ref_of(job) for job in bulk]
    assert stand.store.feedable() == []


def test_interactive_jobs_are_born_published(stand: Stand) -> None:
    many(stand, 2, Priority.INTERACTIVE)
    assert stand.store.feedable() == []
    assert stand.store.feed(INTERACTIVE, 10) == []
    assert [(depth.queued, depth.published) for depth in stand.store.depths()] == [(2, 2)]


# -- recover --------------------------------------------------------------------------------------


def test_an_expired_lease_brings_the_job_back_and_counts_the_loss(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    held = stand.held(new)
    stand.passes(LEASE + 1)
    (job,) = stand.store.recover()
    assert job == stand.job(new.id)
    assert (job.status, job.attempt, job.losses, job.worker, job.node) == (Status.QUEUED, 1, 1, None, None)
    assert stand.store.recover() == []
    assert stand.store.heartbeat("w1", [held]).renewed == frozenset()
    assert stand.store.finish_many([make_finish(held, "w1")]) == [False], "a stale worker is fenced"
    assert stand.claim(new.id, "w2").attempt == 2
    assert stand.store.finish_many([make_finish(held, "w1")]) == [False]
    assert stand.status(new.id) is Status.RUNNING


def test_a_live_lease_is_left_alone(stand: Stand) -> None:
    stand.held(make_job(clock=stand.clock))
    stand.passes(LEASE - 1)
    assert stand.store.recover() == []


def test_a_lost_job_with_a_cancel_flag_is_cancelled_with_a_higher_fence(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    held = stand.held(new)
    stand.store.cancel(new.id)
    stand.passes(LEASE + 1)
    (job,) = stand.store.recover()
    assert (job.status, job.attempt, job.finished_at) == (Status.CANCELLED, 2, stand.clock.time())
    assert stand.store.finish_many([make_finish(held, "w1", Status.CANCELLED)]) == [False]


def test_leases_of_an_earlier_boot_count_as_expired(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    stand.held(new)
    stand.reboot()
    assert [job.id for job in stand.store.recover()] == [new.id]


def test_recovery_is_done_in_chunks_oldest_first(stand: Stand) -> None:
    held = [stand.held(make_job(clock=stand.clock)) for _ in range(5)]
    stand.passes(LEASE + 1)
    ids = [[job.id for job in stand.store.recover(limit=2)] for _ in range(4)]
    assert ids == [[held[0].id, held[1].id], [held[2].id, held[3].id], [held[4].id], []]


# -- lost messages --------------------------------------------------------------------------------


def test_a_due_message_is_lost_when_its_queue_is_empty(stand: Stand) -> None:
    (new,) = many(stand, 1, Priority.INTERACTIVE)
    assert stand.store.lost([INTERACTIVE]) == [], "not due yet"
    assert stand.store.published() == []
    stand.passes(5.5)
    assert stand.store.published() == [INTERACTIVE]
    assert stand.store.lost([]) == [], "it may still be in the list"
    assert stand.store.lost([BULK]) == []
    assert stand.store.lost([INTERACTIVE]) == [ref_of(new)]
    assert stand.store.lost([INTERACTIVE]) == [], "sent again just now"


def test_a_due_message_is_lost_when_a_much_later_one_was_read(stand: Stand) -> None:
    (old,) = many(stand, 1, Priority.INTERACTIVE)
    stand.passes(3)
    (close,) = many(stand, 1, Priority.INTERACTIVE)
    stand.passes(3)
    stand.claim(close.id)
    assert stand.store.lost([]) == [], "sent 3 s apart: may be in another hand"
    (late,) = many(stand, 1, Priority.INTERACTIVE)
    stand.claim(late.id)
    assert stand.store.lost([]) == [ref_of(old)]


def test_a_finished_job_still_tells_that_its_queue_was_read(stand: Stand) -> None:
    (old,) = many(stand, 1, Priority.INTERACTIVE)
    stand.passes(6)
    (late,) = many(stand, 1, Priority.INTERACTIVE)
    stand.store.finish_many([make_finish(stand.claim(late.id).held, "w1")])
    assert stand.store.lost([]) == [ref_of(old)]


def test_what_was_cancelled_unread_tells_nothing_of_the_queue(stand: Stand) -> None:
    many(stand, 1, Priority.INTERACTIVE)
    stand.passes(6)
    (late,) = many(stand, 1, Priority.INTERACTIVE)
    stand.store.cancel(late.id)
    assert stand.store.lost([]) == []


def test_another_queue_s_progress_tells_nothing(stand: Stand) -> None:
    many(stand, 1, Priority.INTERACTIVE)
    stand.passes(6)
    (late,) = many(stand, 1, Priority.INTERACTIVE, model="other")
    stand.claim(late.id)
    assert stand.store.lost([]) == []


def test_jobs_that_were_never_fed_cannot_be_lost(stand: Stand) -> None:
    many(stand, 2)
    stand.passes(100)
    assert stand.store.lost([BULK]) == []
    assert stand.store.published() == []


@pytest.mark.parametrize("resends", [1, 2, 4])
def test_each_resend_doubles_the_wait(stand: Stand, resends: int) -> None:
    (new,) = many(stand, 1, Priority.INTERACTIVE)
    wait = 5.0
    for _ in range(resends):
        stand.passes(wait + 0.5)
        assert stand.store.lost([INTERACTIVE]) == [ref_of(new)]
        wait *= 2
    stand.passes(wait - 1.0)
    assert stand.store.lost([INTERACTIVE]) == []
    stand.passes(1.5)
    assert stand.store.lost([INTERACTIVE]) == [ref_of(new)]


def test_the_wait_between_resends_is_an_hour_at_most(stand: Stand) -> None:
    (new,) = many(stand, 1, Priority.INTERACTIVE)
    for _ in range(12):
        stand.passes(3601)
        assert stand.store.lost([INTERACTIVE]) == [ref_of(new)]
    stand.passes(3590)
    assert stand.store.lost([INTERACTIVE]) == []


def test_a_recovered_job_is_published_anew(stand: Stand) -> None:
    new = make_job(Priority.BULK, clock=stand.clock)
    stand.held(new)
    stand.passes(LEASE + 1)
    stand.store.recover()
    assert stand.store.feedable() == []
    assert stand.store.lost([BULK]) == []
    stand.passes(5.5)
    assert stand.store.lost([BULK]) == [ref_of(new)]


def test_a_released_job_may_be_sent_again_at_once(stand: Stand) -> None:
    new = make_job(clock=stand.clock)
    stand.store.release_many("w1", [stand.held(new)])
    stand.passes(0.1)
    assert stand.store.lost([INTERACTIVE]) == [ref_of(new)]


def test_messages_of_an_earlier_boot_are_asked_for(stand: Stand) -> None:
    old = many(stand, 2, Priority.INTERACTIVE)
    stand.reboot()
    assert stand.store.published() == [INTERACTIVE]
    assert stand.store.lost([]) == [], "the broker may have kept its lists"
    stand.passes(10)
    (late,) = many(stand, 1, Priority.INTERACTIVE)
    stand.claim(late.id)
    assert stand.store.lost([]) == [ref_of(job) for job in old], "read after the boot, behind theirs"


def test_lost_messages_are_found_in_chunks_over_all_queues(stand: Stand) -> None:
    first, second = many(stand, 3, Priority.INTERACTIVE, model="a"), many(stand, 2, Priority.INTERACTIVE, model="b")
    stand.passes(6)
    queues = [queue_of(first[0]), queue_of(second[0])]
    found: list[JobRef] = []
    for _ in range(3):
        part = stand.store.lost(queues, limit=2)
        assert len(part) <= 2
        found += part
    assert found == [ref_of(job) for job in first + second]


# -- depths ---------------------------------------------------------------------------------------


def test_depths_count_what_is_live_in_each_queue(stand: Stand) -> None:
    bulk = many(stand, 4)
    stand.passes(3)
    interactive = many(stand, 2, Priority.INTERACTIVE)
    stand.store.feed(BULK, 3)
    stand.claim(bulk[0].id)
    stand.store.cancel(interactive[0].id)
    stand.store.finish_many([make_finish(stand.claim(interactive[1].id).held, "w1")])
    stand.passes(2)
    (depth,) = stand.store.depths()
    assert (depth.queue, depth.queued, depth.published, depth.running) == (BULK, 3, 2, 1)
    assert depth.oldest_s == pytest.approx(5)
    for new in bulk[1:]:
        stand.claim(new.id)
    (depth,) = stand.store.depths()
    assert (depth.queued, depth.published, depth.running, depth.oldest_s) == (0, 0, 4, 0)
