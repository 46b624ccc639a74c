"""Models of random weights in shapes that are known, made on the device itself, and an engine over them.

Speed hangs on shapes and number types, not on what the weights say; so nothing has to be fetched or carried.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

from batching.engine import BatchingEngine
from batching.engines.torch.device import kv_budget
from batching.engines.torch.fit import replace_attention
from batching.engines.torch.loader import cache_argument
from batching.engines.torch.runner import TorchRunner
from batching.options import EngineOptions
from batching.request import ServedModel
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.engine import GenRequest
from promptmill.core.jobs import Priority, SamplingParams
from promptmill.core.models import ModelCard

CONTEXT = 1024  # tokens of a row; the prompts and answers here are shorter
_EOS = 2

_COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "135m": {  # SmolLM2-135M
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "8b": {  # Llama 3 8B
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes that a step must read: ``weights`` once, ``kv_token`` for each token that a row has in its cache."""

    weights: int
    kv_token: int


def random_model(shape: str, device: torch.device) -> Any:
    """In bfloat16, on a CPU in float32, which every CPU computes at a fair speed. It names no end of text."""
    config = LlamaConfig(**_COMMON, **SHAPES[shape], max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(7)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model.eval().requires_grad_(False)


def weigh(model: Any) -> Weight:
    """An embedding that is not the head as well is looked up, not read."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    kv_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    return Weight(sum(weight.nbytes for weight in model.parameters()) - looked_up, kv_token)


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte level, every id with a text of its own, so that turning ids into text costs what it does elsewhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *(f"Ġ{index:x}" for index in range(len(alphabet), vocab_size))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_engine(model: Any, shape: str, rows: int) -> BatchingEngine:
    """An engine over ``model`` that is ready to be stepped on this thread. The model attends by the engine's steps
    from now on. Raises ConfigError when they give other logits than its own attention."""
    device = model.device
    options = EngineOptions("torch", (Path(shape),), rows=rows, reserved_rows=0, idle_window_s=0.0)
    card = ModelCard(shape, "0" * 16, "random weights", CONTEXT, model.config.vocab_size, (_EOS,), None, None, None, 0)
    replace_attention(model, cache_argument(model))
    budget = kv_budget(options, device, sum(weight.nbytes for weight in model.parameters()))
    runner = TorchRunner(model, card, rows=rows, reserved=0, kv_budget_bytes=budget, device=device, native=None)
    engine = BatchingEngine(lambda: runner, {shape: ServedModel(card, byte_tokenizer(card.vocab_size))}, options)
    engine.prepare()
    return engine


def request(name: str, shape: str, prompt: list[int], new_tokens: int) -> GenRequest:
    """Exactly ``new_tokens`` tokens, greedy."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return GenRequest(name, shape, tuple(prompt), sampling, Priority.STANDARD, SYSTEM_CLOCK.monotonic())


def prompts(rows: int, vocab_size: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """[rows][tokens], all different, so that nothing can be shared."""
    generator = torch.Generator().manual_seed(1000 * seed + rows)
    return torch.randint(3, vocab_size, (rows, tokens), generator=generator).tolist()
