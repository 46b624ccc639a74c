"""Constrained output: which tokens may come next so that the text matches a grammar.

GrammarCompiler is the implementation by llguidance (https://github.com/guidance-ai/llguidance), an
Earley parser over lexers of derivatives. Masks are computed on a thread of their own, with Python's
lock released, while the model computes the step that they are for.
"""

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from batching.grammar_source import GrammarError, to_lark
from batching.runner import Words
from promptmill.core.jobs import Grammar

__all__ = ["GrammarBackend", "GrammarCompiler", "GrammarError", "Matcher"]

T = TypeVar("T")
MAX_MESSAGE = 300

# Limits of one grammar: 1-2 kB per lexer state. Large lexemes are not run over the whole vocabulary
# at compile time, where no limit holds.
# What a row may hold and a mask may cost: large schemas fit (500 properties, 200 alternatives), and what
# would keep a step waiting for tenths of a second is too complex.
_LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    step_max_items=3_000,
    step_lexer_fuel=20_000,
    max_lexer_states=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
WALKS, WALK_TOKENS = 3, 4  # tokens that ``check`` tries to go on with, and how far


class Matcher(Protocol):
    """The place of one text in its grammar. For one thread; what it computes aside is its own affair."""

    def mask(self) -> Words:
        """Ids that may come next: ceil(vocab / 32) words. An end token is allowed exactly where the text may
        end. Not to be written to. Raises GrammarError: nothing may follow, or it is too costly to tell."""

    def mask_later(self) -> Callable[[], Words]:
        """Start to compute ``mask``; what is returned waits for it, from any thread, and raises as it does."""

    def advance(self, token: int) -> None:
        """The text goes on with ``token``. Raises GrammarError if it does not fit; the matcher is then spent."""

    @property
    def stopped(self) -> bool:
        """The text is complete: nothing but its end can follow."""

    def fork(self) -> "Matcher": ...


class GrammarBackend(Protocol):
    """Thread-safe."""

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError for what cannot be compiled, or matches no text at all."""

    def matcher(self, grammar: Grammar, generated: Sequence[int] = ()) -> Matcher:
        """A matcher behind the tokens that were generated already. Raises GrammarError."""

    def close(self) -> None: ...


class GrammarCompiler:
    """For one model's vocabulary. What it costs (0.2 s and some 50 MB for 49 000 ids) comes with the
    first grammar. ``vocab_size``: ids that the model has logits for; it may have more than the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if tokenizer.id_to_token(token) is not None]
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # its thread starts with the first mask

    def check(self, grammar: Grammar) -> None:
        self._compile(grammar).walk()

    def matcher(self, grammar: Grammar, generated: Sequence[int] = ()) -> Matcher:
        matcher = self._compile(grammar)
        for token in generated:
            matcher.advance(token)
        return matcher

    def close(self) -> None:
        """End the thread, after the masks that were asked for."""
        self._masks.shutdown(wait=False)

    def _compile(self, grammar: Grammar) -> "_LlMatcher":
        text, tokenizer = to_lark(grammar), self._opened()
        compiled = _guarded(lambda: LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS))
        if compiled.is_error():
            raise GrammarError(_reason(compiled.get_error()))
        return _LlMatcher(compiled, self._vocab_size, self._masks)

    def _opened(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                size = max(self._vocab_size, self._source.get_vocab_size())
                self._tokenizer = _guarded(lambda: LLTokenizer(self._source.to_str(), n_vocab=size, eos_token=self._eos))
            return self._tokenizer


class _LlMatcher:
    def __init__(self, matcher: LLMatcher, vocab_size: int, masks: ThreadPoolExecutor, mask: Future[Words] | None = None):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._masks = masks
        self._mask = mask  # of the present place

    def mask(self) -> Words:
        return self.mask_later()()

    def mask_later(self) -> Callable[[], Words]:
        if self._mask is None:
            self._mask = self._masks.submit(self.compute)
        return self._mask.result

    def compute(self) -> Words:
        data = _guarded(self._matcher.compute_bitmask)
        self._hold()
        words = np.frombuffer(data, np.uint32)[: (self._vocab_size + 31) // 32].copy()
        if over := self._vocab_size % 32:
            words[-1] &= np.uint32((1 << over) - 1)
        if not words.any():
            raise GrammarError("no token of the model can go on in the grammar")
        return words

    def walk(self) -> None:
        """Go on a little in a few ways, so that what the first tokens would show is seen now. Raises GrammarError."""
        allowed = np.flatnonzero(np.unpackbits(self.compute().view(np.uint8), bitorder="little"))
        for first in allowed[np.linspace(0, len(allowed) - 1, WALKS).astype(int)]:
            ahead, token = _LlMatcher(_guarded(self._matcher.deep_copy), self._vocab_size, self._masks), int(first)
            for count in range(1, WALK_TOKENS + 1):
                ahead.advance(token)
                if ahead.stopped:
                    break
                following = np.flatnonzero(np.unpackbits(ahead.compute().view(np.uint8), bitorder="little"))
                token = int(following[count * len(following) // (WALK_TOKENS + 1)])

    def advance(self, token: int) -> None:
        self._settle()
        self._mask = None
        if not _guarded(lambda: self._matcher.consume_token(token)):
            self._hold()
            raise GrammarError(f"token {token} does not fit the grammar")

    @property
    def stopped(self) -> bool:
        self._settle()
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fork(self) -> Matcher:
        self._settle()
        self._hold()
        return _LlMatcher(_guarded(self._matcher.deep_copy), self._vocab_size, self._masks, self._mask)

    def _hold(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher.get_error()))

    def _settle(self) -> None:
        """llguidance's matcher is not to be touched while another thread computes its mask."""
        if self._mask is not None:
            self._mask.exception()


def _guarded(call: Callable[[], T]) -> T:
    """llguidance promises not to raise; a panic of it would come as a BaseException."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise GrammarError(_reason(str(error))) from error


def _reason(report: str) -> str:
    """The one line of llguidance's report that says what is wrong."""
    if report.startswith(("NoExtension", "InternalError")):
        return "nothing can match the grammar from here on"
    if report.startswith(("ParserTooComplex", "LexerTooComplex")) or "too many" in report.lower():
        return "the grammar is too complex"
    regex = re.search(r"^error: (.+)$", report, re.MULTILINE)
    line = f"invalid regex: {regex[1]}" if regex else report.split("\n", 1)[0]
    line = re.sub(r"^(at )?(\d+\(\d+\): )?(failed to compile JSON schema: )?", "", line)
    return line.replace("Unimplemented keys", "unsupported keywords")[:MAX_MESSAGE] or "llguidance cannot use the grammar"
