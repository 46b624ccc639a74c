"""Random ways through a grammar, by the masks of its matcher."""

import random

import numpy as np
from tokenizers import Tokenizer

from batching.grammar import Matcher
from batching.runner import Words
from tests.support.engine import EOS, tiny_tokenizer

VOCAB = 410  # more than the tokenizer knows, as models have it
PATIENCE = 60  # tokens until a walk looks for the end
CLOSERS = ('"', "}", "]", "0", "e", ": ", ":", ", ", ",", " ", "a")


def allowed(words: Words, vocab: int = VOCAB) -> list[int]:
    return np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab])[0].tolist()


def step(ids: list[int], tokens: int, rng: random.Random, tokenizer: Tokenizer, eos: int = EOS) -> int:
    """Any of ``ids``; after a while one that leads to the end."""
    if tokens < PATIENCE:
        return rng.choice(ids)
    if eos in ids:
        return eos
    texts = {tokenizer.decode([token]): token for token in ids}
    return next((texts[closer] for closer in CLOSERS if closer in texts), rng.choice(ids))


def walk(matcher: Matcher, rng: random.Random, tokens: int = 0) -> list[int]:
    """Ids of a random way through the grammar to its end."""
    ids: list[int] = []
    while tokens + len(ids) < 10 * PATIENCE:
        token = step(allowed(matcher.mask()), tokens + len(ids), rng, tiny_tokenizer())
        if token == EOS:
            return ids
        matcher.advance(token)
        ids.append(token)
        if matcher.stopped:
            assert allowed(matcher.mask()) == [EOS]
            return ids
    raise AssertionError(f"no end: {tiny_tokenizer().decode(ids)}")
