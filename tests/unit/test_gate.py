from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from promptmill.core.jobs import Priority, QueueName
from tests.support.clock import FakeClock
from workers.gate import Capacity, CapacityGate, order
from workers.registry import Registry

CAPACITY = Capacity(rows=8, reserved=2)
NOW, STD, BULK = Priority.INTERACTIVE, Priority.STANDARD, Priority.BULK
QUEUES = [f"{priority}.tiny" for priority in (BULK, STD, NOW)]


def priorities(in_flight: Mapping[Priority, int]) -> list[str]:
    return [name.partition(".")[0] for name in order(QUEUES, in_flight, CAPACITY)]


def test_bulk_below_its_minimum_goes_first() -> None:
    assert priorities({}) == [BULK, NOW, STD]
    assert priorities({NOW: 5, STD: 2}) == [BULK, NOW, STD]


def test_else_interactive_then_standard_then_bulk() -> None:
    assert priorities({BULK: 1}) == [NOW, STD, BULK]


def test_with_the_rows_full_only_interactive_is_fetched() -> None:
    assert priorities({BULK: 8}) == [NOW]
    assert priorities({STD: 8}) == [NOW]
    assert priorities({BULK: 3, STD: 5, NOW: 1}) == [NOW]


def test_with_everything_full_nothing_is_fetched() -> None:
    assert priorities({NOW: 10}) == []
    assert priorities({BULK: 8, NOW: 2}) == []


def test_queues_that_hold_no_jobs_always_pass() -> None:
    assert order(["maintenance", "abc.reply.celery.pidbox", "bulk.tiny"], {NOW: 10}, CAPACITY) == ["maintenance", "abc.reply.celery.pidbox"]


def test_models_of_a_priority_take_turns() -> None:
    gate = CapacityGate()
    gate.update(["bulk.a", "bulk.b"])
    assert gate.consume(2) == ["bulk.a", "bulk.b"]
    gate.rotate("bulk.a")
    assert gate.consume(2) == ["bulk.b", "bulk.a"]
    assert gate.rotate("gone") == "gone"


def test_the_gate_reads_the_load_of_this_process() -> None:
    clock = FakeClock()
    registry = Registry(CAPACITY, clock)
    for _ in range(8):
        registry.arrive(BULK)
    gate = CapacityGate(QUEUES)
    clock.advance(60)
    CapacityGate.load = registry
    try:
        assert gate.consume(3) == ["interactive.tiny"]
    finally:
        CapacityGate.load = None
    assert registry.fetching(within_s=5)  # the consumer has asked just now


@given(st.lists(st.sampled_from(QUEUES), max_size=200), st.data())
def test_no_flood_takes_more_than_its_share(waiting: list[str], data: st.DataObject) -> None:
    """Whatever waits and ends in whatever order: standard and bulk never exceed the rows, all never the total."""
    in_flight = dict.fromkeys(Priority, 0)
    for _ in range(len(waiting)):
        fetched = next((name for name in order(QUEUES, in_flight, CAPACITY) if name in waiting), None)
        if fetched is not None:
            waiting.remove(fetched)
            queue = QueueName.parse(fetched)
            assert queue is not None
            in_flight[queue.priority] += 1
        assert in_flight[STD] + in_flight[BULK] <= CAPACITY.rows
        assert sum(in_flight.values()) <= CAPACITY.total
        running = [priority for priority, count in in_flight.items() if count]
        if running and (fetched is None or data.draw(st.booleans())):
            in_flight[data.draw(st.sampled_from(running))] -= 1
