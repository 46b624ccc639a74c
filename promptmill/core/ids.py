"""Time-ordered ids with a prefix: ``job_0ncv8w1kq3f7…``.

48 bits of UNIX milliseconds and 80 random bits in Crockford base 32 (the layout of a ULID,
https://github.com/ulid/spec, in lower case): 26 characters that sort by time of creation.
"""

import secrets

from promptmill.core.clock import SYSTEM_CLOCK, Clock

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str, clock: Clock = SYSTEM_CLOCK) -> str:
    """A fresh id such as ``job_01jd…``; ``prefix`` is job, batch, file or key."""
    number = (int(clock.time() * 1000) << 80) | secrets.randbits(80)
    digits = [ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5)]
    return f"{prefix}_{''.join(digits)}"
