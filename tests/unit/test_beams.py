import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.beams import BeamSearch, Extension, Hypothesis
from batching.sampling import mix64
from promptmill.core.jobs import Beam

Path = tuple[int, ...]


class Tree:
    """A made-up model: every path has its own distribution over ``vocab`` ids, some of which may be forbidden."""

    def __init__(self, salt: int, vocab: int, forbidden: float = 0.0):
        self.salt, self.vocab, self.forbidden = salt, vocab, forbidden

    def following(self, path: Path) -> list[tuple[int, float]]:
        state = self.salt
        for token in path:
            state = mix64(state * 31 + token + 1)
        weights = {}
        for token in range(self.vocab):
            number = mix64(state + token) / 2**64
            if mix64(state - 1 - token) / 2**64 >= self.forbidden:
                weights[token] = number + 0.01
        total = sum(weights.values())
        return sorted(((token, math.log(weight / total)) for token, weight in weights.items()), key=lambda pair: (-pair[1], pair[0]))

    def logprob(self, path: Path) -> float:
        return sum(dict(self.following(path[:at]))[token] for at, token in enumerate(path))


def run(tree: Tree, beams: BeamSearch) -> list[Hypothesis]:
    while not beams.done:
        beams.advance([tree.following(live.token_ids)[: beams.candidates] for live in beams.live])
    return beams.best(10**6)


def all_ends(tree: Tree, max_tokens: int, ends: frozenset[int]) -> list[tuple[float, Path]]:
    """Every text that can be, with its sum."""
    found, paths = [], [((), 0.0)]
    for length in range(1, max_tokens + 1):
        longer = [((*path, token), total + logprob) for path, total in paths for token, logprob in tree.following(path)]
        found += [(total, path) for path, total in longer if path[-1] in ends or length == max_tokens]
        paths = [(path, total) for path, total in longer if path[-1] not in ends]
    return sorted(found, reverse=True)


# -- one search, step by step


def test_the_first_step_spreads_the_prompt_and_later_ones_say_whose_child_each_beam_is() -> None:
    beams = BeamSearch(Beam(2), 2, 3, frozenset())
    assert beams.advance([[(7, -0.5), (8, -1.0), (9, -3.0)]]) == [Extension(0, 7), Extension(0, 8)]
    assert beams.advance([[(1, -2.0), (2, -3.0)], [(3, -0.1), (4, -0.2)]]) == [Extension(1, 3), Extension(1, 4)]
    assert [(live.token_ids, live.logprob) for live in beams.live] == [((8, 3), -1.1), ((8, 4), -1.2)]
    assert beams.advance([[(5, -1.0)], [(6, -0.5)]]) == []
    assert beams.done
    assert not beams.live
    assert beams.best(2) == [
        Hypothesis((8, 4, 6), pytest.approx(-1.7 / 3), "length"),
        Hypothesis((8, 3, 5), pytest.approx(-2.1 / 3), "length"),
    ]


def test_equal_candidates_go_by_parent_then_by_id() -> None:
    beams = BeamSearch(Beam(3), 1, 5, frozenset())
    assert beams.advance([[(9, -1.0), (4, -1.0), (6, -1.0), (5, -1.0)]]) == [Extension(0, 4), Extension(0, 5), Extension(0, 6)]
    assert beams.advance([[(8, -1.0)], [(7, -1.0), (3, -1.0)], [(2, -1.0)]]) == [Extension(0, 8), Extension(1, 3), Extension(1, 7)]


def test_an_end_token_ends_its_beam_and_another_takes_the_place() -> None:
    beams = BeamSearch(Beam(2, length_penalty=0.0), 1, 9, frozenset({0}))
    assert beams.advance([[(0, -0.1), (5, -2.0), (6, -3.0)]]) == [Extension(0, 5), Extension(0, 6)]
    assert beams.best(1) == [Hypothesis((0,), -0.1, "stop")]


def test_an_end_token_that_is_not_among_the_best_counts_for_nothing() -> None:
    beams = BeamSearch(Beam(2), 1, 9, frozenset({0}))
    beams.advance([[(5, -1.0), (6, -2.0), (0, -3.0), (7, -4.0)]])
    assert beams.best(1) == []


@pytest.mark.parametrize("early_stopping", [False, True])
def test_early_stopping_ends_at_width_texts_else_a_better_one_is_waited_for(early_stopping: bool) -> None:
    beams = BeamSearch(Beam(2, 0.0, early_stopping), 1, 9, frozenset({0}))
    beams.advance([[(5, -0.1), (0, -9.0), (6, -9.5)]])
    beams.advance([[(0, -5.0), (7, -5.5)], [(8, -0.1)]])
    assert len(beams.best(2)) == 2
    assert beams.done == early_stopping
    if not early_stopping:
        beams.advance([[(0, -0.5), (1, -9.0)], [(2, -9.0)]])
        assert beams.done
        assert [found.token_ids for found in beams.best(2)] == [(5, 0), (5, 7, 0)]


