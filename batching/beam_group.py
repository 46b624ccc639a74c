"""The rows of a beam search: they go on together, and show nothing until the search has ended."""

from collections.abc import Sequence

from batching.beams import BeamSearch
from batching.grammar import GrammarCompiler, GrammarError
from batching.group import Group, Lanes, Shown
from batching.request import ServedModel
from batching.row import Row
from batching.runner import Draw, Drawn
from batching.text import RowText
from promptmill.core.engine import GenRequest
from promptmill.core.jobs import Beam, Choice, Outcome


class Beams(Group):
    """One row for the prompt, then one per live beam. ``beam``: of the request's sampling."""

    def __init__(self, request: GenRequest, served: ServedModel, compiler: GrammarCompiler | None, beam: Beam):
        super().__init__(request, served, compiler)
        sampling = request.sampling
        ends = self._stops.difference(self._ends) if sampling.ignore_eos and not sampling.grammar else self._stops
        self._search = BeamSearch(beam, sampling.n, sampling.max_tokens, ends)
        self._heard: dict[int, Sequence[tuple[int, float]]] = {}  # beam -> its best next tokens
        self._choices: tuple[Choice, ...] = ()

    @property
    def width(self) -> int:
        """A search that a grammar has made narrow may become wide again."""
        return self.sampling.width

    def draws(self, row: Row) -> tuple[Draw, ...]:
        return (self._draw(row, row.choice, self._search.candidates),)

    def take(self, row: Row, drawn: Sequence[Drawn], lanes: Lanes) -> list[Shown]:
        """Rows that come to their end one by one, as after a pause, wait for each other."""
        self._heard[row.choice] = drawn[0].candidates
        row.waits = True
        if len(self._heard) < len(self.rows):
            return []
        parents, extensions = self.rows, self._search.advance([self._heard[row.choice] for row in self.rows])
        children = [parents[extension.parent].fork(beam) for beam, extension in enumerate(extensions)]
        for child, extension in zip(children, extensions, strict=True):
            child.add(extension.token)
        self._heard = {}
        self._inherit(parents, children, [extension.parent for extension in extensions], lanes)
        self.rows = children
        return self._tell() if self._search.done else []

    def _inherit(self, parents: Sequence[Row], children: Sequence[Row], parent_of: Sequence[int], lanes: Lanes) -> None:
        """The first child of a parent gets its place in the cache, the others a fork of it."""
        heirs: dict[int, Row] = {}
        for child, index in zip(children, parent_of, strict=True):
            parent = parents[index]
            if index in heirs:
                lanes.fork(parent, child)
            else:
                heirs[index] = child
                child.table, child.digests, child.past = parent.table, parent.digests, parent.past
        for index, parent in enumerate(parents):
            if index not in heirs:
                lanes.drop(parent)

    def outcome(self) -> Outcome:
        return self._outcome(self._choices or tuple(Choice(index, "", (), "cancelled") for index in range(self.sampling.n)))

    @property
    def generated(self) -> tuple[tuple[int, ...], ...]:
        """Nothing: a search starts again."""
        return ()

    def _first_rows(self) -> list[Row]:
        return [self._row(0)]

    def _tell(self) -> list[Shown]:
        choices = []
        for index, found in enumerate(self._search.best(self.sampling.n)):
            text = RowText(self.served.tokenizer, self.request.prompt_ids, ())
            shown = "".join(text.push(token) for token in found.token_ids if not self._is_end(token))
            choices.append(Choice(index, shown + text.finish(), tuple(found.token_ids), found.reason))
        if not choices:
            raise GrammarError("the search found no text that the grammar allows")
        self._choices = tuple(choices)
        return [Shown(choice.index, choice.token_ids, choice.text, choice.finish_reason) for choice in choices]
