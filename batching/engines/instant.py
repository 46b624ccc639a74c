"""The instant engine's runner: no weights, yet every promise of a real one.

A token is a pure function of (all tokens before it, seed, choice), drawn from the plain words of
the model's own vocabulary, so texts are readable and exactly ``max_tokens`` long unless a stop hits.
Its KV cache is a real one: for each token the hash of the row up to it, read through the row's
table, so that a wrongly shared, copied or reused block gives a wrong text here too.
The whole system runs on it in tests, demonstrations and benchmarks of the queue.
"""

from collections.abc import Mapping, Sequence
from threading import Event

import numpy as np

from batching.options import EngineOptions
from batching.request import ServedModel
from batching.runner import BLOCK_TOKENS, Draw, Drawn, RowError, RowOutput, RowResult, RowWork
from batching.sampling import mix64
from promptmill.core.engine import Capabilities
from promptmill.core.errors import ConfigError

DEFAULT_ROWS = 32
TOKEN_BYTES = 8
WORD_STARTS = ("Ġ", "▁")  # how byte-level and SentencePiece vocabularies spell the space before a word
_GAMMA = 0x9E3779B97F4A7C15  # odd, so that different tokens always give different addends


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
    """``promptmill``'s Runner over the words of several models; ``RowWork.model`` says which.

    temperature, top_p and top_k only tell greedy requests from others: there is no distribution to cut. A
    greedy request, and one without a seed, draws as one with seed 0.
    """

    caps = Capabilities(
        top_logprobs=None,
        prompt_logprobs=False,
        logit_bias=False,
        min_p=False,
        penalties=False,
        grammar=False,
        beam=False,
        batch_invariant=True,
    )
    block_bytes = BLOCK_TOKENS * TOKEN_BYTES

    def __init__(self, models: Mapping[str, ServedModel], options: EngineOptions):
        cards = [served.card for served in models.values()]
        self.context_length = max(card.context_length for card in cards)
        self.vocab_size = max(card.vocab_size for card in cards)
        self.rows = options.rows or DEFAULT_ROWS
        self.blocks = self._block_count(options)
        self._kv = np.zeros((self.blocks, BLOCK_TOKENS), np.uint64)
        self._words = {name: word_ids(served) for name, served in models.items()}
        self._step_s = options.instant_step_s
        self._never = Event()

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        if self._step_s:
            self._never.wait(self._step_s)
        return [self._run(work) for work in rows]

    def copy(self, source: int, target: int) -> None:
        self._kv[target] = self._kv[source]

    def wipe(self, blocks: Sequence[int]) -> None:
        self._kv[list(blocks)] = 0

    def _block_count(self, options: EngineOptions) -> int:
        """The whole context for every row, and as much again for the prefix cache; fewer if the budget says so."""
        most = 2 * (self.rows + options.reserved_rows) * -(-self.context_length // BLOCK_TOKENS)
        budget = options.kv_cache_bytes // self.block_bytes
        return max(1, min(most, budget)) if options.kv_cache_bytes else most

    def _run(self, work: RowWork) -> RowResult:
        state = self._hash_before(work)
        hashes = []
        for token in work.token_ids:
            state = mix64(state + (token + 1) * _GAMMA)
            hashes.append(state)
        self._write(work, hashes)
        drawn: list[Drawn] = []
        for draw in work.draws:
            word = self._draw(draw, state, self._words[work.model])
            if word is None:
                return RowError("no_token_left", "the request forbids every token that this engine could draw")
            drawn.append(Drawn(word))
        return RowOutput(tuple(drawn))

    def _hash_before(self, work: RowWork) -> int:
        if not work.past:
            return 0
        block, offset = divmod(work.past - 1, BLOCK_TOKENS)
        return int(self._kv[work.table[block], offset])

    def _write(self, work: RowWork, hashes: Sequence[int]) -> None:
        values = np.array(hashes, np.uint64)
        done = 0
        while done < len(values):
            block, offset = divmod(work.past + done, BLOCK_TOKENS)
            part = values[done : done + BLOCK_TOKENS - offset]
            self._kv[work.table[block], offset : offset + len(part)] = part
            done += len(part)

    def _draw(self, draw: Draw, state: int, words: Sequence[int]) -> int | None:
        sampling = draw.sampling
        seed, choice = (0, 0) if sampling.greedy else (draw.seed, draw.choice)
        if sampling.seed is None:
            seed = 0
        number = mix64(mix64(state ^ mix64(seed)) + choice)
        first = number * len(words) >> 64
        if words[first] not in draw.banned:
            return words[first]
        allowed = [word for word in words if word not in draw.banned]
        return allowed[number * len(allowed) >> 64] if allowed else None
