"""A group: one request in the loop, with the rows it runs in.

It says what to draw at the end of each row and takes what was drawn. What it shows of that goes to
the events; what becomes of the KV cache is done by ``Lanes``, the scheduler. Two kinds: choices, which
go their own ways after the prompt (choices.py), and beams, which go on together (beam_group.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from batching.grammar import GrammarCompiler
from batching.history import History
from batching.prefix import root
from batching.request import ServedModel
from batching.row import Row
from batching.runner import Draw, Drawn, RowOutput
from batching.sampling import seed_of
from promptmill.core.engine import GenRequest
from promptmill.core.jobs import Choice, FinishReason, Outcome, Priority, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Shown:
    """Tokens of a choice that may be published, and their text."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None


class Lanes(Protocol):
    """The KV cache of a group's rows."""

    def fork(self, parent: Row, child: Row) -> None:
        """``child`` gets what ``parent`` has in the cache."""

    def drop(self, row: Row) -> None:
        """Free what the row has in the cache."""


class Group(ABC):
    """``rows``: those that still run. ``number``: of its submit, ``admitted``: of its first admission, None before;
    groups are ordered by it. ``published``: tokens shown so far, all choices."""

    def __init__(self, request: GenRequest, served: ServedModel, compiler: GrammarCompiler | None):
        self.request = request
        self.sampling = request.sampling
        self.served = served
        self.id = request.id
        self.priority: Priority = request.priority
        self.seed = seed_of(request.id) if request.sampling.seed is None else request.sampling.seed
        self.number = 0
        self.admitted: int | None = None
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.overtaken = 0
        self.overtaken_at: float | None = None  # when it first was
        self.cached_tokens = 0  # of the prompt, found in the prefix cache
        self.prompt_scores: list[TokenLogprob] = []  # of the prompt's tokens from the second on
        self._ends = frozenset(served.card.eos_token_ids)
        self._stops = self._ends.union(self.sampling.stop_token_ids)
        self._banned_early = tuple(sorted(self._stops))  # before min_tokens
        self._banned_later = tuple(sorted(self._ends)) if self.sampling.ignore_eos else ()
        self._compiler = compiler
        self.rows: list[Row] = self._first_rows()
        self.published = sum(map(len, request.generated))

    @property
    @abstractmethod
    def width(self) -> int:
        """Rows of the engine's that the group takes, or may come to take."""

    @property
    def length(self) -> int:
        """Tokens of its longest row."""
        return max((len(row.tokens) for row in self.rows), default=0)

    @property
    def done(self) -> bool:
        return not self.rows

    @abstractmethod
    def draws(self, row: Row) -> tuple[Draw, ...]:
        """What to draw once all tokens of ``row`` are in the cache."""

    @abstractmethod
    def take(self, row: Row, drawn: Sequence[Drawn], lanes: Lanes) -> list[Shown]:
        """Go on with what was drawn at the end of ``row``. Raises GrammarError, or what a tokenizer raises."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """What has been shown; choices that have not ended are cancelled."""

    @property
    @abstractmethod
    def generated(self) -> tuple[tuple[int, ...], ...]:
        """What another run can go on from: GenRequest.generated."""

    def note_scores(self, row: Row, output: RowOutput) -> None:
        """Keep the scores of known tokens, in their order: the prompt's, then those of an earlier run."""
        for score in output.scores:
            if row.scored < row.prompt:
                self.prompt_scores.append(_cut(score, self.sampling.prompt_logprobs))
            else:
                row.logprobs.append(_cut(score, self.sampling.logprobs))
            row.scored += 1

    @abstractmethod
    def _first_rows(self) -> list[Row]: ...

    def _row(self, choice: int, generated: Sequence[int] = ()) -> Row:
        """Raises GrammarError when the grammar does not allow what was generated."""
        sampling, prompt = self.sampling, self.request.prompt_ids
        row = Row(
            choice,
            [*prompt],
            len(prompt),
            root(self.request.tenant, self.request.model),
            top=max(sampling.prompt_logprobs or 0, sampling.logprobs or 0),
        )
        if sampling.penalised:
            row.history = History(prompt)
        if sampling.grammar is not None:
            assert self._compiler is not None, "checked at submit"
            row.matcher = self._compiler.matcher(sampling.grammar)
        for token in generated:
            row.add(token, ends=token in self._stops)
        row.scored = 1 if choice == 0 and sampling.prompt_logprobs is not None else len(prompt)
        row.score_until = len(row.tokens) if sampling.logprobs is not None else len(prompt)
        return row

    def _draw(self, row: Row, choice: int, candidates: int = 0) -> Draw:
        sampling = self.sampling
        return Draw(
            sampling,
            self.seed,
            row.position,
            choice,
            self._banned_early if row.position < sampling.min_tokens else self._banned_later,
            None if row.matcher is None else row.matcher.mask_later(),
            row.history,
            candidates,
        )

    def _is_end(self, token: int) -> bool:
        """An end token is one unless told to be ignored; under a grammar it comes only where nothing else can."""
        if token in self._ends:
            return not self.sampling.ignore_eos or self.sampling.grammar is not None
        return token in self._stops

    def _outcome(self, choices: tuple[Choice, ...]) -> Outcome:
        usage = Usage(len(self.request.prompt_ids), sum(len(choice.token_ids) for choice in choices), self.cached_tokens)
        scored = self.sampling.prompt_logprobs is not None and len(self.prompt_scores) == len(self.request.prompt_ids) - 1
        return Outcome(choices, usage, (None, *self.prompt_scores) if scored else None)


def _cut(score: TokenLogprob, top: int | None) -> TokenLogprob:
    """A row that scores prompt and output asks for the larger number of alternatives."""
    return TokenLogprob(score.logprob, score.top[: top or 0])