def test_the_length_penalty_favours_long_texts() -> None:
    def best(penalty: float) -> Path:
        beams = BeamSearch(Beam(2, penalty), 1, 2, frozenset({0}))
        beams.advance([[(0, -1.0), (5, -1.2)]])
        beams.advance([[(6, -0.3), (7, -0.9)]])
        return beams.best(1)[0].token_ids

    assert [best(penalty) for penalty in (-1.0, 0.0, 1.0, 2.0)] == [(0,), (0,), (5, 6), (5, 6)]


def test_a_dead_end_drops_its_beam_and_without_beams_the_search_is_done() -> None:
    beams = BeamSearch(Beam(3), 3, 9, frozenset({0}))
    beams.advance([[(5, -1.0), (6, -1.5)]])
    assert beams.advance([[], [(7, -0.5), (0, -2.0)]]) == [Extension(1, 7)]
    assert not beams.done
    assert beams.advance([[]]) == []
    assert beams.done
    assert [found.token_ids for found in beams.best(3)] == [(6, 0)]


def test_a_grammar_that_no_text_meets_gives_none() -> None:
    beams = BeamSearch(Beam(2), 1, 9, frozenset({0}))
    assert beams.advance([[]]) == []
    assert beams.done
    assert beams.best(1) == []


@pytest.mark.parametrize(("width", "n", "max_tokens"), [(2, 3, 5), (2, 0, 5), (2, 1, 0)])
def test_what_no_search_can_give_is_refused(width: int, n: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="at most"):
        BeamSearch(Beam(width), n, max_tokens, frozenset())


def test_enough_candidates_are_asked_for_to_fill_the_beams_past_all_end_tokens() -> None:
    beams = BeamSearch(Beam(2), 1, 9, frozenset(range(5)))
    following = [(8, -1.0), *((end, -2.0 - end) for end in range(5)), (9, -8.0)]
    assert beams.advance([following[: beams.candidates]]) == [Extension(0, 8), Extension(0, 9)]


# -- any search


@given(st.integers(0, 2**64 - 1), st.integers(2, 3), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_a_search_wide_enough_for_every_path_finds_the_best_texts_there_are(salt: int, vocab: int, max_tokens: int) -> None:
    tree, ends = Tree(salt, vocab), frozenset({0})
    every = all_ends(tree, max_tokens, ends)
    found = run(tree, BeamSearch(Beam(len(every) + 1, length_penalty=0.0), 1, max_tokens, ends))
    assert [each.token_ids for each in found] == [path for _, path in every]
    assert [each.score for each in found] == pytest.approx([total for total, _ in every])


@st.composite
def searches(draw: st.DrawFn) -> tuple[Tree, Beam, int, frozenset[int]]:
    tree = Tree(draw(st.integers(0, 2**64 - 1)), draw(st.integers(1, 7)), draw(st.sampled_from([0.0, 0.3, 0.8])))
    beam = Beam(draw(st.integers(1, 6)), draw(st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0])), draw(st.booleans()))
    return tree, beam, draw(st.integers(1, 8)), draw(st.frozensets(st.integers(0, 6), max_size=3))


@given(searches())
@settings(max_examples=300, deadline=None)
def test_beams_stay_within_the_width_and_texts_are_real_paths(search: tuple[Tree, Beam, int, frozenset[int]]) -> None:
    tree, beam, max_tokens, ends = search
    beams = BeamSearch(beam, 1, max_tokens, ends)
    for _ in range(max_tokens):
        before = beams.live
        extensions: Sequence[Extension] = beams.advance([tree.following(live.token_ids)[: beams.candidates] for live in before])
        assert len(extensions) == len(beams.live) <= beam.width
        for extension, live in zip(extensions, beams.live, strict=True):
            assert live.token_ids == (*before[extension.parent].token_ids, extension.token)
            assert live.logprob == pytest.approx(tree.logprob(live.token_ids))
        assert all(a.logprob >= b.logprob for a, b in itertools.pairwise(beams.live))
        assert len({live.token_ids for live in beams.live}) == len(beams.live)
        if beams.done:
            break
    assert beams.done, "a search ends at max_tokens at the latest"
    found = beams.best(beam.width)
    assert found == beams.best(beam.width + 1)
    assert len({each.token_ids for each in found}) == len(found)
    assert all(a.score >= b.score for a, b in itertools.pairwise(found))
    for each in found:
        length = len(each.token_ids)
        assert each.score == pytest.approx(tree.logprob(each.token_ids) / length**beam.length_penalty)
        assert not ends & set(each.token_ids[:-1])
        assert each.reason == ("stop" if each.token_ids[-1] in ends else "length")
        assert each.reason == "stop" or length == max_tokens
