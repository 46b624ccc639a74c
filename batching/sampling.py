"""The randomness of sampling: a function of (seed, position, choice), no state and no stream.

So a token does not depend on the rows beside it, and a run that starts again, or on another
worker, draws the same. SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014) used as a counter-based generator.
"""

import hashlib

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers that spreads every bit."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int, choice: int = 0) -> float:
    """The number in [0, 1) that draws token ``position`` (0 = first) of output ``choice`` under ``seed``.

    Seed (any integer, modulo 2^64) and choice are mixed before the position is added, so that
    neighbours do not give the same numbers shifted by a position.
    """
    stream = mix64(mix64(seed) + choice * _GAMMA)
    return (mix64(stream + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def seed_of(text: str) -> int:
    """A seed in [0, 2^63) from a name, for requests without one."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
