"""The runner over a Hugging Face model: packed steps, a pool of KV blocks, sampling."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batching.engines.torch.attention import Span
from batching.engines.torch.device import choose_device, choose_dtype, choose_rows, choose_threads, kv_budget
from batching.engines.torch.fit import kv_shape, run_packed
from batching.engines.torch.fuse import fuse, unsteady
from batching.engines.torch.kv import block_bytes, create_pool
from batching.engines.torch.layers import fuse_layers
from batching.engines.torch.loader import cache_argument, load_model
from batching.engines.torch.native import Native, load_native
from batching.engines.torch.packer import Packer, Unpackable
from batching.engines.torch.sampler import sample, score
from batching.engines.torch.selfcheck import is_batch_invariant
from batching.options import EngineOptions
from batching.runner import BLOCK_TOKENS, Draw, Drawn, OutOfMemory, RowError, RowOutput, RowResult, RowWork
from promptmill.core.engine import Capabilities
from promptmill.core.errors import ConfigError
from promptmill.core.jobs import TokenLogprob
from promptmill.core.logs import get_logger
from promptmill.core.models import ModelCard

NO_MEMORY = ("DefaultCPUAllocator", "bad_alloc", "out of memory")  # of torch and oneDNN, which have no class for it on a CPU
LEAST_TOKENS = 512  # a KV cache for fewer, or for less than the context, serves nobody

_log = get_logger(__name__)


class TorchRunner:
    """``batching.runner.Runner`` on torch.

    ``rows``: rows of bulk and standard work in a step; ``reserved`` more serve interactive requests.
    ``kv_budget_bytes``: the most that the pool of blocks may take. Raises ConfigError when that is too little.
    """

    def __init__(
        self,
        model: nn.Module,
        card: ModelCard,
        *,
        rows: int,
        reserved: int,
        kv_budget_bytes: int,
        device: torch.device,
        native: Native | None,
    ):
        self.context_length = card.context_length
        self.vocab_size = card.vocab_size
        self.rows = rows
        self.caps = Capabilities()
        self._model = model
        self._kernels = native
        self._cache_argument = cache_argument(model)
        shape = kv_shape(model, self._cache_argument)
        self.block_bytes = block_bytes(shape, native)
        self.blocks = _blocks(kv_budget_bytes, self.block_bytes, card.context_length, rows + reserved)
        self._kv = create_pool(shape, self.blocks, device, native)

    @property
    def exact_attention(self) -> bool:
        return self._kv.exact

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        """See the port."""
        try:
            with torch.inference_mode():  # thread-local, so entered here and not once
                logits = self.logits(rows)
                return _results(logits, rows, self._kernels)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(str(error)) from error
        except RuntimeError as error:
            if any(words in str(error) for words in NO_MEMORY):
                raise OutOfMemory(str(error)) from error
            raise

    def copy(self, source: int, target: int) -> None:
        with torch.inference_mode():
            self._kv.copy(source, target)

    def wipe(self, blocks: Sequence[int]) -> None:
        with torch.inference_mode():
            self._kv.wipe(blocks)

    def logits(self, rows: Sequence[RowWork]) -> Tensor:
        """One forward pass; the logits [kept, vocabulary] at all ``kept_at`` of each row, one after the other."""
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        for row in rows:
            count = len(row.token_ids)
            keep.extend(len(ids) + at for at in kept_at(row))
            ids.extend(row.token_ids)
            positions.extend(range(row.past, row.past + count))
            spans.append(Span(row.table, row.past, count))
        with torch.inference_mode():
            packed = (torch.tensor(numbers, dtype=torch.long) for numbers in (ids, positions, keep))
            return run_packed(self._model, self._cache_argument, self._kv.step(spans), *packed)


def kept_at(row: RowWork) -> list[int]:
    """Which of the row's tokens in the step need logits: those that score what follows, then the last if it draws."""
    kept = [] if row.score is None else list(range(row.score.first, row.score.first + len(row.score.targets)))
    last = len(row.token_ids) - 1
    if row.draws and last not in kept[-1:]:
        kept.append(last)
    return kept


