"""All children of one machine: kept alive together, stopped in an order that loses nothing."""

from collections.abc import Callable, Iterator, Sequence

from promptmill.core.clock import Clock
from promptmill.supervisor.child import Child, Died, Restarted
from promptmill.supervisor.wake import Wake

RELEASE_S = 5.0  # of a worker, after its drain: to give the jobs it still has back to the queue
LEEWAY_S = 3.0
LINGER_S = 3.0  # of the api after the last worker: time for the last tokens to reach their viewers
LAST_S = 0.8  # each for maintenance and for Redis, when the time is up


class Group:
    def __init__(self, clock: Clock, wake: Wake):
        self._clock = clock
        self._wake = wake
        self.children: list[Child] = []

    def start(self, child: Child) -> None:
        """Raises OSError when the program cannot be run; the child is stopped with the group anyhow."""
        self.children.append(child)
        child.start()

    def run_once(self, now: float) -> Iterator[Died | Restarted]:
        for child in self.children:
            if notice := child.run_once(now):
                yield notice

    def due(self) -> float | None:
        """When the next child must be started, None while all live."""
        return min((child.due for child in self.children if child.due is not None), default=None)

    def stop(self, drain_s: float) -> list[str]:
        """Stop everything, within ``drain_s`` + about 10 s; the names of those that had to be killed.

        First all that makes or takes work: beat, api (it takes no more and sends its viewers away),
        workers (drain, then release), flower. Then maintenance, and Redis last, since all others
        write to it until they end. A further signal while this runs kills the rest at once.
        """
        begun, asked = self._clock.monotonic(), self._wake.stops
        hard = begun + drain_s + RELEASE_S + LEEWAY_S
        redis, maintenance = self._named("redis"), self._named("maintenance")
        workers = [child for child in self.children if child.name.startswith("worker")]
        others = [child for child in self.children if child not in (*redis, *maintenance, *workers)]

        def hurried() -> bool:
            return self._wake.stops > max(asked, 1)

        for child in sorted((*others, *workers), key=_order):
            child.stop()
        self._await(workers, hard, hurried)
        self._await(others, min(hard, self._clock.monotonic() + LINGER_S), hurried)
        killed = _kill(workers) + _kill(others)
        for last in (maintenance, redis):
            for child in last:
                child.stop()
            now = self._clock.monotonic()
            self._await(last, min(now + LINGER_S, max(now, hard) + LAST_S), hurried)
            killed += _kill(last)
        return killed

    def _named(self, name: str) -> list[Child]:
        return [child for child in self.children if child.name == name]

    def _await(self, children: Sequence[Child], deadline: float, hurried: Callable[[], bool]) -> None:
        while not all(child.gone for child in children) and not hurried():
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return
            self._wake.wait(left)


def _order(child: Child) -> int:
    order = ("beat", "api")
    return order.index(child.name) if child.name in order else len(order)


def _kill(children: Sequence[Child]) -> list[str]:
    left = [child for child in children if not child.gone]
    for child in left:
        child.kill()
    return [child.name for child in left]
