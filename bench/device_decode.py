"""Decoding at a number of rows, three ways: this engine, ``model.generate()``, transformers' continuous batching.

The same prompts for all. Timed is from where all rows decode to the deadline or the first row's end; prompts and
the first steps, in which kernels are chosen, are not.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from batching.engine import BatchingEngine
from bench.device_models import CONTEXT, make_engine, prompts, request
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.engine import Failed, Finished, Tokens

PROMPT = 128  # tokens
NEW = 768  # the most tokens of an answer
SETTLE = 8  # steps of every row before the clock starts
_CB_BLOCK = 256  # tokens of a block in transformers' paged cache, its default
_CB_STEP = 4096  # tokens of a step there; its default is sized by the free memory


@dataclass(frozen=True, slots=True)
class Decoded:
    """``tokens`` of all rows in ``seconds``, with ``context`` tokens in the cache of a row on average."""

    rows: int
    tokens: int
    seconds: float
    context: float


Measure = Callable[[int], Decoded]


def promptmill(model: Any, shape: str, rows: Sequence[int], seconds: float) -> Measure:
    engine = make_engine(model, shape, max(rows))
    return lambda count: _decode(engine, shape, prompts(count, model.config.vocab_size, PROMPT), seconds)


def _decode(engine: BatchingEngine, shape: str, texts: list[list[int]], seconds: float) -> Decoded:
    """Raises RuntimeError when a request fails."""
    made = {f"{len(texts)}/{row}": 0 for row in range(len(texts))}
    for name, text in zip(made, texts, strict=True):
        engine.submit(request(name, shape, text, NEW))
    while min(made.values()) < SETTLE:
        _step(engine, made)
    before, began = dict(made), SYSTEM_CLOCK.monotonic()
    while (took := SYSTEM_CLOCK.monotonic() - began) < seconds and max(made.values()) < NEW - 1:
        _step(engine, made)
    took = SYSTEM_CLOCK.monotonic() - began
    counts = list(zip(before.values(), made.values(), strict=True))
    for name in made:
        engine.cancel(name)
    while sum(engine.stats().running.values()):
        engine.step()
    context = PROMPT + sum(first + last for first, last in counts) / (2 * len(counts))
    return Decoded(len(counts), sum(last - first for first, last in counts), took, context)


def _step(engine: BatchingEngine, made: dict[str, int]) -> None:
    for event in engine.step():
        if isinstance(event, Tokens):
            made[event.id] += len(event.token_ids)
        elif isinstance(event, Failed):
            raise RuntimeError(f"{event.id} failed: {event.code} {event.message}")
        elif isinstance(event, Finished):
            raise RuntimeError(f"{event.id} ended before its {NEW} tokens: {event.reason}")


def generate(model: Any, shape: str, rows: Sequence[int], seconds: float) -> Measure:
    """A static batch of prompts of one length, with transformers' default cache."""

    def measure(count: int) -> Decoded:
        ids = torch.tensor(prompts(count, model.config.vocab_size, PROMPT), device=model.device)
        _generate(model, ids, SETTLE, seconds)
        return _generate(model, ids, NEW, seconds)

    return measure


class _Deadline(StoppingCriteria):
    """Called after every token of the batch; notes when. The first call is that of the prompt's token."""

    def __init__(self, seconds: float):
        self.times: list[float] = []
        self._seconds = seconds

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()  # generate() itself waits a little later in the same step
        self.times.append(SYSTEM_CLOCK.monotonic())
        over = self.times[-1] - self.times[0] >= self._seconds
        return torch.full((input_ids.shape[0],), over, dtype=torch.bool, device=input_ids.device)


def _generate(model: Any, ids: torch.Tensor, new_tokens: int, seconds: float) -> Decoded:
    deadline = _Deadline(seconds)
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=StoppingCriteriaList([deadline])
        )
    steps = len(deadline.times) - 1
    return Decoded(len(ids), len(ids) * steps, deadline.times[-1] - deadline.times[0], PROMPT + steps / 2)


def continuous_batching(model: Any, shape: str, rows: Sequence[int], seconds: float) -> Measure:
    """transformers' own, with the best attention that it finds; the answer's length is chosen by a short first run."""

    def measure(count: int) -> Decoded:
        config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)
        batching = ContinuousBatchingConfig(
            num_blocks=(count + 1) * (CONTEXT // _CB_BLOCK), max_batch_tokens=_CB_STEP, max_requests_per_batch=count
        )
        with model.continuous_batching_context_manager(
            generation_config=copy.deepcopy(config), continuous_batching_config=batching, timeout=20.0
        ) as manager:
            short = _batch(manager, prompts(count, model.config.vocab_size, PROMPT, seed=1), 2 * SETTLE)
            fitting = int(seconds / (short.seconds / max(1, short.tokens // count))) if short.tokens else NEW
            return _batch(manager, prompts(count, model.config.vocab_size, PROMPT), min(NEW, max(2 * SETTLE, SETTLE + fitting)))

    return measure


def _batch(manager: Any, texts: list[list[int]], new_tokens: int) -> Decoded:
    """All texts at once. Raises RuntimeError when a request fails or the loop of the manager dies."""
    left = set(manager.add_requests(inputs=texts, max_new_tokens=new_tokens, record_timestamps=True))
    outputs = []
    while left:
        output = manager.get_result(timeout=1.0)
        if output is None and not manager.is_running():
            raise RuntimeError("the loop of continuous batching died; the log says why")
        if output is not None and output.is_finished():
            if output.error:
                raise RuntimeError(f"continuous batching failed a request: {output.error}")
            left.discard(output.request_id)
            outputs.append(output)
    return between([output.timestamps for output in outputs])


def between(times: list[list[float]]) -> Decoded:
    """From what each row's tokens came at: the part in which every row decodes and none has ended."""
    began = max(row[min(SETTLE, len(row)) - 1] for row in times)
    ended = min(row[-1] for row in times)
    tokens = sum(sum(began < time <= ended for time in row) for row in times)
    mean = sum(sum(time <= began for time in row) + sum(time <= ended for time in row) for row in times) / (2 * len(times))
    return Decoded(len(times), tokens, max(0.0, ended - began), PROMPT + mean)


SYSTEMS: dict[str, Callable[[Any, str, Sequence[int], float], Measure]] = {
    "promptmill": promptmill,
    "generate": generate,
    "continuous_batching": continuous_batching,
}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by copies far larger than any cache; the best of five."""
    cuda = device.type == "cuda"
    source = torch.ones((1 << 32) if cuda else (1 << 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(6):  # the first one touches the memory
        wait(device)
        began = SYSTEM_CLOCK.monotonic()
        for _ in range(10 if cuda else 1):
            target.copy_(source)
        wait(device)
        best = max(best, (10 if cuda else 1) * 2 * source.nbytes / (SYSTEM_CLOCK.monotonic() - began))
    return best


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
