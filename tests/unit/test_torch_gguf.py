"""GGUF files become Hugging Face folders that compute the same and tokenise by the file's own rule."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batching.engines.torch.convert import convert_gguf
from batching.engines.torch.gguf import GgufFile
from promptmill.core.errors import ConfigError
from tests.support.gguf_writer import llama_metadata, write_gguf
from tests.support.tiny_models import tiny_model

# A byte-level vocabulary: three special tokens, the 256 bytes, and the merge of two spaces.
SPACE = bytes_to_unicode()[32]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), SPACE * 2]
MERGES = [f"{SPACE} {SPACE}"]
# Heads that share the width evenly, as the file has no word for their size; rows of whole blocks of 32.
SIZE = {"vocab_size": len(TOKENS), "hidden_size": 32, "head_dim": 8, "intermediate_size": 64}


def source(folder, **fields):
    """A model whose weights bfloat16 can hold, as those of a converted file are."""
    model = tiny_model("llama", folder, **SIZE, **fields)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return source(tmp_path_factory.mktemp("source"))


def converted_logits(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(ids).logits


IDS = torch.tensor([[5, 17, 99, 200, 3, 42]])


def test_a_converted_model_computes_what_its_source_computed(tmp_path, model):
    write_gguf(tmp_path / "m.gguf", model, llama_metadata(model, TOKENS, MERGES))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    with torch.inference_mode():
        assert torch.equal(converted_logits(tmp_path / "out", IDS), model(IDS).logits)


def test_a_tied_head_stays_tied(tmp_path):
    tied = source(tmp_path / "source", tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", tied, llama_metadata(tied, TOKENS, MERGES))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    with torch.inference_mode():
        assert torch.equal(converted_logits(tmp_path / "out", IDS), tied(IDS).logits)


def test_quantised_blocks_are_unpacked(tmp_path, model):
    write_gguf(tmp_path / "m.gguf", model, llama_metadata(model, TOKENS, MERGES), quantised=True)
    weights = dict(GgufFile(tmp_path / "m.gguf").tensors(torch.float32))
    for name, weight in model.state_dict().items():
        assert (weights[name] - weight).abs().max() <= weight.abs().max() / 127


def test_the_folder_names_the_ids_that_end_a_text_and_the_template(tmp_path, model):
    write_gguf(tmp_path / "m.gguf", model, llama_metadata(model, TOKENS, MERGES))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2, 0]
    names = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (names["bos_token"], names["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_digits_stand_alone_under_the_smollm_rule(tmp_path, model):
    write_gguf(tmp_path / "m.gguf", model, llama_metadata(model, TOKENS, MERGES))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    # GPT-2's rule would leave one space to the digit and so never merge the two.
    assert tokenizer.encode("a  12").tokens == ["a", SPACE * 2, "1", "2"]
    assert tokenizer.encode("<|im_start|>a").ids[0] == 1


def test_a_file_that_asks_for_it_gets_its_first_token(tmp_path, model):
    metadata = {**llama_metadata(model, TOKENS, MERGES), "tokenizer.ggml.add_bos_token": True}
    write_gguf(tmp_path / "m.gguf", model, metadata)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert tokenizer.encode("a").tokens == ["<|im_start|>", "a"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2'; only llama"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn"}, "scales its rotary positions"),
        ({"llama.block_count": 3}, "does not hold the weights of a llama model"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path, model, changes, message):
    write_gguf(tmp_path / "m.gguf", model, {**llama_metadata(model, TOKENS, MERGES), **changes})
    with pytest.raises(ConfigError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out/model.safetensors").exists()


def test_a_damaged_file_is_refused_by_name(tmp_path, model):
    (tmp_path / "text.gguf").write_text("this is no model")
    with pytest.raises(ConfigError, match=r"text\.gguf"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "out")
    write_gguf(tmp_path / "m.gguf", model, llama_metadata(model, TOKENS, MERGES))
    whole = (tmp_path / "m.gguf").read_bytes()
    for share in (0.001, 0.1, 0.9):  # inside the metadata, inside the tokens, inside the weights
        (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
