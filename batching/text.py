"""From token ids to text, piece by piece: incremental detokeniser, then stop matcher.

What a stream shows, put together, equals ``whole_text`` cut by the stops, for every tokenizer
whose decoder is a concatenation (byte-level BPE); the tests hold this by property. Decoders with byte
fallback take back characters when bytes that are no character follow them; a stream cannot. Special
tokens are skipped in both.
"""

from collections.abc import Sequence
from copy import copy
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from batching.stops import StopMatcher

PRIMING_IDS = 6  # enough to hold any character that is spread over tokens
PENDING_IDS = 16  # more of them than any character has
REPLACEMENT = "\ufffd"


def priming(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The last ids of the prompt, to be decoded before the output: llama-style decoders drop the
    space in front of the first token they see. They must not begin or end inside a character (with byte
    fallback the one spoils the other); none when the prompt itself ends inside one: the first piece
    would show the prompt's text again (vllm#48853)."""
    for count in range(PRIMING_IDS, 0, -1):
        ids = list(prompt_ids[-count:])
        if not tokenizer.decode(ids).endswith(REPLACEMENT):
            return ids
    return []


def whole_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The text of the output ``ids`` behind the prompt, decoded at once; the definition."""
    prime = priming(tokenizer, prompt_ids)
    before, text = tokenizer.decode(prime), tokenizer.decode([*prime, *ids])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(list(ids))


@lru_cache(maxsize=64)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids without text."""
    return frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)


class Detokenizer:
    """tokenizers' DecodeStream with guards against its traps."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._prime = priming(tokenizer, prompt_ids)
        self._stream = self._open(self._prime)
        self._ids: list[int] = []
        self._shown: list[str] = []
        self._pending: list[int] = []  # ids since the last piece of text

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes, often "" inside a character."""
        if token_id in self._special:
            return ""  # a stream would keep the ids of a row of them and decode them all at each step
        self._ids.append(token_id)
        self._pending.append(token_id)
        piece = self._step(token_id)
        if piece:
            self._pending.clear()
        elif len(self._pending) > PENDING_IDS:
            piece = self._let_go()
        if not piece:
            return ""
        self._shown.append(piece)
        return piece

    def finish(self) -> str:
        """The tail: the stream keeps an incomplete character for ever, decoding shows it as U+FFFD."""
        if not self._pending:
            return ""
        shown, whole = "".join(self._shown), whole_text(self._tokenizer, self._prime, self._ids)
        if whole.startswith(shown):
            return whole[len(shown) :]
        return self._tokenizer.decode(self._pending)  # after a restart

    def fork(self) -> "Detokenizer":
        other = copy(self)
        other._stream = copy(self._stream)
        other._ids, other._shown, other._pending = [*self._ids], [*self._shown], [*self._pending]
        return other

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:  # "Invalid prefix encountered", a bare Exception (tokenizers#1705): restart with what is pending
            self._stream = self._open([])
            return self._stream.step(self._tokenizer, self._pending)

    def _let_go(self) -> str:
        """Bytes that are no character have piled up: the text of the first of them, where the rest begins
        anew. Without this they would be decoded again with each token, and shown at the end only."""
        whole = self._tokenizer.decode(self._pending)
        for cut in range(len(self._pending) - 1, len(self._pending) - PENDING_IDS // 2, -1):
            first, rest = self._pending[:cut], self._pending[cut:]
            text, tail = self._tokenizer.decode(first), self._tokenizer.decode(rest)
            if tail and text + tail == whole:
                self._stream, self._pending = self._open([]), rest
                self._stream.step(self._tokenizer, rest)
                return text
        return ""

    def _open(self, ids: list[int]) -> DecodeStream:
        return DecodeStream(ids=ids, skip_special_tokens=True)


class RowText:
    """The text of one row: what may be shown after each token, and ``shown`` in all.

    ``generated``: ids of an earlier run; what they let be shown counts as shown, what they held back comes
    with the next token. ``min_tokens``: no stop ends in the text of so many first tokens (as in vLLM).
    End tokens are not to be pushed; other special tokens have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        generated: Sequence[int] = (),
    ):
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._shown: list[str] = []
        for token_id in generated:
            if not self.stopped:
                self.push(token_id)

    @property
    def stopped(self) -> bool:
        """A stop string has matched; the text is complete."""
        return self._matcher.stopped

    @property
    def shown(self) -> str:
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        self._tokens += 1
        return self._show(self._match(self._detokenizer.push(token_id)))

    def finish(self) -> str:
        """No token follows: the rest of the text, "" after a stop. The tail may complete a stop too."""
        if self.stopped:
            return ""
        rest = self._match(self._detokenizer.finish())
        return self._show(rest + self._matcher.flush())

    def fork(self) -> "RowText":
        other = copy(self)
        other._detokenizer, other._matcher = self._detokenizer.fork(), self._matcher.fork()
        other._shown = [*self._shown]
        return other

    def _match(self, text: str) -> str:
        return self._matcher.push(text, armed=self._tokens > self._min_tokens)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
