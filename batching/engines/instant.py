"""The instant engine's runner: no weights, yet every promise of a real one.

A token is a pure function of (prompt ids, seed, position), drawn from the plain words of the
model's own vocabulary, so texts are readable and exactly ``max_tokens`` long unless a stop hits.
The whole system runs on it in tests, demonstrations and benchmarks of the queue.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from threading import Event

from batching.options import EngineOptions
from batching.request import ServedModel
from batching.runner import Draw, RowResult, RowWork
from batching.sampling import mix64, uniform
from promptmill.core.errors import ConfigError

DEFAULT_ROWS = 32
WORD_STARTS = ("Ġ", "▁")  # how byte-level and SentencePiece vocabularies spell the space before a word


def word_ids(served: ServedModel) -> tuple[int, ...]:
    """The ids of the vocabulary that are a space and ASCII letters; never a special or an end token.

    A vocabulary without such words gives all its ordinary ids. Raises ConfigError when it has none.
    """
    card, tokenizer = served.card, served.tokenizer
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    barred = special.union(card.eos_token_ids)
    ordinary = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i < card.vocab_size and i not in barred)
    words = tuple(i for i, token in ordinary if token.startswith(WORD_STARTS) and token[1:].isascii() and token[1:].isalpha())
    if not ordinary:
        raise ConfigError(f"the tokenizer of {card.name} has no ordinary tokens")
    return words or tuple(i for i, _ in ordinary)


class InstantRunner:
    """``promptmill``'s Runner over the words of several models; ``RowWork.model`` says which."""

    batch_invariant = True

    def __init__(self, models: Mapping[str, ServedModel], options: EngineOptions):
        cards = [served.card for served in models.values()]
        self.context_length = max(card.context_length for card in cards)
        self.vocab_size = max(card.vocab_size for card in cards)
        self.rows = options.rows or DEFAULT_ROWS
        self.kv_budget_bytes = self.kv_bytes(self.context_length) * (self.rows + options.reserved_rows)
        self._words = {name: word_ids(served) for name, served in models.items()}
        self._step_s = options.instant_step_s
        self._never = Event()
        # A running hash over all tokens of the row, output included: the same whether a prompt comes
        # in one chunk or many, and whether a token was drawn here or before a restart.
        self._hashes: dict[int, hashlib.blake2b] = {}

    def kv_bytes(self, tokens: int) -> int:
        """There is no KV; a byte per token keeps the accounting real."""
        return tokens

    def open(self, slot: int, tokens: int) -> None:
        self._hashes[slot] = hashlib.blake2b(digest_size=8)

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        if self._step_s:
            self._never.wait(self._step_s)
        return [self._run(work) for work in rows]

    def close(self, slot: int) -> None:
        del self._hashes[slot]

    def _run(self, work: RowWork) -> RowResult:
        row = self._hashes[work.slot]
        row.update(array("q", work.token_ids).tobytes())
        return None if work.draw is None else self._draw(work.draw, row.digest(), self._words[work.model])

    def _draw(self, draw: Draw, digest: bytes, words: Sequence[int]) -> int:
        sampling = draw.sampling
        seed = 0 if sampling.greedy or sampling.seed is None else draw.seed
        number = uniform(int.from_bytes(digest, "big") ^ mix64(seed), draw.position)
        return words[int(number * len(words))]
