"""Writes a llama model's folder as a GGUF file in bfloat16, for llama-server.

    python -m bench.peers.gguf_export MODEL_FOLDER OUT.gguf        # needs the package gguf

The rotary halves of q and k are interleaved, as llama.cpp wants them; the tokenizer is a stand-in of the right
size, since the benchmark sends token ids.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(folder: Path, out: Path) -> None:
    import gguf  # not a dependency of the project

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{number}>" for number in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, weight: torch.Tensor) -> None:
        if weight.dim() == 1:
            writer.add_tensor(name, weight.float().numpy())
        else:
            raw = weight.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    if "lm_head.weight" in weights:
        add("output.weight", weights["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        for name, theirs in NAMES.items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            if theirs in ("attn_q", "attn_k"):
                count = heads if theirs == "attn_q" else kv_heads
                weight = weight.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(weight.shape)
            add(f"blk.{layer}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
