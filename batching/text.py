"""From token ids to text, piece by piece: incremental detokeniser, then stop matcher.

What a stream shows, put together, equals ``whole_text`` cut by the stops, for every tokenizer
whose decoder is a concatenation (byte-level BPE); the tests hold this by property. Special tokens
are skipped in both.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from batching.stops import StopMatcher

PRIMING_IDS = 6  # enough to hold any character that is spread over tokens
REPLACEMENT = "\ufffd"


def priming(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The last ids of the prompt, to be decoded before the output: llama-style decoders drop the
    space in front of the first token they see. None of them when the prompt ends inside a
    character: the first piece would show the prompt's text again (vllm#48853)."""
    ids = list(prompt_ids[-PRIMING_IDS:])
    return [] if tokenizer.decode(ids).endswith(REPLACEMENT) else ids


def whole_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The text of the output ``ids`` behind the prompt, decoded at once; the definition."""
    prime = priming(tokenizer, prompt_ids)
    before, text = tokenizer.decode(prime), tokenizer.decode([*prime, *ids])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(list(ids))


class Detokenizer:
    """tokenizers' DecodeStream with guards against its traps."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._prime = priming(tokenizer, prompt_ids)
        self._stream = self._open(self._prime)
        self._ids: list[int] = []
        self._shown: list[str] = []
        self._pending: list[int] = []  # ids since the last piece of text

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes, often "" inside a character."""
        self._ids.append(token_id)
        self._pending.append(token_id)
        piece = self._step(token_id)
        if not piece:
            return ""
        self._pending.clear()
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

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:  # "Invalid prefix encountered", a bare Exception (tokenizers#1705): restart with what is pending
            self._stream = self._open([])
            return self._stream.step(self._tokenizer, self._pending)

    def _open(self, ids: list[int]) -> DecodeStream:
        return DecodeStream(ids=ids, skip_special_tokens=True)


class RowText:
    """The text of one row: what may be shown after each token, and ``shown`` in all."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str]):
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stops)
        self._shown: list[str] = []

    @property
    def stopped(self) -> bool:
        """A stop string has matched; the text is complete."""
        return self._matcher.stopped

    @property
    def shown(self) -> str:
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        return self._show(self._matcher.push(self._detokenizer.push(token_id)))

    def finish(self) -> str:
        """No token follows: the rest of the text, "" after a stop. The tail may complete a stop too."""
        if self.stopped:
            return ""
        rest = self._matcher.push(self._detokenizer.finish())
        return self._show(rest + self._matcher.flush())

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
