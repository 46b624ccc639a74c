"""The engine's thread: ready or an error at its start, and an end that is either asked for or a death."""

import threading
from collections.abc import Callable, Sequence

import pytest

from promptmill.core.engine import Capabilities, EngineEvent, EngineStats, Finished, GenRequest, PauseMode, Resumable
from promptmill.core.errors import ConfigError
from tests.support.engine import make_engine, make_request
from workers.engine_thread import EngineThread

Sink = Callable[[Sequence[EngineEvent]], None]


class Script:
    """An Engine that runs until it is closed, fails to load, or breaks when it is told to."""

    caps = Capabilities()

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.alive = False
        self.breaks: BaseException | None = None
        self.end = threading.Event()
        self.drained: list[float] = []
        self.ran_on = ""

    def run(self, sink: Sink, ready: Callable[[], None]) -> None:
        self.ran_on = threading.current_thread().name
        if self.failure:
            raise self.failure
        self.alive = True
        ready()
        self.end.wait(20)
        self.alive = False
        if self.breaks:
            raise self.breaks

    def drain(self, seconds: float) -> tuple[Resumable, ...]:
        self.drained.append(seconds)
        self.end.set()
        return (Resumable("job_a/1", ((5,),)),)

    def close(self) -> None:
        self.end.set()

    def stats(self) -> EngineStats:
        return EngineStats(waiting=0)

    def submit(self, request: GenRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def pause(self, request_id: str, mode: PauseMode = "auto") -> None: ...

    def resume(self, request_id: str) -> None: ...


def ignore(_: Sequence[EngineEvent]) -> None: ...


@pytest.mark.parametrize("failure", [ConfigError("no weights"), MemoryError(), SystemExit(3)])
def test_what_loading_raises_comes_out_of_start(failure: BaseException) -> None:
    died = threading.Event()
    thread = EngineThread(Script(failure), died.set)
    with pytest.raises(type(failure)) as error:
        thread.start(ignore)
    assert error.value is failure
    assert not thread.alive and not thread.dead and not died.is_set()
    thread.close()


def test_start_returns_when_the_engine_is_ready_and_close_waits_for_its_end() -> None:
    engine, died = Script(), threading.Event()
    thread = EngineThread(engine, died.set)
    assert not thread.dead
    thread.start(ignore)
    assert thread.alive and not thread.dead and engine.ran_on == "engine"
    thread.close()
    assert not thread.alive and not thread.dead and not died.is_set()


@pytest.mark.parametrize("breaks", [None, RuntimeError("broken"), SystemExit(1)])
def test_an_end_that_nobody_asked_for_is_a_death(breaks: BaseException | None) -> None:
    engine, died = Script(), threading.Event()
    thread = EngineThread(engine, died.set)
    thread.start(ignore)
    engine.breaks = breaks
    engine.end.set()
    assert died.wait(10)
    assert thread.dead and not thread.alive
    thread.close()


def test_a_drain_ends_the_engine_once_and_tells_what_was_given_up() -> None:
    engine, died = Script(), threading.Event()
    thread = EngineThread(engine, died.set)
    thread.start(ignore)
    assert [left.id for left in thread.drain(7)] == ["job_a/1"]
    thread.close()
    assert thread.drain(7) == () and engine.drained == [7]
    assert not thread.dead and not died.is_set()


def test_a_real_engine_serves_and_ends_on_its_thread() -> None:
    events: list[EngineEvent] = []
    ended = threading.Event()

    def sink(came: Sequence[EngineEvent]) -> None:
        events.extend(came)
        if any(isinstance(event, Finished) for event in came):
            ended.set()

    engine = make_engine()
    thread = EngineThread(engine)
    thread.start(sink)
    engine.submit(make_request("job_a/1", max_tokens=4))
    assert ended.wait(20)
    thread.close()
    assert not thread.alive and not thread.dead
