"""The hook in the unchanged Hugging Face forward, over both pools, against transformers' own eager forward."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from batching.engines.torch.attention import NAME, Flavour, PassCache, ShapeProbe, Span, attending
from batching.engines.torch.kv import KVPool, KVShape, create_pool
from batching.engines.torch.loader import cache_argument
from batching.engines.torch.native import load_native
from tests.support.kernels import KERNELS_DIR
from tests.support.tiny_models import FAMILIES, tiny_model

LENGTHS = (1, 6, 19, 70)


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request):
    if request.param == "torch":
        return None
    native = load_native(KERNELS_DIR)
    assert native is not None
    return native


def forward(model, step, ids, positions) -> torch.Tensor:
    with attending(step), torch.inference_mode():
        inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
        return model(**inputs, **{cache_argument(model): PassCache(), "use_cache": False}).logits[0]


def packed(model, pool: KVPool, chunks) -> list[torch.Tensor]:
    """One step over (table, past, token ids) of several rows: the logits of each row's tokens."""
    spans = [Span(table, past, len(ids)) for table, past, ids in chunks]
    all_ids = [token for _, _, ids in chunks for token in ids]
    positions = [past + n for _, past, ids in chunks for n in range(len(ids))]
    return list(forward(model, pool.step(spans), all_ids, positions).split([span.count for span in spans]))


def pool_for(model, kernels) -> KVPool:
    probe = ShapeProbe()
    forward(model, probe, [0, 0], [0, 1])
    (shape,) = set(probe.layers.values())
    return create_pool(KVShape(len(probe.layers), *shape, model.dtype), 8, torch.device("cpu"), kernels)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_chunks_and_decodes_in_one_pack_equal_the_eager_forward_of_each_text(family, kernels, tmp_path):
    model = tiny_model(family, tmp_path)
    rng = random.Random(5)
    texts = [[rng.randrange(97) for _ in range(length)] for length in LENGTHS]
    with torch.inference_mode():
        wanted = [model(torch.tensor([text])).logits[0] for text in texts]
    model.set_attn_implementation(NAME)
    pool = pool_for(model, kernels)
    tables = [[3], [1], [6], [5, 2]]
    past = [0] * len(texts)
    while rows := [row for row, text in enumerate(texts) if past[row] < len(text)]:
        # Chunks of 1 to 9 tokens; the last 8 tokens of a text come one by one, as decodes do.
        counts = [min(rng.randint(1, 9), max(len(texts[row]) - 8 - past[row], 1)) for row in rows]
        chunks = [(tables[row], past[row], texts[row][past[row] : past[row] + count]) for row, count in zip(rows, counts, strict=True)]
        for row, logits in zip(rows, packed(model, pool, chunks), strict=True):
            assert (logits - wanted[row][past[row] : past[row] + len(logits)]).abs().max() < 1e-4
            past[row] += len(logits)


def test_a_window_is_honoured_at_all(tmp_path):
    # Guards the test above: without its window the same model gives other logits.
    narrow = tiny_model("mistral", tmp_path / "narrow")
    wide = tiny_model("mistral", tmp_path / "wide", sliding_window=None)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert (narrow(ids).logits[0, -1] - wide(ids).logits[0, -1]).abs().max() > 1e-2


def test_the_hook_hands_on_all_that_a_family_asks_for(tmp_path):
    model = tiny_model("gpt_oss", tmp_path)
    model.set_attn_implementation(NAME)
    seen: dict[int, Flavour] = {}

    def attend(layer, query, key, value, flavour):
        seen[layer] = flavour
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    forward(model, SimpleNamespace(attend=attend), [1, 2], [0, 1])
    assert [seen[layer].window for layer in (0, 1)] == [7, None]
    assert seen[0].sinks.shape == (4,)
    assert seen[0].scaling == pytest.approx(8**-0.5)


def test_a_probe_tells_unequal_key_and_value_dims_apart(tmp_path):
    model = tiny_model("llama", tmp_path)
    model.set_attn_implementation(NAME)
    probe = ShapeProbe()
    forward(model, probe, [0, 0], [0, 1])
    assert probe.layers == {0: (2, 8, 8), 1: (2, 8, 8)}
    probe.attend(2, torch.zeros(1, 4, 3, 24), torch.zeros(1, 4, 3, 24), torch.zeros(1, 4, 3, 16), Flavour())
    assert probe.layers[2] == (4, 24, 16)


def test_steps_of_two_threads_do_not_meet(tmp_path):
    model = tiny_model("llama", tmp_path)
    model.set_attn_implementation(NAME)

    def probed(_):
        probe = ShapeProbe()
        forward(model, probe, [0] * 40, list(range(40)))
        return sorted(probe.layers)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(probed, range(8))) == [[0, 1]] * 8
