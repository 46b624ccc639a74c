import sys

from hypothesis import given
from hypothesis import strategies as st

from batching.stops import StopAutomaton, StopMatcher

ALPHABET = "ab😀"
stops_st = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
pieces_st = st.lists(st.text(ALPHABET, max_size=4), max_size=12)


def cut(text: str, stops: list[str], unarmed: int = 0) -> tuple[str, bool]:
    """The definition: cut before the match that ends first behind the first ``unarmed`` characters, the
    longest of those that end there."""
    first = [max(len(stop), unarmed + 1) for stop in stops]
    ends = [
        (end, -len(stop)) for stop, low in zip(stops, first, strict=True) for end in range(low, len(text) + 1) if text[:end].endswith(stop)
    ]
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


@given(pieces_st, stops_st, st.integers(0, 12))
def test_a_match_that_ends_in_unarmed_pieces_does_not_count(pieces: list[str], stops: list[str], unarmed: int) -> None:
    matcher, shown = StopMatcher(stops), ""
    for index, piece in enumerate(pieces):
        shown += matcher.push(piece, armed=index >= unarmed)
        if matcher.stopped:
            break
    else:
        shown += matcher.flush()
    text = "".join(pieces)
    assert (shown, matcher.stopped) == cut(text, stops, len("".join(pieces[:unarmed])))


def test_a_stop_may_begin_in_an_unarmed_piece() -> None:
    matcher = StopMatcher(("aba",))
    assert matcher.push("xaba", armed=False) == "xab", "the last a may begin another one"
    assert (matcher.push("b"), matcher.push("a")) == ("", "")
    assert matcher.stopped


@given(pieces_st, pieces_st, pieces_st, stops_st)
def test_a_fork_goes_on_as_if_it_had_read_everything(before: list[str], one: list[str], two: list[str], stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for piece in before:
        shown += matcher.push(piece)
        if matcher.stopped:
            return
    for copy, rest in ((matcher.fork(), one), (matcher, two)):
        text = shown
        for piece in rest:
            text += copy.push(piece)
            if copy.stopped:
                break
        else:
            text += copy.flush()
        assert (text, copy.stopped) == cut("".join([*before, *rest]), stops)


def test_a_character_costs_as_much_with_many_stops_as_with_one() -> None:
    """Counted in looks at the table of an automaton: at most two a character, whatever the stops."""
    text = ("a" * 199 + "c") * 20
    stops = ["a" * length + "b" for length in range(168, 200)]
    matcher, looks = StopMatcher(stops), 0

    def count(frame, event, arg):
        nonlocal looks
        looks += event == "c_call" and arg.__name__ == "get"

    sys.setprofile(count)
    try:
        assert matcher.push(text) == text
    finally:
        sys.setprofile(None)
    assert len(text) <= looks <= 2 * len(text)


def test_an_automaton_is_as_large_as_its_stops_at_most() -> None:
    stops = [chr(97 + index) * 1024 for index in range(26)]
    assert len(StopAutomaton(stops).matched) == 1 + 26 * 1024
    assert len(StopAutomaton(["abc", "abd", "ab", "abc"]).matched) == 5
