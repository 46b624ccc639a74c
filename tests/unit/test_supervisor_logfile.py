"""The log of a child: bounded while the child writes, and its last words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from promptmill.supervisor.logfile import LogFile


def test_a_full_log_is_cut_under_the_hands_of_its_writer(tmp_path: Path):
    log = LogFile(tmp_path, "some", max_bytes=100)
    script = "import sys\nfor line in sys.stdin: print(line, end='', flush=True); print('.', file=sys.stderr, flush=True)"
    with log.open() as output:
        writer = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE, text=True)
    with writer:
        assert writer.stdin
        assert writer.stderr

        def write(line: str) -> None:
            writer.stdin.write(line + "\n")
            writer.stdin.flush()
            writer.stderr.readline()  # it is in the file now

        write("a" * 200)
        log.bound()
        assert log.path.read_text() == ""
        assert log.path.with_suffix(".log.1").read_text() == "a" * 200 + "\n"
        write("after")
        assert log.path.read_bytes() == b"after\n", "the writer went on at its old place: a hole of zeros"
        writer.stdin.close()


def test_a_log_that_is_not_full_stays(tmp_path: Path):
    log = LogFile(tmp_path, "some", max_bytes=100)
    log.path.write_text("kept\n")
    log.bound()
    with log.open() as output:
        output.write(b"more\n")
    assert log.path.read_text() == "kept\nmore\n"


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", ""),
        ("one\n\n  two  \n\n", "two"),
        (json.dumps({"event": "cannot load", "level": "error"}), "cannot load"),
        (json.dumps({"event": "failed", "exception": "Traceback\n  File x\nValueError: odd"}), "failed: ValueError: odd"),
        ("x" * 500, "x" * 200),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_the_last_words_are_one_short_line(tmp_path: Path, text: str, last: str):
    log = LogFile(tmp_path, "some")
    log.path.write_text(text)
    assert log.last_line() == last


def test_a_missing_log_has_no_last_words(tmp_path: Path):
    assert LogFile(tmp_path, "none").last_line() == ""
