"""Stop strings on a text that comes in pieces.

The text is cut before the first match. *First* is the match that ends first (of several that end
at the same character, the longest): the one that a reader of single characters would see first.
So the cut does not depend on how the text is split into pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


def failure_links(stop: str) -> list[int]:
    """Knuth-Morris-Pratt: for each prefix of ``stop``, its longest proper prefix that is also its suffix."""
    links = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = links[length - 1]
        if stop[at] == stop[length]:
            length += 1
        links[at] = length
    return links


@dataclass(slots=True)
class _Automaton:
    """``matched``: the longest suffix of the text that is a prefix of ``stop``, in characters."""

    stop: str
    links: list[int]
    matched: int = 0

    def feed(self, char: str) -> bool:
        while self.matched and self.stop[self.matched] != char:
            self.matched = self.links[self.matched - 1]
        if self.stop[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.stop)


@dataclass(slots=True)
class StopMatcher:
    """Passes text on, but holds back the longest suffix that is a prefix of some stop.

    ``stops`` must not hold the empty string. Once ``stopped``, nothing more may be pushed.
    """

    stops: Sequence[str]
    stopped: bool = False
    _automata: list[_Automaton] = field(init=False)
    _held: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._automata = [_Automaton(stop, failure_links(stop)) for stop in self.stops]

    def push(self, delta: str) -> str:
        """The text that is safe to show now; on a match the text before it, and ``stopped`` is set."""
        if not self._automata:
            return delta
        text = self._held + delta
        for end in range(len(self._held) + 1, len(text) + 1):
            matches = [len(a.stop) for a in self._automata if a.feed(text[end - 1])]
            if matches:
                self.stopped = True
                self._held = ""
                return text[: end - max(matches)]
        safe = len(text) - max(a.matched for a in self._automata)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The end of the text has come: what was held back is no stop."""
        held, self._held = self._held, ""
        return held
