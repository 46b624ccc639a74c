"""The sampler against a slow reference written from the definition in its module."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batching.engines.torch.sampler import CANDIDATES, best_ids, draw_token, sample
from batching.runner import Draw, RowError
from batching.sampling import uniform
from promptmill.core.jobs import SamplingParams


def reference(logits, sampling, u):
    """Plain Python over the whole vocabulary. Returns every token that u may draw within rounding."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    best = float(logits[order[0]])
    weights = [math.exp((float(logits[token]) - best) / sampling.temperature) for token in order]
    whole = math.fsum(weights)
    if sampling.top_p < 1:
        kept, mass = 0, 0.0
        while kept < len(order) and (kept == 0 or mass < sampling.top_p * whole):
            mass += weights[kept]
            kept += 1
        order, weights = order[:kept], weights[:kept]
        whole = math.fsum(weights)
    mass = 0.0
    for token, weight in zip(order, weights, strict=True):
        mass += weight
        if mass > u * whole:
            return token
    return order[-1]


# Few distinct values, so that ties are everywhere; sizes on both sides of the candidates.
def rows(draw):
    size = draw(st.sampled_from([1, 2, 5, 40, CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 700]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["normal", "ties", "flat", "masked", "peaked"]))
    if kind == "normal":
        values = rng.normal(0, 3, size)
    elif kind == "ties":
        values = rng.integers(-2, 3, size) / 2
    elif kind == "flat":
        values = np.zeros(size)
    elif kind == "masked":
        values = np.where(rng.random(size) < 0.7, -np.inf, rng.normal(0, 2, size))
        values[rng.integers(size)] = 1.0
    else:
        values = rng.normal(0, 1, size)
        values[rng.integers(size)] = 20.0
    return values.astype(np.float32)


parameters = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 50, CANDIDATES, CANDIDATES + 3, 10_000]),
    # Not the round fractions, where a flat row's mass meets top_p exactly and rounding decides.
    top_p=st.sampled_from([0.0123, 0.3337, 0.9013, 0.9997, 1.0]),
)


@settings(max_examples=400, deadline=None)
@given(st.composite(rows)(), parameters, st.floats(0, 1, exclude_max=True))
def test_a_draw_is_what_the_definition_says(logits, sampling, u):
    got = draw_token(logits, sampling, u)
    # The two add up in different orders, so at a boundary between tokens either neighbour is right.
    assert got in {reference(logits, sampling, min(max(u + nudge, 0.0), 1.0)) for nudge in (-1e-12, 0.0, 1e-12)}


@given(st.composite(rows)(), st.integers(1, 800))
def test_the_best_come_by_logit_then_by_id(logits, count):
    count = min(count, len(logits))
    assert best_ids(logits, count).tolist() == sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))[:count]


def test_both_zeros_are_one_value():
    assert best_ids(np.array([-0.0, 0.0, -0.0], dtype=np.float32), 3).tolist() == [0, 1, 2]


def test_draws_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    drawn = [draw_token(logits, SamplingParams(max_tokens=1), uniform(42, position)) for position in range(4000)]
    shares = np.bincount(drawn, minlength=4) / 4000
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    assert set(np.unique([draw_token(logits, SamplingParams(max_tokens=1, top_p=0.79), uniform(42, p)) for p in range(500)])) == {0, 1}


def greedy():
    return Draw(SamplingParams(max_tokens=1, temperature=0), seed=0, position=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_of_equal_logits(dtype):
    logits = torch.zeros(3, 5000, dtype=dtype)
    logits[0, [4999, 17, 400]] = 2.0
    logits[1, 4999] = 1.0
    assert sample(logits, [greedy()] * 3) == [17, 4999, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_only_the_row_that_is_not_finite_fails(bad):
    logits = torch.zeros(3, 300)
    logits[1, 7] = bad
    logits[2, :] = float("-inf")
    logits[2, 5] = 0.0
    warm = Draw(SamplingParams(max_tokens=1), seed=1, position=0)
    for draw in (greedy(), warm):
        results = sample(logits, [draw] * 3)
        assert isinstance(results[0], int)
        assert isinstance(results[1], RowError)
        assert results[1].code == "non_finite_logits"
        assert results[2] == 5


def test_a_row_draws_the_same_alone_and_beside_others():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5003, generator=generator) * 2
    kinds = [{}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}, {"top_k": 3000, "temperature": 3.0}, {"temperature": 4.0}]
    draws = [Draw(SamplingParams(max_tokens=9, **kind), seed=row, position=row) for row, kind in enumerate(kinds)]
    together = sample(logits, draws)
    assert together == [sample(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]
    assert together[::-1] == sample(logits.flip(0), draws[::-1])
