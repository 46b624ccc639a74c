"""The torch engine over a random llama with the tiny tokenizer: small enough to run thousands of steps."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from batching.engine import BatchingEngine
from batching.engines import create_engine
from batching.options import EngineOptions
from promptmill.core.engine import EngineEvent, GenRequest
from promptmill.core.models import ModelCard
from tests.support.engine import EOS, START, make_request, run_to_end, tiny_tokenizer

CONTEXT = 512
NAN_TOKEN = 7  # its embedding is not a number, if the model is made so


def random_llama(folder: Path, *, context: int = CONTEXT, nan_token: bool = False, **config: Any) -> Path:
    """A prepared model: 3 layers, grouped heads, a few hundred ids."""
    torch.manual_seed(3)
    size = tiny_tokenizer().get_vocab_size()
    shape = {
        "vocab_size": size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": context,
        "initializer_range": 0.2,
        "bos_token_id": START,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        **config,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    if nan_token:
        with torch.no_grad():
            model.get_input_embeddings().weight[NAN_TOKEN] = float("nan")
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    ModelCard("tiny", "0" * 16, "test", context, size, (EOS,), START, "<|start|>", "<|end|>", 0).save(folder)
    return folder


def torch_engine(folder: Path, **options: Any) -> BatchingEngine:
    """Prepared, to be stepped by hand."""
    defaults = {"device": "cpu", "dtype": "float32", "rows": 32, "reserved_rows": 0, "threads": 2, "idle_window_s": 0.0}
    defaults |= {"kv_cache_bytes": 64 << 20}
    engine = create_engine(EngineOptions("torch", (folder,), **{**defaults, **options}))
    engine.prepare()
    return engine


def ragged(count: int, *, longest: int = 256, new_tokens: tuple[int, int] = (8, 40), **sampling: Any) -> list[GenRequest]:
    """Requests like those of the workload mixed64: prompts of 32 and more tokens, exact output lengths."""
    rng = random.Random(7)
    size = tiny_tokenizer().get_vocab_size()
    return [
        make_request(
            f"r{n}",
            [rng.randrange(8, size) for _ in range(rng.randint(32, longest))],
            max_tokens=rng.randint(*new_tokens),
            ignore_eos=True,
            **sampling,
        )
        for n in range(count)
    ]


def run_all(engine: BatchingEngine, requests: Sequence[GenRequest]) -> list[EngineEvent]:
    for request in requests:
        engine.submit(request)
    return run_to_end(engine)


def _resume(folder: str, request: dict[str, Any]) -> None:
    """In a process of its own: go on with a request, print all its token ids."""
    made = make_request("resumed", **request)
    events = run_all(torch_engine(Path(folder)), [made])
    print(json.dumps(events[-1].outcome.choices[0].token_ids))  # type: ignore[union-attr]


if __name__ == "__main__":
    _resume(sys.argv[1], json.loads(sys.stdin.read()))
