"""Models that load, and models that are refused with the reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from batching.engines.torch.loader import load_model
from promptmill.core.errors import ConfigError
from tests.support.tiny_models import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gemma3_text", "qwen3"])
def test_a_loaded_model_holds_the_saved_weights_and_fresh_buffers(family, tmp_path):
    source = tiny_model(family, tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    wanted = source.state_dict()
    assert wanted.keys() == model.state_dict().keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in model.state_dict().items())
    buffers = dict(source.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_weights_may_lie_in_several_files(tmp_path):
    source = tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    source.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = load_model(tmp_path, torch.float32, CPU)
    assert all(torch.equal(weight, source.state_dict()[name]) for name, weight in model.state_dict().items())


def test_a_missing_weight_is_refused(tmp_path):
    tiny_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"up_proj"):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("t5", {}, "encoder and a decoder"),
        ("falcon", {"alibi": True, "num_kv_heads": 2}, "attention of its own"),
        ("qwen3_next", {"num_hidden_layers": 4}, "linear_attention"),
    ],
)
def test_a_family_that_does_not_fit_is_refused_with_the_reason(family, fields, message, tmp_path):
    config = AutoConfig.for_model(family, vocab_size=32, hidden_size=16, num_attention_heads=2, **{"num_hidden_layers": 1, **fields})
    if family == "falcon":
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    else:
        config.save_pretrained(tmp_path)  # refused before its weights are asked for
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, torch.float32, CPU)


def test_a_damaged_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_model(tmp_path, torch.float32, CPU)
    tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_model(tmp_path, torch.float32, CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))
    with pytest.raises(ConfigError, match="nobody_knows"):
        load_model(tmp_path, torch.float32, CPU)
