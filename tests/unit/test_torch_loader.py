"""Models that load, and models that are refused with the reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from batching.engines.torch.loader import load_model
from promptmill.core.errors import ConfigError
from tests.support.tiny_models import FAMILIES, tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
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


_SMALL = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("t5", {}, "encoder and a decoder"),
        ("qwen3_next", {"num_hidden_layers": 4}, "linear_attention"),
        ("mamba", {}, "linear_attention"),
        ("lfm2", {"full_attn_idxs": [1]}, "conv"),
        ("llama4_text", {}, "chunked_attention"),
    ],
)
def test_a_family_that_does_not_fit_is_refused_with_the_reason_before_its_weights_are_asked_for(family, fields, message, tmp_path):
    AutoConfig.for_model(family, **{**_SMALL, **fields}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("falcon", {"alibi": True, "num_kv_heads": 2}, "attention of its own"),
        ("bloom", {}, "where in its text a token stands"),
        ("mpt", {"d_model": 16}, "where in its text a token stands"),
        ("xlstm", {"num_heads": 2, "num_blocks": 1}, "logits of chosen tokens"),
        ("bert", {"intermediate_size": 16}, "both sides"),
        # Built like any decoder, but its attention is the difference of two: only the logits tell.
        ("diffllama", {"intermediate_size": 16, "initializer_range": 0.3}, "other logits"),
    ],
)
def test_a_model_that_cannot_run_in_packed_steps_is_refused_with_the_reason(family, fields, message, tmp_path):
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **{**_SMALL, "initializer_range": 0.3, **fields})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, torch.float32, CPU)


def test_other_logits_are_seen_through_the_rounding_of_bfloat16(tmp_path):
    tiny_model("diffllama", tmp_path)
    with pytest.raises(ConfigError, match="other logits"):
        load_model(tmp_path, torch.bfloat16, CPU)


def test_weights_that_are_not_numbers_are_no_reason_to_refuse(tmp_path):
    source = tiny_model("llama", tmp_path)
    for token in (0, 39):
        with torch.no_grad():
            source.get_input_embeddings().weight[token] = torch.nan
        source.save_pretrained(tmp_path)
        load_model(tmp_path, torch.float32, CPU)


def test_a_model_may_be_loaded_in_bfloat16(tmp_path):
    for family in ("llama", "gemma2", "mixtral", "deepseek_v3"):
        tiny_model(
            family, tmp_path / family, intermediate_size=64, moe_intermediate_size=32
        )  # torch's grouped product needs multiples of 8
        assert load_model(tmp_path / family, torch.bfloat16, CPU).dtype is torch.bfloat16


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
