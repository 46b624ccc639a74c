"""Loading a Hugging Face model from a prepared folder, and refusing those that do not fit the packed step."""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from batching.engines.torch.fit import replace_attention
from promptmill.core.errors import ConfigError

_LAYER_TYPES = {"full_attention", "sliding_attention"}  # others keep a recurrent state or need a mask of their own


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model in evaluation mode, with its attention replaced by the packed step's.

    Raises ConfigError for a damaged folder and for a family that cannot be served.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _refuse_what_does_not_fit(config)
        model = _from_safetensors(folder, config, dtype)
        if model is None:
            # Weights stored under other names, or buffers that only its own loader fills.
            model = _from_pretrained(folder, config, dtype)
    except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model in {folder}: {str(error).splitlines()[0]}") from error
    model.eval().requires_grad_(False)
    _refuse_what_cannot_step(model)
    model.to(device)
    replace_attention(model, cache_argument(model))
    return model


def cache_argument(model: nn.Module) -> str:
    """What the forward pass calls its KV cache: ``cache`` since transformers 5.2x, before that ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _refuse_what_does_not_fit(config: Any) -> None:
    if config.is_encoder_decoder:
        raise ConfigError(f"a model of type {config.model_type} has an encoder and a decoder; only decoders can be served")
    others = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES)
    if others:
        kinds = ", ".join(others)
        raise ConfigError(
            f"a model of type {config.model_type} has layers of type {kinds}; only those that attend to all or a window can be served"
        )


def _refuse_what_cannot_step(model: nn.Module) -> None:
    kind, parameters = type(model).__name__, inspect.signature(model.forward).parameters
    if "logits_to_keep" not in parameters:
        raise ConfigError(f"{kind} cannot compute the logits of chosen tokens alone; this model cannot be served")
    if "position_ids" not in parameters:
        raise ConfigError(f"{kind} cannot be told where in its text a token stands; this model cannot be served")
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]  # not those of an eye or an ear
    if any(getattr(module, "is_causal", None) is False for module in attentions):
        raise ConfigError(f"{kind} attends to both sides of a token; only decoders can be served")


def _from_safetensors(folder: Path, config: Any, dtype: torch.dtype) -> Any | None:
    """The model with its weights assigned, never initialised; None when names or buffers need more than that."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            weights.update({name: tensors.get_tensor(name).to(dtype) for name in tensors.keys()})  # noqa: SIM118 (not a dict)
    result = model.load_state_dict(weights, strict=False, assign=True)
    if result.unexpected_keys:
        return None
    model.tie_weights()
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RotaryEmbedding") and any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                setattr(parent, name, type(child)(config=config))
    left = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    return None if left else model


def _from_pretrained(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """transformers' own way. Raises ValueError for weights that are missing, which it would make up."""
    logging.disable_progress_bar()  # standard error holds log lines only
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    model, info = loaded
    if missing := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise ValueError(f"its files do not hold {missing[0]} as the model needs it")
    return model


def _weight_files(folder: Path) -> list[Path]:
    """The shards that the index names, else the one file. Raises FileNotFoundError."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]
