"""Tiny random models of real families, saved as prepared folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from batching.options import EngineOptions
from promptmill.core.models import ModelCard

# Small, but with everything that tells the families apart: grouped heads, biases, windows, caps, sinks.
# (An intermediate size that is not a multiple of the vector width makes silu depend on its place in the batch.)
_SIZE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    "gpt_oss": {
        "sliding_window": 7,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny_model(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """A random model, saved in ``folder``; returned with eager attention as the reference."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **{**_SIZE, **FAMILIES.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # initialised to zero, where they would not be missed
                weight.normal_()
    model.save_pretrained(folder)
    card(folder).save(folder)
    return model


def card(folder: Path, vocab_size: int = 97) -> ModelCard:
    return ModelCard(folder.name, "0" * 16, "test", 128, vocab_size, (2,), 1, None, None, 0)


def cpu_options(folder: Path, **changes: Any) -> EngineOptions:
    return EngineOptions("torch", (folder,), **{"device": "cpu", "dtype": "float32", "rows": 4, "threads": 2, **changes})
