"""The benchmark of the engine: it runs, counts what was asked for, and says who is missing."""

import argparse
import subprocess
import sys

import pytest

from bench import engine
from bench.peers import Missing
from bench.peers.vllm import VLLM
from bench.shapes import SHAPES, random_model
from bench.workloads import Request

pytestmark = pytest.mark.xdist_group("torch_engine")

FEW = [Request(list(range(100, 140)), 6), Request(list(range(200, 209)), 3), Request(list(range(300, 377)), 9)]


def arguments(**given):
    defaults = {"workload": "few", "dtype": "float32", "repeats": 2, "sampled": False, "vllm_python": "", "llama_server": "", "gguf": None}
    return argparse.Namespace(**{**defaults, **given})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_model("30m", tmp_path_factory.mktemp("shape") / "30m")


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setitem(engine.WORKLOADS, "few", lambda: FEW)


@pytest.mark.parametrize("rows", [1, 2])
def test_all_take_turns_and_the_missing_are_named(folder, rows):
    found = engine.measure(arguments(sampled=True), ["generate", "vllm", "llama-server"], folder, "30m", rows)
    assert found["tok_s"].keys() == {"ours", "sampled", "generate"}
    assert all(len(seconds) == 2 for seconds in found["seconds"].values())
    assert found["ratio_generate"] == pytest.approx(found["tok_s"]["ours"] / found["tok_s"]["generate"], abs=0.01)
    assert found["missing"].keys() == {"vllm", "llama-server"}


def test_a_peer_that_ends_is_missing(folder):
    with pytest.raises(Missing, match="ended"):
        VLLM(folder, "float32", 2, "/bin/false")
    with pytest.raises(Missing, match="does not run"):
        VLLM(folder, "float32", 2, "/no/such/python")


def test_an_unknown_peer_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "bench.engine", "mixed64", "--peers", "ollama"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "no such peer: ollama" in done.stderr


def test_the_shapes_are_what_their_names_say():
    for name, (hidden, inner, layers, heads, kv_heads, head_dim, _) in SHAPES.items():
        layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
        total = layers * layer + 49_152 * hidden
        said = float(name[:-1]) * (1e9 if name.endswith("b") else 1e6)
        assert 0.6 * said < total < 1.3 * said
