from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from batching.text import Detokenizer, RowText, whole_text
from tests.support.engine import CORPUS, tiny_tokenizer
from tests.unit.test_stops import cut

VOCAB = tiny_tokenizer().get_vocab_size()
ids_st = st.lists(st.one_of(st.integers(0, VOCAB - 1), st.integers(0, 1)), max_size=24)
text_ids_st = st.text(alphabet=sorted(set(CORPUS)), max_size=20).map(lambda text: tiny_tokenizer().encode(text).ids)
stops_st = st.lists(st.text(alphabet=[*sorted(set(CORPUS)), "\ufffd"], min_size=1, max_size=3), max_size=3)


def stream(prompt: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer | None = None) -> str:
    detokenizer = Detokenizer(tokenizer or tiny_tokenizer(), prompt)
    return "".join([detokenizer.push(token) for token in ids]) + detokenizer.finish()


def llama_like() -> Tokenizer:
    """Byte fallback and a decoder that strips the first space, as llama's has it; ids 3.. are bytes."""
    vocab = {"<unk>": 0, "a": 1, "▁b": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def byte_ids(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


@given(ids_st, ids_st)
def test_any_ids_stream_to_the_text_of_one_decode(prompt: list[int], ids: list[int]) -> None:
    assert stream(prompt, ids) == whole_text(tiny_tokenizer(), prompt, ids)


@given(text_ids_st, text_ids_st, st.integers(0, 8))
def test_real_text_streams_whole_also_when_it_ends_inside_a_character(prompt: list[int], ids: list[int], drop: int) -> None:
    ids = ids[: max(0, len(ids) - drop)]
    assert stream(prompt, ids) == tiny_tokenizer().decode(ids)


@given(ids_st, st.one_of(ids_st, text_ids_st), stops_st)
def test_a_row_shows_the_whole_text_cut_at_its_stops(prompt: list[int], ids: list[int], stops: list[str]) -> None:
    row, pieces, used = RowText(tiny_tokenizer(), prompt, stops), [], []
    for token in ids:
        pieces.append(row.push(token))
        used.append(token)
        if row.stopped:
            break
    pieces.append(row.finish())
    assert "".join(pieces) == row.shown
    assert (row.shown, row.stopped) == cut(whole_text(tiny_tokenizer(), prompt, ids), stops)
    # no token too many: without the last one the stop had not matched (its tail apart)
    if row.stopped and len(used) > 1:
        assert not cut(whole_text(tiny_tokenizer(), prompt, used[:-1]).rstrip("\ufffd"), [s for s in stops if "\ufffd" not in s])[1]


def test_the_tail_of_a_truncated_character_is_shown_at_the_end() -> None:
    ids = tiny_tokenizer().encode("x😀").ids[:-1]
    detokenizer = Detokenizer(tiny_tokenizer(), ())
    assert "".join(detokenizer.push(token) for token in ids) == "x"
    assert detokenizer.finish() == tiny_tokenizer().decode(ids)[1:] != ""


def test_a_prompt_that_ends_inside_a_character_is_not_shown_again() -> None:
    ids = tiny_tokenizer().encode("secret 😀").ids
    shown = stream(ids[:-1], ids[-1:] + tiny_tokenizer().encode(" dog").ids)
    assert "secret" not in shown
    assert shown.endswith(" dog")


def test_a_first_token_keeps_its_space_behind_a_prompt() -> None:
    assert stream([1], [2, 1], llama_like()) == " ba"
    assert stream([], [2, 1], llama_like()) == "ba"


def test_a_stream_goes_on_after_an_invalid_prefix() -> None:
    """The fallback decoder takes back a character when a stray byte follows it."""
    ids = byte_ids("😀".encode()) + byte_ids(b"\xe2") + [1, 2]
    with pytest.raises(Exception, match="Invalid prefix"):
        raw = decoders.DecodeStream(skip_special_tokens=True)
        for token in ids:
            raw.step(llama_like(), token)
    assert stream([], ids, llama_like()) == "😀\ufffda b"
    assert stream([], [*ids, *byte_ids(b"\xe2")], llama_like()) == "😀\ufffda b\ufffd"


def test_special_tokens_are_not_shown() -> None:
    ids = tiny_tokenizer().encode("the fox").ids
    assert stream([], [1, *ids, 0, 1]) == "the fox"


def test_stop_tail_completes_a_stop() -> None:
    ids = tiny_tokenizer().encode("x😀").ids[:-1]
    row = RowText(tiny_tokenizer(), (), ("\ufffd",))
    for token in ids:
        row.push(token)
    row.finish()
    assert (row.shown, row.stopped) == ("x", True)
