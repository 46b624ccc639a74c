"""Tiny random models of real families, saved as prepared folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from batching.options import EngineOptions
from promptmill.core.models import ModelCard

# Small, but with everything that tells the families apart: grouped heads, biases, windows, caps, sinks, experts.
# Widths that do not fill torch's vectors, so that a function which rounds the rest otherwise shows.
_SIZE = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 60,
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
_WINDOW = {"sliding_window": 7}
_MIXED_WINDOW = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 28}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": _WINDOW,
    "gemma2": {**_MIXED_WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    "gemma3_text": {**_MIXED_WINDOW, "query_pre_attn_scalar": 8},
    "gpt_oss": {**_MIXED_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "phi3": _WINDOW,
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "cohere2": {**_MIXED_WINDOW, "logit_scale": 0.5},
    "exaone4": _MIXED_WINDOW,
    "glm4": {},
    "gpt2": {},
    "gpt_neox": {},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": _WINDOW,
    "opt": {"ffn_dim": 60, "word_embed_proj_dim": 40},
    "deepseek_v3": {
        **_EXPERTS,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 4,
        "v_head_dim": 6,
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
