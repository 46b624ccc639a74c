from hypothesis import given
from hypothesis import strategies as st

from batching.sampling import mix64, seed_of, uniform

GAMMA = 0x9E3779B97F4A7C15


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10_000), st.integers(0, 100))
def test_a_uniform_is_in_the_half_open_interval_and_repeats(seed: int, position: int, choice: int) -> None:
    assert 0 <= uniform(seed, position, choice) < 1
    assert uniform(seed, position, choice) == uniform(seed, position, choice)


def test_mix64_is_splitmix64() -> None:
    """First outputs of the reference generator with state 1234567."""
    assert [mix64(1234567 + n * GAMMA) for n in (1, 2, 3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_are_spread_evenly_along_positions_seeds_and_choices() -> None:
    lines = ([uniform(7, n) for n in range(4000)], [uniform(n, 0) for n in range(4000)], [uniform(7, 0, n) for n in range(4000)])
    for numbers in lines:
        counts = [sum(k / 10 <= x < (k + 1) / 10 for x in numbers) for k in range(10)]
        assert all(340 < count < 460 for count in counts), counts


def test_the_streams_of_seeds_and_choices_are_not_shifts_of_each_other() -> None:
    streams = [{uniform(seed, n, choice) for n in range(200)} for seed in (0, 1, GAMMA, -GAMMA, -1) for choice in range(4)]
    assert len(set.union(*streams)) == 200 * len(streams)


def test_a_seed_from_a_name_is_stable_and_positive() -> None:
    assert seed_of("job_1/1") == seed_of("job_1/1") != seed_of("job_1/2")
    assert 0 <= seed_of("job_1/1") < 2**63
