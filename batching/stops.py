"""Stop strings on a text that comes in pieces.

The text is cut before the first match. *First* is the match that ends first (of several that end
at the same character, the longest): the one that a reader of single characters would see first.
So the cut does not depend on how the text is split into pieces (docs/decisions/0003-stop-strings.md).
"""

from collections.abc import Sequence
from copy import copy

ROOT = 0
_CHARS = 0x110000  # code points of Unicode


class StopAutomaton:
    """All stops in one (Aho and Corasick: Efficient string matching, 1975). A node stands for a prefix of a
    stop: the longest one that the text read so far ends with. The cost of a character does not grow with
    the number of stops. Immutable.

    By node: ``matched``: length of the longest stop that ends there, 0 = none; ``held``: length of the longest
    prefix that may still grow into a stop.
    """

    __slots__ = ("_fail", "_goto", "_starts", "held", "matched")

    def __init__(self, stops: Sequence[str]):
        self._goto: dict[int, int] = {}  # by node * _CHARS + character
        self._fail, self.matched = [ROOT], [0]
        self._starts = frozenset(stop[0] for stop in stops)
        depths, leaf = [0], [True]
        ends = [ROOT] * len(stops)  # node of the part of each stop that is built
        for depth in range(max(map(len, stops), default=0)):  # level by level: a link leads to a level above
            for index, stop in enumerate(stops):
                if depth >= len(stop):
                    continue
                parent, key = ends[index], ends[index] * _CHARS + ord(stop[depth])
                node = self._goto.get(key)
                if node is None:
                    link = ROOT if parent == ROOT else self.step(self._fail[parent], stop[depth])
                    node = self._goto[key] = len(self._fail)
                    self._fail.append(link)
                    self.matched.append(self.matched[link])
                    depths.append(depth + 1)
                    leaf.append(True)
                    leaf[parent] = False
                if depth + 1 == len(stop):
                    self.matched[node] = len(stop)
                ends[index] = node
        self.held = depths
        for node in range(1, len(depths)):  # nothing grows from a leaf, but something may from its suffix
            if leaf[node]:
                self.held[node] = self.held[self._fail[node]]

    def step(self, node: int, char: str) -> int:
        code = ord(char)
        while (target := self._goto.get(node * _CHARS + code)) is None:
            if node == ROOT:
                return ROOT
            node = self._fail[node]
        return target

    def idle(self, text: str) -> bool:
        """Whether no stop begins in ``text``."""
        return self._starts.isdisjoint(text)


class StopMatcher:
    """Passes text on, but holds back the longest suffix that may grow into a stop.

    ``stops`` must not hold the empty string. Once ``stopped``, nothing more may be pushed.
    """

    def __init__(self, stops: Sequence[str]):
        self._automaton = StopAutomaton(stops) if stops else None
        self._node = ROOT
        self._held = ""
        self.stopped = False

    def push(self, delta: str, *, armed: bool = True) -> str:
        """The text that is safe to show now; on a match the text before it, and ``stopped`` is set. Not
        ``armed``: a match that ends in ``delta`` does not count, one that only begins there may later."""
        automaton = self._automaton
        if automaton is None or (self._node == ROOT and automaton.idle(delta)):
            return delta
        text = self._held + delta
        for end in range(len(self._held) + 1, len(text) + 1):
            self._node = automaton.step(self._node, text[end - 1])
            if armed and (length := automaton.matched[self._node]):
                self.stopped = True
                self._held = ""
                return text[: end - length]
        safe = len(text) - automaton.held[self._node]
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The end of the text has come: what was held back is no stop."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> "StopMatcher":
        return copy(self)
