from hypothesis import given
from hypothesis import strategies as st

from batching.stops import StopMatcher

ALPHABET = "ab😀"
stops_st = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
pieces_st = st.lists(st.text(ALPHABET, max_size=4), max_size=12)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: cut before the match that ends first, the longest of those that end there."""
    ends = [(end, -len(stop)) for stop in stops for end in range(len(stop), len(text) + 1) if text[:end].endswith(stop)]
    if not ends:
        return text, False
    end, length = min(ends)
    return text[: end + length], True


def feed(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.stopped:
            return shown, True
    return shown + matcher.flush(), False


@given(pieces_st, stops_st)
def test_text_in_pieces_is_cut_as_the_whole_text_is(pieces: list[str], stops: list[str]) -> None:
    assert feed(pieces, stops) == cut("".join(pieces), stops)


@given(pieces_st, stops_st)
def test_only_the_longest_suffix_that_may_become_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, text = StopMatcher(stops), "", ""
    for piece in pieces:
        shown, text = shown + matcher.push(piece), text + piece
        if matcher.stopped:
            return
        held = max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k]) and k), default=0)
        assert shown == text[: len(text) - held]


def test_the_text_is_cut_in_the_middle_of_a_piece() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("one E") == "one "
    assert matcher.push("ND two") == ""
    assert matcher.stopped


def test_the_stop_that_ends_first_wins_whatever_the_pieces() -> None:
    assert feed(["abcd"], ["abcd", "bc"]) == feed(list("abcd"), ["abcd", "bc"]) == ("a", True)


def test_a_stop_that_overlaps_itself_is_found() -> None:
    assert feed(["aa", "ab"], ["aab"]) == ("a", True)
