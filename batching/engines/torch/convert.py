"""A GGUF file becomes a Hugging Face folder: weights, tokenizer, chat template. Done once per file."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM

from batching.engines.torch.gguf import GgufFile
from promptmill.core.errors import ConfigError


def convert_gguf(path: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json,
    tokenizer_config.json and, where the file has one, chat_template.jinja into ``folder``.

    Raises ConfigError for a file that is damaged or not of the llama architecture.
    """
    source = GgufFile(path)
    config = source.config()
    weights = dict(source.tensors(torch.bfloat16))
    _check_names(config, weights, path)
    tokenizer, names = _tokenizer(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
    _write_json(folder / "config.json", {**config, "dtype": "bfloat16"})
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": _end_ids(source.metadata, tokenizer),
            "pad_token_id": config["pad_token_id"],
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    template = names.pop("chat_template", None)
    _write_json(
        folder / "tokenizer_config.json",
        {
            **names,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}, indent=2) + "\n", encoding="utf-8")


def _check_names(config: dict[str, Any], weights: dict[str, torch.Tensor], path: Path) -> None:
    """The file must hold exactly the weights that the model object will ask for."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        wanted.pop("lm_head.weight", None)
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if wanted != found:
        wrong = sorted(wanted.items() ^ found.items())[0]
        raise ConfigError(f"{path.name} does not hold the weights of a llama model; the first difference is {wrong[0]} {wrong[1]}")


def _tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and the fields of tokenizer_config.json, among them ``chat_template``."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
    except ImportError as error:
        raise ConfigError("GGUF files need transformers 5.23 or newer") from error

    try:
        architecture, parts, names = get_gguf_tokenizer(str(path))
        tokenizer: Tokenizer = convert_gguf_tokenizer(architecture, parts)[0]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path.name} holds a tokenizer that cannot be converted: {error}") from error
    if parts.get("pre_tokenizer_type") == "smollm":
        # transformers does not know this rule and would use GPT-2's: digits stand alone.
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if names.get("add_bos_token") and names.get("bos_token"):
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return tokenizer, {key: value for key, value in names.items() if value is not None}


def _end_ids(metadata: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Ids that end a text: the file's own, then ``<|endoftext|>`` where the vocabulary has it."""
    ids = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id"), tokenizer.token_to_id("<|endoftext|>")]
    return list(dict.fromkeys(number for number in ids if number is not None))
