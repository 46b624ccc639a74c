"""A simulated engine: steps of a given law under a policy of rows and prefill, to judge the policy by its latencies."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from batching.steptime import StepTime

Law = Callable[[int, int], float]  # seconds of a step of so many tokens and so much context


class Policy(Protocol):
    def row_limit(self, context: float) -> int: ...
    def prefill_budget(self, decode_rows: int, context: int) -> int: ...
    def observe(self, tokens: int, context: int, seconds: float) -> None: ...


@dataclass(frozen=True)
class Fixed:
    rows: int
    prefill: int = 256

    def row_limit(self, context: float) -> int:
        return self.rows

    def prefill_budget(self, decode_rows: int, context: int) -> int:
        return self.prefill

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """Learns nothing."""


class Targeted:
    """The model's decisions, at most ``rows`` and ``prefill``, after a trial as the engine makes one."""

    def __init__(self, target_s: float, law: Law, rows: int = 64, prefill: int = 256):
        self.times = StepTime()
        self.target_s, self.rows, self.prefill = target_s, rows, prefill
        for tokens in (1, rows // 4, rows, prefill // 4, prefill) * 2:
            self.observe(tokens, tokens, law(tokens, tokens))

    def row_limit(self, context: float) -> int:
        return self.times.rows_within(self.target_s, context, self.rows)

    def prefill_budget(self, decode_rows: int, context: int) -> int:
        return self.times.prefill_within(self.target_s, decode_rows, context, self.prefill)

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        self.times.observe(tokens, context, seconds)


@dataclass(slots=True)
class Job:
    arrival: float
    prompt: int
    output: int
    past: int = 0
    drawn: int = 0
    token_at: float = 0.0

    @property
    def decoding(self) -> bool:
        return self.past >= self.prompt


@dataclass(frozen=True)
class Result:
    gaps: Sequence[float]  # between tokens of one request, ascending
    tokens_per_s: float

    @property
    def p99(self) -> float:
        return self.gaps[int(0.99 * len(self.gaps))]


def jobs(random: Random, count: int, rate: float, prompt: tuple[int, int] = (32, 256), output: tuple[int, int] = (16, 192)) -> list[Job]:
    """Poisson arrivals of ``rate`` per second, or all at once (0); lengths log-uniform."""
    now, made = 0.0, []
    for _ in range(count):
        now += random.expovariate(rate) if rate else 0.0
        made.append(Job(now, _log_uniform(random, *prompt), _log_uniform(random, *output)))
    return made


def simulate(policy: Policy, arrivals: Sequence[Job], law: Law, noise: Callable[[], float]) -> Result:
    """Each step: admit, all decodes, prefill in order of admission; it takes law * noise."""
    waiting = deque(Job(job.arrival, job.prompt, job.output) for job in arrivals)
    running: list[Job] = []
    gaps: list[float] = []
    now, tokens, mean_context = 0.0, 0, 0.0
    while waiting or running:
        if not running and waiting[0].arrival > now:
            now = waiting[0].arrival
        while waiting and waiting[0].arrival <= now and (not running or len(running) < policy.row_limit(mean_context)):
            running.append(waiting.popleft())
        decodes = [job for job in running if job.decoding]
        context = sum(job.past + 1 for job in decodes)
        left = policy.prefill_budget(len(decodes), context)
        chunks: list[tuple[Job, int]] = []
        for job in running:
            if left and not job.decoding:
                chunks.append((job, min(left, job.prompt - job.past)))
                left -= chunks[-1][1]
        size = len(decodes) + sum(count for _, count in chunks)
        context += sum(job.past + count for job, count in chunks)
        seconds = law(size, context) * noise()
        now += seconds
        policy.observe(size, context, seconds)
        mean_context = sum(max(job.past, job.prompt + job.output / 2) for job in running) / len(running)
        for job, count in chunks:
            job.past += count
        for job in decodes:
            job.past += 1
            gaps.append(now - job.token_at)
        for job in (*decodes, *(job for job, _ in chunks if job.decoding)):
            job.drawn += 1
            job.token_at = now
            tokens += 1
        running = [job for job in running if job.drawn < job.output]
    return Result(sorted(gaps), tokens / (now - arrivals[0].arrival))


def _log_uniform(random: Random, low: int, high: int) -> int:
    return round(low * math.exp(math.log(high / low) * random.random()))
