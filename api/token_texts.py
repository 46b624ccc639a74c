"""What a token stands for: its bytes, and the name that it has in lists of logprobs.

A token may be a part of a character, so that it has bytes but no text of its own. Names are those of
OpenAI: the text, or ``bytes:\\xf0\\x9f`` where the bytes are not UTF-8.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class TokenTexts:
    """Thread-safe. Remembers what it was asked, at most the vocabulary: a large answer asks half a million times."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = set(_kinds(tokenizer))
        self._byte_level = "ByteLevel" in kinds
        self._raw: dict[int, bytes | None] = {}
        self._names: dict[int, str] = {}
        self._pieces = bool(kinds & {"ByteFallback", "Metaspace", "Replace"})

    def raw(self, token_id: int) -> bytes | None:
        """The token's bytes, of a special token its spelling; None for an id without a token."""
        if token_id not in self._raw:
            self._raw[token_id] = self._find(token_id)
        return self._raw[token_id]

    def name(self, token_id: int) -> str:
        if token_id not in self._names:
            self._names[token_id] = named(token_id, self.raw(token_id))
        return self._names[token_id]

    def names(self, token_ids: Iterable[int]) -> dict[int, str]:
        """By id, no two alike: of tokens that look the same all but the first are named by id."""
        found: dict[int, str] = {}
        taken: set[str] = set()
        for token_id in token_ids:
            if token_id not in found:
                name = self.name(token_id)
                found[token_id] = by_id(token_id) if name in taken else name
                taken.add(found[token_id])
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text with its special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def offsets(self, token_ids: Sequence[int], *, special: bool) -> list[int]:
        """Where each token's text begins, in characters, and the length of all. A token inside of a
        character begins where the character does. ``special``: special tokens are part of the text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found, length = [], 0
        for token_id in token_ids:
            found.append(length)
            if special or token_id not in self._special:
                length += len(decoder.decode(self.raw(token_id) or b""))
        return [*found, length + len(decoder.decode(b"", True))]

    def _find(self, token_id: int) -> bytes | None:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_level and all(letter in _BYTE_OF for letter in token):
            return bytes(_BYTE_OF[letter] for letter in token)
        if self._pieces:
            byte = _BYTE.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token_id]).encode()


def named(token_id: int, raw: bytes | None) -> str:
    if not raw:
        return by_id(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _kinds(tokenizer: Tokenizer) -> list[str]:
    """The types of the tokenizer's decoder and of its parts."""
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [part["type"] for part in (state, *state.get("decoders", ()))]


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies spell bytes with (GPT-2's ``bytes_to_unicode``)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return {**letters, **{chr(256 + at): byte for at, byte in enumerate(others)}}


_BYTE_OF = _byte_alphabet()
