"""A row: one sequence of tokens in the KV cache, a choice of a request or one of its beams.

The scheduler owns what lies in the cache (``table``, ``digests``, ``past``, ``scored``); the group
owns the rest. All of it but the cache follows from the token ids, so a row can lose its cache and
be computed again, here or on another worker.
"""

from dataclasses import dataclass, field

from batching.grammar import Matcher
from batching.history import History
from batching.text import RowText
from promptmill.core.jobs import TokenLogprob


@dataclass(slots=True, eq=False)
class Row:
    """``tokens``: prompt and output; the first ``prompt`` of them are the prompt. ``past``: how many are in
    the cache, in the blocks of ``table``. ``digests``: names of the table's first blocks in the prefix cache,
    which all grow from ``root``.

    Tokens from index ``scored`` up to ``score_until`` are yet to be scored, with ``top`` alternatives.
    ``waits``: nothing is to be computed until the group goes on.
    """

    choice: int
    tokens: list[int]
    prompt: int
    root: bytes
    history: History | None = None
    matcher: Matcher | None = None
    text: RowText | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    past: int = 0
    scored: int = 1
    score_until: int = 1
    top: int = 0
    waits: bool = False
    token_at: float | None = None  # when the last token came

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def position(self) -> int:
        """Index in the output of the token that comes next."""
        return len(self.tokens) - self.prompt

    @property
    def pending(self) -> int:
        """Tokens that are yet to be computed."""
        return len(self.tokens) - self.past

    @property
    def decoding(self) -> bool:
        """All but the token drawn last is in the cache."""
        return self.past >= self.prompt and self.pending == 1

    @property
    def unscored(self) -> bool:
        return self.scored < self.score_until

    def add(self, token: int, *, ends: bool = False) -> None:
        """Append a drawn token. Raises GrammarError for one that the grammar does not allow; a token that
        ``ends`` the text is no part of it."""
        self.tokens.append(token)
        if self.history is not None:
            self.history.add(token)
        if self.matcher is not None and not ends:
            self.matcher.advance(token)

    def fork(self, choice: int) -> "Row":
        """A row with the same tokens, and as yet nothing in the cache."""
        return Row(
            choice,
            list(self.tokens),
            self.prompt,
            self.root,
            None if self.history is None else self.history.fork(),
            None if self.matcher is None else self.matcher.fork(),
            None if self.text is None else self.text.fork(),
            list(self.logprobs),
            scored=self.scored,
            score_until=self.scored,
            top=self.top,
            token_at=self.token_at,
        )
