"""Llama models of common sizes with random weights, as prepared folders: speed does not hang on what the weights are."""

import shutil
from pathlib import Path

from bench.engines import model_folder
from promptmill.core.models import ModelCard

# hidden size, size of the MLP, layers, heads, kv heads, size of a head, tied head
SHAPES = {
    "30m": (256, 704, 10, 4, 2, 64, True),
    "135m": (576, 1536, 30, 9, 3, 64, True),  # SmolLM2-135M
    "360m": (960, 2560, 32, 15, 5, 64, True),  # SmolLM2-360M
    "1b": (2048, 8192, 16, 32, 8, 64, True),  # Llama-3.2-1B, with the vocabulary of the others
}


def random_model(shape: str, folder: Path) -> Path:
    """Makes ``folder``, with the tokenizer of the served model. Raises KeyError for an unknown shape."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import batching.engines.torch  # noqa: F401  (before torch: it settles how threads wait)

    hidden, inner, layers, heads, kv_heads, head_dim, tied = SHAPES[shape]
    served = model_folder()
    card = ModelCard.load(served)
    config = LlamaConfig(
        vocab_size=card.vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=card.context_length,
        tie_word_embeddings=tied,
        bos_token_id=card.eos_token_ids[0],
        eos_token_id=card.eos_token_ids[0],
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "promptmill.json"):
        if (served / name).is_file():
            shutil.copyfile(served / name, folder / name)
    return folder
