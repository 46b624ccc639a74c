"""The tokens of a row as penalties see them."""

from collections import Counter
from collections.abc import Iterable


class History:
    """``prompt``: ids that occur in the prompt. ``output``: how often each id occurs in the output."""

    __slots__ = ("output", "prompt")

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()):
        self.prompt = frozenset(prompt)
        self.output = Counter(output)

    def add(self, token: int) -> None:
        self.output[token] += 1

    def fork(self) -> "History":
        copy = History((), self.output)
        copy.prompt = self.prompt
        return copy
