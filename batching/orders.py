"""What others may tell the loop of a request that it has."""

from dataclasses import dataclass

from promptmill.core.engine import PauseMode


@dataclass(frozen=True, slots=True)
class Cancel:
    id: str


@dataclass(frozen=True, slots=True)
class Pause:
    id: str
    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Resume:
    id: str


Order = Cancel | Pause | Resume
