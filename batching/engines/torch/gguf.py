"""Reading a GGUF file of the llama architecture as a Hugging Face config and state dict.

transformers' own loader takes 14 s for a 98 MB file and its result cannot be saved; this one takes
under a second. File layout and block formats are read by transformers' internal GGUF modules, so the
version of transformers is bounded in pyproject.toml. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from promptmill.core.errors import ConfigError

# In this order: the first names a prefix, the others a part of what it left.
_RENAMES = [
    (r"^token_embd", "model.embed_tokens"),
    (r"^output_norm", "model.norm"),
    (r"^output\.", "lm_head."),
    (r"^blk\.(\d+)\.", r"model.layers.\1."),
    (r"attn_([qkv])\.", r"self_attn.\1_proj."),
    (r"attn_output", "self_attn.o_proj"),
    (r"attn_norm", "input_layernorm"),
    (r"ffn_norm", "post_attention_layernorm"),
    (r"ffn_(gate|up|down)\.", r"mlp.\1_proj."),
]


class GgufFile:
    """One GGUF file. Raises ConfigError when it cannot be read or is not a plain llama model."""

    def __init__(self, path: Path):
        # Imported here: only a conversion needs these internals.
        try:
            from transformers.integrations.gguf import dequant, reader
        except ImportError as error:
            raise ConfigError(f"this version of transformers cannot read GGUF files ({error})") from error
        self.path = path
        self._dequant = dequant
        self._reader = reader
        try:
            self.metadata: dict[str, Any] = reader.read_gguf_metadata(str(path))[0]
            self._header = reader.GgufHeader.from_file(str(path))
        except (OSError, ValueError, LookupError, struct.error) as error:
            raise ConfigError(f"{path.name} is not a readable GGUF file: {error}") from error
        end = max((tensor.offset + tensor.nbytes for tensor in self._header.tensors), default=0)
        if path.stat().st_size < self._header.data_start + end:
            raise ConfigError(f"{path.name} is cut short; fetch it again")
        self._names = {tensor.name for tensor in self._header.tensors}
        self._refuse_what_is_not_llama()

    def _refuse_what_is_not_llama(self) -> None:
        architecture = self.metadata["general.architecture"]
        if architecture != "llama":
            raise ConfigError(f"{self.path.name} holds a model of architecture {architecture!r}; only llama can be converted from GGUF")
        if self.metadata.get("llama.expert_count"):
            raise ConfigError(f"{self.path.name} holds a mixture of experts, which cannot be converted from GGUF")
        scaling = self.metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._names:
            raise ConfigError(f"{self.path.name} scales its rotary positions, which cannot be converted from GGUF")

    def config(self) -> dict[str, Any]:
        """The fields of a Hugging Face ``LlamaConfig``."""
        md = self.metadata
        heads = md["llama.attention.head_count"]
        theta = md.get("llama.rope.freq_base", 10000.0)
        vocab = next(tensor.shape[0] for tensor in self._header.tensors if tensor.name == "token_embd.weight")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": md["llama.embedding_length"],
            "intermediate_size": md["llama.feed_forward_length"],
            "num_hidden_layers": md["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": md.get("llama.attention.head_count_kv", heads),
            "head_dim": md.get("llama.attention.key_length", md["llama.embedding_length"] // heads),
            "max_position_embeddings": md["llama.context_length"],
            # A float32 in the file: 9.999999747378752e-06 was written as 1e-05.
            "rms_norm_eps": float(f"{md['llama.attention.layer_norm_rms_epsilon']:.7g}"),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "attention_bias": "blk.0.attn_q.bias" in self._names,
            "tie_word_embeddings": "output.weight" not in self._names,
            "bos_token_id": md.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": md.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": md.get("tokenizer.ggml.padding_token_id"),
        }

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, weight) of every tensor, one at a time."""
        shapes = {tensor.name: tensor.shape for tensor in self._header.tensors}
        config = self.config()
        for name, stored in self._reader.load_gguf_state_dict(self._header).items():
            weight = stored[...]
            if stored.ggml_type in self._dequant.GGML_BLOCK:
                weight = self._dequant.dequantize(weight, stored.ggml_type, torch.float32).reshape(shapes[name])
            if match := re.search(r"attn_([qk])\.", name):
                heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
                weight = _undo_rope_order(weight, heads)
            yield _rename(name), weight.to(dtype).contiguous()


def _rename(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _undo_rope_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the rows of each q and k head as (pair, half); Hugging Face wants (half, pair)."""
    split = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)
