"""Every family that is served: the logits of transformers, and bits that hang on nothing else where that is said."""

import re
from pathlib import Path

import pytest
import torch

from batching.engines.torch.runner import load_runner
from tests.support.kernels import KERNELS_DIR
from tests.support.packed import run_packed, text
from tests.support.tiny_models import FAMILIES, card, cpu_options, tiny_model

pytestmark = pytest.mark.xdist_group("torch_engine")

PROMPTS = [text(length) for length in (1, 2, 31, 70, 13)]
# Where the same token has other bits in other company, with the C kernels too: the products of the experts, and the
# one that chooses among them, are torch's own, whose kernel hangs on the number of tokens.
UNSTEADY = {"gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """The family's name, a prepared folder and the model with eager attention."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, tiny_model(request.param, folder)


def runner_of(folder, kernels, **options):
    return load_runner(folder, card(folder), cpu_options(folder, threads=1, rows=8, kernels=kernels, kernels_dir=KERNELS_DIR, **options))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_chunks_and_decodes_of_ragged_rows_in_one_step_give_the_logits_of_each_text_alone_in_transformers(family, kernels):
    _, folder, reference = family
    for prompt, (whole, logits) in zip(PROMPTS, run_packed(runner_of(folder, kernels), PROMPTS, chunk=19), strict=True):
        with torch.inference_mode():
            wanted = reference(input_ids=torch.tensor([whole[:-1]]), use_cache=False).logits[0]
        assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert whole[len(prompt) :] == wanted[len(prompt) - 1 :].argmax(-1).tolist()


def test_a_row_has_the_same_bits_alone_and_in_company_where_the_runner_says_so(family):
    name, folder, _ = family
    for dtype in ("float32",) if name in UNSTEADY else ("float32", "bfloat16"):  # torch's grouped product in bfloat16 lacks these widths
        check_bits(runner_of(folder, "native", dtype=dtype), steady=name not in UNSTEADY)


def check_bits(runner, *, steady):
    alone = [run_packed(runner, [prompt], chunk=96)[0] for prompt in PROMPTS]
    companies = [run_packed(runner, PROMPTS, chunk) for chunk in (1, 5, 19, 64)]
    equal = all(
        torch.equal(logits, logits_alone) for company in companies for (_, logits), (_, logits_alone) in zip(company, alone, strict=True)
    )
    assert equal == steady
    assert runner.caps.batch_invariant == equal


def test_the_table_of_families_says_what_is_tested():
    page = Path(__file__).resolve().parents[2] / "docs" / "models.md"
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == {name: "no" if name in UNSTEADY else "yes" for name in FAMILIES}
