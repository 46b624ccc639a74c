"""The Makefile: it lists itself, and it says what is missing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As from a shell, also when the tests themselves were started by make."""
    plain = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, env=plain)


def test_make_alone_lists_every_target():
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:")]
    done = make(ROOT)
    assert re.findall(r"^ +make (\w+)", done.stdout, re.MULTILINE) == line.split()[1:]


def test_a_machine_without_python_is_told_what_is_needed(tmp_path: Path):
    folder = tmp_path / "a b"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    done = make(folder, "PYTHON=", "setup")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].startswith("promptmill needs Python 3.11")
    assert not (folder / ".venv").exists()


def test_a_setup_without_changes_installs_nothing():
    """The stamp is newer than what it was made from, so only the model is looked at."""
    stamp, sources = ".venv/.installed", ["pyproject.toml", "constraints.txt"]
    old = [word for name in sources for word in ("-o", name)]
    done = make(ROOT, "-n", "-o", stamp, *old, "setup")
    assert done.stdout.splitlines() == [".venv/bin/python -m promptmill models pull smollm2-135m-instruct"]
