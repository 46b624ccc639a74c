"""The runner over an unchanged Hugging Face model: packed steps, KV slots, sampling."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batching.engines.torch.attention import PackedStep, PassCache, ShapeProbe, Span, Step, attending
from batching.engines.torch.device import choose_device, choose_dtype, choose_rows, choose_threads, kv_budget
from batching.engines.torch.kv import KVShape, SlotKV
from batching.engines.torch.linears import pack_linears
from batching.engines.torch.loader import cache_argument, load_model
from batching.engines.torch.sampler import sample
from batching.engines.torch.selfcheck import is_batch_invariant
from batching.options import EngineOptions
from batching.runner import RowResult, RowWork
from promptmill.core.errors import ConfigError
from promptmill.core.logs import get_logger
from promptmill.core.models import ModelCard

_log = get_logger(__name__)


class TorchRunner:
    """``batching.runner.Runner`` on torch. Slots are numbered 0 .. rows + reserved rows - 1.

    ``rows``: rows of bulk and standard work in a step. ``kv_budget_bytes``: what all open slots may take
    together; the engine loop keeps to it.
    """

    def __init__(self, model: nn.Module, card: ModelCard, *, rows: int, kv_budget_bytes: int, device: torch.device, dtype: torch.dtype):
        self.context_length = card.context_length
        self.vocab_size = card.vocab_size
        self.rows = rows
        self.kv_budget_bytes = kv_budget_bytes
        self.batch_invariant = False
        self._model = model
        self._device = device
        self._cache: dict[str, Any] = {cache_argument(model): PassCache(), "use_cache": False}
        self._kv = SlotKV(self._probe_shape(dtype), device)

    def kv_bytes(self, tokens: int) -> int:
        return self._kv.bytes(tokens)

    def open(self, slot: int, tokens: int) -> None:
        self._kv.open(slot, tokens)

    def close(self, slot: int) -> None:
        self._kv.close(slot)

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        drawing = [index for index, row in enumerate(rows) if row.draw is not None]
        with torch.inference_mode():  # thread-local, so entered here and not once
            logits = self.logits(rows)
            drawn = sample(logits, [row.draw for row in rows if row.draw is not None]) if drawing else []
        results: list[RowResult] = [None] * len(rows)
        for index, result in zip(drawing, drawn, strict=True):
            results[index] = result
        return results

    def logits(self, rows: Sequence[RowWork]) -> Tensor:
        """One forward pass: the logits [drawing rows, vocabulary] after the last token of each row that draws."""
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        for row in rows:
            count = len(row.token_ids)
            ids.extend(row.token_ids)
            positions.extend(range(row.past, row.past + count))
            spans.append(Span(row.slot, row.past, count))
            if row.draw is not None:
                keep.append(len(ids) - 1)
        with torch.inference_mode():
            return self._forward(PackedStep(spans, self._kv), ids, positions, keep)

    def _forward(self, step: Step, ids: list[int], positions: list[int], keep: list[int]) -> Tensor:
        device = self._device
        with attending(step):
            output = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                logits_to_keep=torch.tensor(keep, dtype=torch.long, device=device),
                **self._cache,
            )
        logits: Tensor = output.logits[0]
        return logits

    def _probe_shape(self, dtype: torch.dtype) -> KVShape:
        """What the layers hand to their attention, seen in a dry pass over two tokens."""
        probe = ShapeProbe()
        with torch.inference_mode():
            self._forward(probe, [0, 0], [0, 1], [1])
        shapes = set(probe.layers.values())
        if len(shapes) != 1 or sorted(probe.layers) != list(range(len(probe.layers))):
            raise ConfigError(f"{type(self._model).__name__} has layers of different shapes, which cannot be served")
        heads, key_dim, value_dim = shapes.pop()
        return KVShape(len(probe.layers), heads, key_dim, value_dim, dtype)


def load_runner(folder: Path, card: ModelCard, options: EngineOptions) -> TorchRunner:
    """A runner that is ready to step: loaded, packed, checked and warm. Raises ConfigError."""
    device = choose_device(options)
    dtype = choose_dtype(options, device)
    torch.set_num_threads(choose_threads(options))
    model = load_model(folder, dtype, device)
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    packed = device.type == "cpu" and pack_linears(model)
    runner = TorchRunner(
        model,
        card,
        rows=choose_rows(options, device),
        kv_budget_bytes=kv_budget(options, device, weight_bytes),
        device=device,
        dtype=dtype,
    )
    runner.batch_invariant = is_batch_invariant(runner)  # also warms every kernel up
    _log.info(
        "model_loaded",
        model=card.name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        packed_linears=packed,
        batch_invariant=runner.batch_invariant,
        rows=runner.rows,
        weight_bytes=weight_bytes,
        kv_budget_bytes=runner.kv_budget_bytes,
    )
    return runner
