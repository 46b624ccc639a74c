"""A viewer's queue never hides a loss, and never grows."""

import threading

from storage.feeds import BoundedFeed, FeedTable
from tests.support.streams import DEADLINE, token


def test_get_wakes_when_the_feed_begins_to_lag() -> None:
    feed = BoundedFeed("a", size=4, complete=True)
    woke = threading.Event()

    def wait() -> None:
        assert feed.get(DEADLINE) is None
        woke.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    feed.mark_lagging()
    assert woke.wait(DEADLINE / 2)
    waiter.join()
    assert feed.lagging


def test_an_overflow_empties_the_queue_and_later_events_come_again() -> None:
    feed = BoundedFeed("a", size=2, complete=True)
    for pos in range(3):
        feed.put(token("a", pos))
    feed.put(token("a", 3))
    assert feed.get(0) is None
    assert feed.lagging
    feed.caught_up()
    assert feed.get(0) == token("a", 3)
    assert feed.get(0) is None
    assert not feed.lagging


def test_a_loss_while_the_log_is_read_is_not_forgotten() -> None:
    feed = BoundedFeed("a", size=2, complete=True)
    feed.mark_lagging()
    assert feed.lagging  # the viewer reads the log from here …
    feed.mark_lagging()  # … a loss comes …
    assert feed.lagging  # … the viewer may look again …
    feed.caught_up()
    assert feed.lagging  # … and reads once more
    feed.caught_up()
    assert not feed.lagging


def test_caught_up_without_having_seen_the_loss_repairs_nothing() -> None:
    feed = BoundedFeed("a", size=2, complete=True)
    feed.mark_lagging()
    feed.caught_up()
    assert feed.lagging


def test_a_feed_opened_without_a_subscription_starts_behind_and_the_subscription_marks_it_again() -> None:
    table = FeedTable()
    feed = table.open("a")
    assert feed.lagging
    feed.caught_up()
    assert not feed.lagging
    table.subscribed()
    assert feed.lagging
    assert not table.open("a").lagging
    table.lost()
    assert table.open("a").lagging


def test_the_last_viewer_of_a_job_leaves_no_entry() -> None:
    table = FeedTable()
    first, second, other = table.open("a"), table.open("a"), table.open("b")
    assert table.jobs == 2
    table.close(first)
    assert table.of("a") == (second,)
    table.close(second)
    table.close(second)
    assert table.of("a") == ()
    assert table.jobs == 1
    table.close(other)
    assert table.jobs == 0
