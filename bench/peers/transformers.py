"""transformers' own two ways: ``generate`` in static batches, and its continuous batching."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import batching.engines.torch  # noqa: F401  (before torch: it settles how threads wait)

# isort: split
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from bench.peers import Missing
from bench.workloads import Request
from promptmill.core.clock import SYSTEM_CLOCK

STATIC_BATCH = 16
_BLOCKS, _BLOCK_TOKENS = 96, 256
_LIMIT_S = 600.0


def _load(folder: Path, dtype: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return model.eval()


class Generate:
    """Batches in order of arrival, left-padded, each run to its longest output; the tokens of shorter ones beyond their
    end are computed and not counted."""

    name = "generate"

    def __init__(self, folder: Path, dtype: str):
        self._model = _load(folder, dtype)

    def run(self, requests: Sequence[Request], rows: int) -> float:
        size = 1 if rows == 1 else STATIC_BATCH
        began = SYSTEM_CLOCK.monotonic()
        for begin in range(0, len(requests), size):
            batch = requests[begin : begin + size]
            longest, most = max(len(request.prompt_ids) for request in batch), max(request.max_tokens for request in batch)
            ids = torch.tensor([[0] * (longest - len(request.prompt_ids)) + list(request.prompt_ids) for request in batch])
            mask = torch.tensor([[0] * (longest - len(request.prompt_ids)) + [1] * len(request.prompt_ids) for request in batch])
            with torch.inference_mode():
                made = self._model.generate(
                    ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0
                )
            assert made.shape[1] == longest + most
        return SYSTEM_CLOCK.monotonic() - began

    def close(self) -> None:
        del self._model


class ContinuousBatching:
    name = "hf-cb"

    def __init__(self, folder: Path, dtype: str):
        self._model = _load(folder, dtype)

    def run(self, requests: Sequence[Request], rows: int) -> float:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(r.max_tokens for r in requests))
        settings = ContinuousBatchingConfig(num_blocks=_BLOCKS, page_size=_BLOCK_TOKENS, max_requests_per_batch=rows)
        manager = self._model.init_continuous_batching(generation_config=config, continuous_batching_config=settings)
        manager.start()
        try:
            began = SYSTEM_CLOCK.monotonic()
            lengths: dict[str, int] = {}
            for number, request in enumerate(requests):
                name = manager.add_request(
                    list(request.prompt_ids), request_id=f"r{number}", max_new_tokens=request.max_tokens, eos_token_id=-1
                )
                if rows == 1:
                    self._take(manager, lengths, name)
            while len(lengths) < len(requests):
                self._take(manager, lengths, None)
            seconds = SYSTEM_CLOCK.monotonic() - began
        finally:
            manager.stop(block=True)
        short = [name for number, request in enumerate(requests) if lengths[name := f"r{number}"] != request.max_tokens]
        if short:
            raise Missing(f"hf-cb ended {len(short)} requests early")
        return seconds

    def _take(self, manager: Any, lengths: dict[str, int], name: str | None) -> None:
        result = manager.get_result(request_id=name, timeout=_LIMIT_S)
        if result is None:
            raise Missing("hf-cb gave no result")
        if result.is_finished():
            lengths[result.request_id] = len(result.generated_tokens)

    def close(self) -> None:
        del self._model
