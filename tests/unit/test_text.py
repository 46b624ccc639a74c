import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from batching.text import PENDING_IDS, Detokenizer, RowText, whole_text
from tests.support.engine import CORPUS, tiny_tokenizer
from tests.unit.test_stops import cut

VOCAB = tiny_tokenizer().get_vocab_size()
ids_st = st.lists(st.one_of(st.integers(0, VOCAB - 1), st.integers(0, 1)), max_size=24)
text_ids_st = st.text(alphabet=sorted(set(CORPUS)), max_size=20).map(lambda text: tiny_tokenizer().encode(text).ids)
emoji_ids_st = st.lists(st.sampled_from(["👩‍👩‍👧", "👍🏽", "e\u0301", "🇯🇵", "日", " ", "a"]), max_size=8).map(
    lambda parts: tiny_tokenizer().encode("".join(parts)).ids
)
any_ids_st = st.one_of(ids_st, text_ids_st, emoji_ids_st)
stops_st = st.lists(st.text(alphabet=[*sorted(set(CORPUS)), "\ufffd"], min_size=1, max_size=3), max_size=3)


def byte_characters() -> dict[int, str]:
    """GPT-2's alphabet: the character that stands for a byte; printable ones for themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


BYTES = byte_characters()


def stream(prompt: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer | None = None) -> str:
    detokenizer = Detokenizer(tokenizer or tiny_tokenizer(), prompt)
    return "".join([detokenizer.push(token) for token in ids]) + detokenizer.finish()


def llama_like() -> Tokenizer:
    """Byte fallback and a decoder that strips the first space, as llama's has it; ids 3.. are bytes."""
    vocab = {"<unk>": 0, "a": 1, "▁b": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def llama_ids(text: str) -> list[int]:
    """As llama's tokenizer would have it: known pieces, bytes for the rest."""
    known = {"a": [1], " b": [2], "b": byte_ids(b"b")}
    pieces = re.findall(r" b|.", text, re.DOTALL)
    return [token for piece in pieces for token in known.get(piece, byte_ids(piece.encode()))]


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


llama_text_st = st.text(alphabet="a bé日😀", max_size=12)
llama_any_ids_st = st.lists(st.one_of(st.sampled_from([0, 1, 2]), st.sampled_from(byte_ids("é日😀".encode()))), max_size=24)


@given(llama_text_st, llama_text_st, st.integers(0, 4))
def test_text_in_fallback_bytes_streams_whole_but_for_a_last_character_cut_short(prompt: str, text: str, drop: int) -> None:
    ids = llama_ids(text)
    kept = max(0, len(ids) - drop)
    whole, done = "", 0
    for char in re.findall(r" b|.", text):
        if done + len(llama_ids(char)) > kept:
            break
        whole, done = whole + char, done + len(llama_ids(char))
    shown = stream([1, *llama_ids(prompt)], ids[:kept], llama_like())
    assert shown == whole + "\ufffd" * (kept - done)


def play(row: RowText, ids: Sequence[int]) -> list[str]:
    """What a listener gets: a piece per token until a stop, then the rest."""
    pieces = []
    for token in ids:
        pieces.append(row.push(token))
        if row.stopped:
            return pieces
    return [*pieces, row.finish()]


@pytest.mark.parametrize("fallback", [False, True], ids=["byte level", "byte fallback"])
@given(data=st.data(), stops=stops_st, min_tokens=st.integers(0, 6))
def test_a_row_resumed_at_any_token_shows_what_the_first_run_had_not(fallback: bool, data, stops: list[str], min_tokens: int) -> None:
    tokenizer = llama_like() if fallback else tiny_tokenizer()
    prompt, ids = data.draw(llama_any_ids_st if fallback else ids_st), data.draw(llama_any_ids_st if fallback else any_ids_st)
    row = RowText(tokenizer, prompt, stops, min_tokens=min_tokens)
    pieces = play(row, ids)
    at = data.draw(st.integers(0, len(pieces) - 1))
    resumed = RowText(tokenizer, prompt, stops, min_tokens=min_tokens, generated=ids[:at])
    assert resumed.shown == "".join(pieces[:at])
    assert not resumed.stopped
    assert play(resumed, ids[at:]) == pieces[at:]
    assert (resumed.shown, resumed.stopped) == (row.shown, row.stopped)


@given(ids_st, any_ids_st, any_ids_st, any_ids_st, stops_st)
def test_forks_show_what_rows_of_their_own_would(prompt, before, one, two, stops) -> None:
    row = RowText(tiny_tokenizer(), prompt, stops)
    for token in before:
        row.push(token)
        if row.stopped:
            return
    fork = row.fork()
    for copy, rest in ((fork, one), (row, two)):
        play(copy, rest)
        alone = RowText(tiny_tokenizer(), prompt, stops)
        play(alone, [*before, *rest])
        assert (copy.shown, copy.stopped) == (alone.shown, alone.stopped)


@given(ids_st, any_ids_st, stops_st, st.integers(0, 12))
def test_no_stop_ends_in_the_text_of_the_first_min_tokens(prompt, ids, stops, min_tokens) -> None:
    detokenizer = Detokenizer(tiny_tokenizer(), prompt)
    first = "".join([detokenizer.push(token) for token in ids[:min_tokens]])
    if len(ids) <= min_tokens:
        first += detokenizer.finish()
    row = RowText(tiny_tokenizer(), prompt, stops, min_tokens=min_tokens)
    play(row, ids)
    assert (row.shown, row.stopped) == cut(whole_text(tiny_tokenizer(), prompt, ids), stops, len(first))


def test_a_stop_counts_from_the_token_behind_min_tokens_on() -> None:
    (a,) = tiny_tokenizer().encode("a").ids
    for min_tokens, shown in ((0, ""), (1, "a"), (3, "aaa")):
        row = RowText(tiny_tokenizer(), (), ("a",), min_tokens=min_tokens)
        play(row, [a] * 5)
        assert (row.shown, row.stopped) == (shown, True)


def test_what_an_earlier_run_had_stopped_stays_stopped() -> None:
    ids = tiny_tokenizer().encode("the quick fox").ids
    row = RowText(tiny_tokenizer(), (), ("quick",), generated=ids)
    assert (row.shown, row.stopped, row.finish()) == ("the ", True, "")


@given(st.lists(st.integers(128, 255), max_size=80), st.text("ab", max_size=2))
def test_bytes_that_are_no_text_stream_to_the_text_of_one_decode(data: list[int], end: str) -> None:
    byte = {value: tiny_tokenizer().token_to_id(char) for value, char in BYTES.items()}
    ids = [byte[value] for value in data] + tiny_tokenizer().encode(end).ids
    assert stream([], ids) == tiny_tokenizer().decode(ids)


def test_bytes_that_are_no_text_are_not_held_back_for_ever() -> None:
    stray = tiny_tokenizer().token_to_id(BYTES[0x82])
    detokenizer, shown = Detokenizer(tiny_tokenizer(), ()), 0
    for count in range(1, 200):
        shown += len(detokenizer.push(stray))
        assert shown >= count - PENDING_IDS
    assert shown + len(detokenizer.finish()) == 199


def test_special_tokens_leave_a_character_whole() -> None:
    first, *rest = tiny_tokenizer().encode("😀").ids
    assert rest
    assert stream([], [first, 1, 1, *rest, 0]) == "😀"
