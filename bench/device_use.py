"""How busy the GPU is: its utilisation while requests come one at a time, and while a number of rows is kept full.

Utilisation is what the driver counts: the share of the last moments in which at least one kernel ran.
"""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from batching.engine import BatchingEngine
from bench.device_models import prompts, request
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.engine import Failed, Finished, Tokens

INTERVAL_S = 0.1
_PROMPT = 128
_ANSWERS = (64, 96, 128, 160, 192)  # tokens, in turn: rows end at different times

Samples = list[tuple[float, float]]  # (monotonic seconds, percent)


class Sampler(Protocol):
    """``name``: what the figures are from. ``samples`` grows inside ``running``."""

    name: str
    samples: Samples

    def running(self) -> AbstractContextManager[None]:
        """A context in which it samples every INTERVAL_S."""


class NvmlSampler:
    """By NVIDIA's library; ``read`` gives percent."""

    name = "nvml"

    def __init__(self, read: Callable[[], float]):
        self.samples: Samples = []
        self._read = read

    @contextmanager
    def running(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(INTERVAL_S):
                self.samples.append((SYSTEM_CLOCK.monotonic(), self._read()))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class SmiSampler:
    """By nvidia-smi as a process that prints a line at a time; ``command`` is its call."""

    name = "nvidia-smi"

    def __init__(self, command: list[str]):
        self.samples: Samples = []
        self._command = command

    @contextmanager
    def running(self) -> Iterator[None]:
        with subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = process.stdout

            def watch() -> None:
                for line in lines:
                    if line.strip().isdigit():  # not "[N/A]"
                        self.samples.append((SYSTEM_CLOCK.monotonic(), float(line)))

            thread = threading.Thread(target=watch, daemon=True)
            thread.start()
            try:
                yield
            finally:
                process.kill()
                thread.join()


def find_sampler(uuid: str) -> Sampler | None:
    """For the GPU of that UUID (``GPU-…``); None where neither the library nor the program is to be had."""
    try:
        import pynvml

        pynvml.nvmlInit()
        only = pynvml.nvmlDeviceGetCount() == 1  # then no UUID has to be right
        handle = pynvml.nvmlDeviceGetHandleByIndex(0) if only else pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except Exception as error:  # not installed, or a driver that refuses
        print(f"no NVML ({type(error).__name__}: {error}); trying nvidia-smi", flush=True)
    else:
        return NvmlSampler(lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    return SmiSampler(["nvidia-smi", f"--id={uuid}", *query, f"--loop-ms={int(1000 * INTERVAL_S)}"])


class Load:
    """Requests without end: as one ends the next is submitted, so that ``rows`` are in the engine at any time."""

    def __init__(self, engine: BatchingEngine, shape: str, vocab_size: int, rows: int):
        self._engine = engine
        self._shape, self._vocab_size, self._rows = shape, vocab_size, rows
        self._sent = 0
        self._alive: set[str] = set()

    def run(self, seconds: float) -> tuple[int, int]:
        """How many requests ended and how many tokens came. Raises RuntimeError when a request fails."""
        ended = tokens = 0
        end = SYSTEM_CLOCK.monotonic() + seconds
        while SYSTEM_CLOCK.monotonic() < end:
            while len(self._alive) < self._rows:
                self._send()
            for event in self._engine.step():
                if isinstance(event, Tokens):
                    tokens += len(event.token_ids)
                elif isinstance(event, Failed):
                    raise RuntimeError(f"{event.id} failed: {event.code} {event.message}")
                elif isinstance(event, Finished):
                    self._alive.discard(event.id)
                    ended += 1
        return ended, tokens

    def stop(self) -> None:
        for name in self._alive:
            self._engine.cancel(name)
        while sum(self._engine.stats().running.values()):
            self._engine.step()

    def _send(self) -> None:
        name = f"load {self._rows}/{self._sent}"
        (prompt,) = prompts(1, self._vocab_size, _PROMPT, seed=self._sent)
        self._engine.submit(request(name, self._shape, prompt, _ANSWERS[self._sent % len(_ANSWERS)]))
        self._alive.add(name)
        self._sent += 1


def mean_since(samples: Samples, since: float) -> tuple[float | None, int]:
    """Mean percent of the samples from then on, and how many there are; None for none."""
    percents = [percent for at, percent in samples if at >= since]
    return (sum(percents) / len(percents) if percents else None), len(percents)