def load_runner(folder: Path, card: ModelCard, options: EngineOptions) -> TorchRunner:
    """A runner that is ready to step: loaded, packed, checked and warm. To be called on the thread that will step.
    Raises ConfigError."""
    device = choose_device(options)
    dtype = choose_dtype(options, device)
    torch.set_num_threads(choose_threads(options))
    native = _native(options, device)
    model = load_model(folder, dtype, device)
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    fused, packed = _replace(model, native) if device.type == "cpu" else ([], False)
    rows, budget = choose_rows(options, device), kv_budget(options, device, weight_bytes)
    try:
        runner = TorchRunner(model, card, rows=rows, reserved=options.reserved_rows, kv_budget_bytes=budget, device=device, native=native)
        loose = unsteady(model)
        invariant = runner.exact_attention and not loose and is_batch_invariant(runner)
    except ConfigError:
        raise
    except Exception as error:  # of a family that reads its layers otherwise than by calling them, or of a full memory
        raise ConfigError(f"the model {card.name} cannot be served: {type(error).__name__}: {error}") from error
    runner.caps = replace(runner.caps, batch_invariant=invariant)
    _log.info(
        "model_loaded",
        model=card.name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        kernels="torch" if native is None else "native",
        packed_linears=packed,
        fused=fused,
        unsteady=loose,
        batch_invariant=invariant,
        rows=runner.rows,
        weight_bytes=weight_bytes,
        kv_bytes=runner.blocks * runner.block_bytes,
    )
    return runner


def _replace(model: Any, native: Native | None) -> tuple[list[str], bool]:
    """Put kernels and packed products into the model: what was fused, and whether its linear layers are packed."""
    packer = Packer(native)
    try:
        layers = fuse_layers(model, native, packer, cache_argument(model)) if native is not None else 0
        fused = ([f"DecoderLayer x {layers}"] if layers else []) + (fuse(model, native) if native is not None else [])
        packer.pack_all(model, model.get_output_embeddings())
    except Unpackable as error:
        _log.warning("packed_linears_unavailable", reason=str(error))
        return fused, False
    return fused, True


def _native(options: EngineOptions, device: torch.device) -> Native | None:
    """Raises ConfigError where kernels are demanded and cannot be had."""
    if options.kernels == "torch" or device.type != "cpu":
        return None
    native = load_native(options.kernels_dir)
    if native is None and options.kernels == "native":
        raise ConfigError("the C kernels cannot be used here (the log says why); set the kernels to auto or torch")
    return native


def _blocks(budget: int, block_bytes: int, context_length: int, rows: int) -> int:
    """As many as the budget allows; no more than all rows and as much again for the prefix cache can use."""
    per_row = -(-context_length // BLOCK_TOKENS)
    blocks = min(budget // block_bytes, 2 * rows * per_row)
    tokens = blocks * BLOCK_TOKENS
    if tokens < min(context_length, LEAST_TOKENS):
        raise ConfigError(f"a KV cache of {budget >> 20} MiB holds {tokens} tokens of this model, which is too few to serve it")
    if tokens < context_length:
        _log.warning("kv_cache_small", tokens=tokens, context_length=context_length)
    return blocks


def _results(logits: Tensor, rows: Sequence[RowWork], kernels: Native | None) -> list[RowResult]:
    """From the logits that ``TorchRunner.logits`` gives to what each row asked for."""
    draws: list[Draw] = []
    sources: list[int] = []  # the row of ``logits`` that each draw is from
    scored: list[list[TokenLogprob] | RowError] = []
    begin = 0
    for row in rows:
        kept = kept_at(row)
        end = begin + len(kept)
        if row.score is None:
            scored.append([])
        else:
            scored.append(score(logits[begin : begin + len(row.score.targets)], row.score.targets, row.score.top))
        draws.extend(row.draws)
        sources.extend([end - 1] * len(row.draws))
        begin = end
    drawn = iter(sample(logits, sources, draws, kernels) if draws else ())
    return [_result([next(drawn) for _ in row.draws], scores) for row, scores in zip(rows, scored, strict=True)]


def _result(drawn: list[Drawn | RowError], scores: list[TokenLogprob] | RowError) -> RowResult:
    """A row fails as a whole."""
    if isinstance(scores, RowError):
        return scores
    good = [item for item in drawn if isinstance(item, Drawn)]
    if len(good) < len(drawn):
        return next(item for item in drawn if isinstance(item, RowError))
    return RowOutput(tuple(good), tuple(scores))
