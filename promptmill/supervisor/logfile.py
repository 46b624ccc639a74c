"""The log file of one child: bounded, appended by the child itself.

The child writes to the file, not to a pipe, so that it never waits for the supervisor. A full file
is therefore copied and cut, not renamed: the child's descriptor stays, and since it was opened for
appending, its next line lands at the new end. Lines written between copy and cut are lost.
"""

import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 8 * 1024 * 1024
TAIL_BYTES = 8192


class LogFile:
    """``<folder>/<name>.log`` and one older generation beside it, each at most about ``max_bytes``."""

    def __init__(self, folder: Path, name: str, max_bytes: int = MAX_BYTES):
        self.path = folder / f"{name}.log"
        self._max_bytes = max_bytes

    def open(self) -> BinaryIO:
        """For the output of a child about to start."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.bound()
        return self.path.open("ab")

    def bound(self) -> None:
        """Cut the file if it is full."""
        if self.path.is_file() and self.path.stat().st_size > self._max_bytes:
            shutil.copyfile(self.path, self.path.with_suffix(".log.1"))
            os.truncate(self.path, 0)

    def last_line(self) -> str:
        """The last line that says something, at most 200 characters; "" when there is none."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return _summary(lines[-1])[:200] if lines else ""


def _summary(line: str) -> str:
    """What a JSON log line says, with the last line of its traceback; other lines as they are."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "event" not in entry:
        return line
    trace = str(entry.get("exception", "")).strip().splitlines()
    return ": ".join([str(entry["event"]).strip(), *trace[-1:]]).replace("\n", " ")
