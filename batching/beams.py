"""Beam search for one prompt: which continuations live on, and which are finished texts.

It decides as ``generate(num_beams=width, do_sample=False)`` of transformers does (its
generation/utils.py, ``_beam_search``), but adds in double precision and breaks ties by (parent, id).
Nothing here knows of logits or of the KV cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from promptmill.core.jobs import Beam, FinishReason


@dataclass(frozen=True, slots=True)
class Extension:
    """A beam of the next step: beam ``parent`` of this step with ``token`` behind it."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class LiveBeam:
    """``logprob``: the sum over ``token_ids``."""

    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text, with its end token if it has one. ``score``: sum(logprobs) / tokens ** length_penalty."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason


class BeamSearch:
    """``live``: the beams that go on, best first; at first the prompt alone, none once the search is ``done``.

    ``candidates``: how many next tokens each beam must bring, so that ``width`` of them are no end tokens.
    """

    def __init__(self, beam: Beam, n: int, max_tokens: int, end_token_ids: frozenset[int]):
        """Raises ValueError for what no search can give."""
        if not 1 <= n <= beam.width or max_tokens < 1:
            raise ValueError("a search of some width gives at most so many texts, each of at least one token")
        self.candidates = max(2 * beam.width, beam.width + len(end_token_ids))
        self.live = [LiveBeam((), 0.0)]
        self.done = False
        self._beam = beam
        self._max_tokens = max_tokens
        self._ends = end_token_ids
        self._finished: list[Hypothesis] = []  # the best ``width``, best first

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Extension]:
        """Take the best next tokens (id, logprob) of each live beam; the beams of the next step, in order.

        A beam that brings none is a dead end. Returns nothing once the search is done.
        """
        ranked = sorted(
            (-beam.logprob - logprob, parent, token)
            for parent, (beam, following) in enumerate(zip(self.live, candidates, strict=True))
            for token, logprob in following
        )
        length = len(self.live[0].token_ids) + 1
        extensions: list[Extension] = []
        live: list[LiveBeam] = []
        for rank, (cost, parent, token) in enumerate(ranked):
            ends = token in self._ends
            if ends or length == self._max_tokens:
                if rank < self._beam.width:  # an end token below the best ``width`` is dropped, as transformers does
                    self._finish((*self.live[parent].token_ids, token), -cost, "stop" if ends else "length")
            elif len(live) < self._beam.width:
                extensions.append(Extension(parent, token))
                live.append(LiveBeam((*self.live[parent].token_ids, token), -cost))
        self.done = not live or self._settled(live[0].logprob, length)
        self.live = [] if self.done else live
        return [] if self.done else extensions

    def best(self, n: int) -> list[Hypothesis]:
        """The ``n`` best finished texts, best first; fewer where a grammar does not allow so many."""
        return self._finished[:n]

    def _finish(self, token_ids: tuple[int, ...], logprob: float, reason: FinishReason) -> None:
        self._finished.append(Hypothesis(token_ids, self._score(logprob, len(token_ids)), reason))
        self._finished.sort(key=lambda found: -found.score)  # stable: of equal ones the earlier stays ahead
        del self._finished[self._beam.width :]

    def _settled(self, best: float, length: int) -> bool:
        """Whether no more is looked for. ``best``: the best live sum; that its score cannot grow with the length
        is true for a penalty of 0 only, but it is the rule."""
        if len(self._finished) < self._beam.width:
            return False
        return self._beam.early_stopping or self._score(best, length) <= self._finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._beam.length_penalty)
