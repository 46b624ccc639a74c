"""Other systems, made to serve the requests of a workload: same token ids, same lengths, no end of sequence."""

from collections.abc import Sequence
from typing import Protocol

from bench.workloads import Request


class Missing(Exception):
    """The peer is not installed here, or does not start; says what is missing."""


class System(Protocol):
    """A system that is loaded and warm. ``run`` serves ``requests``, all at once with up to ``rows`` rows, or with 1
    row one after the other, and gives the seconds that it took."""

    name: str

    def run(self, requests: Sequence[Request], rows: int) -> float: ...

    def close(self) -> None: ...
