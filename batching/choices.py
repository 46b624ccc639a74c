"""The choices of a request: one text or several, each drawn for itself, of one prompt."""

from collections.abc import Sequence

from batching.group import Group, Lanes, Shown
from batching.row import Row
from batching.runner import Draw, Drawn
from batching.text import RowText
from promptmill.core.jobs import Choice, FinishReason, Outcome


class Choices(Group):
    """``n`` of them. With max_tokens 0 nothing is drawn: the prompt is only scored."""

    _spread: bool  # the choices have their rows; before, one computes the prompt for all
    _all: list[Row]  # by choice, also those that have ended
    _reasons: dict[int, FinishReason]  # of those that have ended

    @property
    def width(self) -> int:
        return len(self.rows) if self._spread else self.sampling.n

    def draws(self, row: Row) -> tuple[Draw, ...]:
        if self.sampling.max_tokens == 0 or row.choice in self._reasons:
            return ()
        choices = [row.choice] if self._spread else range(self.sampling.n)
        return tuple(self._draw(row, choice) for choice in choices)

    def take(self, row: Row, drawn: Sequence[Drawn], lanes: Lanes) -> list[Shown]:
        rows = [row]
        if not self._spread:
            self._spread = True
            for choice in range(1, len(drawn)):
                child = row.fork(choice)
                lanes.fork(row, child)
                rows.append(child)
            self.rows = self._all = rows
        if not drawn:
            self._end(row, self._reasons.get(row.choice, "length"), lanes)
            return []
        return [self._say(each, what, lanes) for each, what in zip(rows, drawn, strict=True)]

    def outcome(self) -> Outcome:
        wanted = self.sampling.logprobs is not None
        begun = tuple(
            Choice(
                row.choice,
                row.text.shown if row.text else "",
                tuple(row.output),
                self._reasons.get(row.choice, "cancelled"),
                tuple(row.logprobs) if wanted else None,
            )
            for row in self._all
        )
        unborn = range(len(begun), self.sampling.n)  # the prompt was not done
        return self._outcome(begun + tuple(Choice(index, "", (), "cancelled", () if wanted else None) for index in unborn))

    @property
    def generated(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row.output) for row in self._all)

    def _first_rows(self) -> list[Row]:
        """One row for the prompt; all of them when an earlier run has told them apart already. A row that has
        ended there runs only if its tokens are yet to be scored."""
        generated = self.request.generated
        self._reasons = {}
        self._spread = self.sampling.n == 1 or any(generated)
        count = self.sampling.n if self._spread else 1
        self._all = [self._row(choice, generated[choice] if choice < len(generated) else ()) for choice in range(count)]
        for row in self._all:
            row.text = RowText(
                self.served.tokenizer,
                self.request.prompt_ids,
                self.sampling.stop,
                min_tokens=self.sampling.min_tokens,
                generated=[token for token in row.output if not self._is_end(token)],
            )
            if row.position and (reason := self._reason_at(row)) is not None:
                row.text.finish()
                self._reasons[row.choice] = "stop" if row.text.stopped else reason  # the tail may complete a stop too
        return [row for row in self._all if row.choice not in self._reasons or row.unscored]

    def _reason_at(self, row: Row) -> FinishReason | None:
        """Why the row ends with its last token, if it does."""
        assert row.text is not None
        if self._is_end(row.tokens[-1]) or row.text.stopped or (row.matcher is not None and row.matcher.stopped):
            return "stop"
        return "length" if row.position >= self.sampling.max_tokens else None

    def _say(self, row: Row, drawn: Drawn, lanes: Lanes) -> Shown:
        ends = self._is_end(drawn.token)
        row.add(drawn.token, ends=ends)
        assert row.text is not None
        text = "" if ends else row.text.push(drawn.token)
        reason = self._reason_at(row)
        if reason is not None:
            text += row.text.finish()
            if row.text.stopped:  # the tail may complete a stop too
                reason = "stop"
            self._end(row, reason, lanes)
        if drawn.logprob is None:
            return Shown(row.choice, (drawn.token,), text, reason)
        row.logprobs.append(drawn.logprob)
        return Shown(row.choice, (drawn.token,), text, reason, (drawn.logprob,))

    def _end(self, row: Row, reason: FinishReason, lanes: Lanes) -> None:
        self._reasons[row.choice] = reason
        self.rows = [other for other in self.rows if other is not row]
        lanes.drop(row)
