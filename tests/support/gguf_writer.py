"""A GGUF file from a Hugging Face llama, as llama.cpp's converter lays it out (a few float32 and Q8_0 tensors)."""

import re
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

F32, Q8_0 = 0, 8
_ALIGNMENT = 32
_RENAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("self_attn.o_proj", "attn_output"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
]


def write_gguf(path: Path, model: PreTrainedModel, metadata: dict[str, Any], *, quantised: bool = False) -> None:
    """``quantised`` stores the matrices as Q8_0: blocks of 32 values, a float16 scale and 32 int8."""
    config = model.config
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for heads, letter in ((config.num_attention_heads, "q"), (config.num_key_value_heads, "k")):
            if f".{letter}_proj." in name:
                weight = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        for ours, theirs in _RENAMES:
            name = name.replace(ours, theirs)
        name = re.sub(r"self_attn\.([qkv])_proj", r"attn_\1", name)
        name = re.sub(r"mlp\.(\w+)_proj", r"ffn_\1", name)
        tensors[name] = (Q8_0, weight) if quantised and weight.dim() == 2 else (F32, weight)

    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, weight) in tensors.items():
        head += _string(name) + struct.pack(f"<I{weight.dim()}QIQ", weight.dim(), *reversed(weight.shape), kind, len(data))
        data += _q8_0(weight) if kind == Q8_0 else weight.float().contiguous().numpy().tobytes()
        data += b"\0" * (-len(data) % _ALIGNMENT)
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + data)


def llama_metadata(model: PreTrainedModel, tokens: list[str], merges: list[str]) -> dict[str, Any]:
    config = model.config
    return {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _q8_0(weight: torch.Tensor) -> bytes:
    blocks = weight.float().reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    levels = (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), levels.view(torch.uint8)], 1).numpy().tobytes()
