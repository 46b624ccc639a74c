"""What `up` tells the one who started it: for a terminal, for a pipe, or as JSON lines. The same events in all."""

import json
import sys
from typing import Any, ClassVar, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Report(Protocol):
    """Called from the supervisor's thread; ``text`` also from the demo's."""

    def event(self, kind: str, line: str, **fields: Any) -> None:
        """``kind`` is a stable word for programs, ``line`` for people."""

    def waiting(self, line: str | None) -> None:
        """A slow step is going on; None = it is over. Called again and again while it lasts."""

    def text(self, piece: str) -> None:
        """A piece of the demo's answer, as it comes."""


class JsonReport:
    def event(self, kind: str, line: str, **fields: Any) -> None:
        print_line(json.dumps({"event": kind, "message": line, **fields}))

    def waiting(self, line: str | None) -> None: ...

    def text(self, piece: str) -> None:
        print_line(json.dumps({"event": "token", "text": piece}))


class PlainReport:
    """For a pipe: each line once, nothing is redrawn."""

    def __init__(self) -> None:
        self._last: str | None = None

    def event(self, kind: str, line: str, **fields: Any) -> None:
        print_line(line)

    def waiting(self, line: str | None) -> None:
        if line and line != self._last:
            print_line(line)
        self._last = line

    def text(self, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()


class TerminalReport:
    """A bar with the time so far for slow steps, redrawn only when ``waiting`` is called: the
    supervisor forks, so it has no thread for drawing."""

    STYLES: ClassVar[dict[str, str]] = {"ready": "bold green", "died": "yellow", "killed": "yellow", "warning": "yellow"}

    def __init__(self, console: Console):
        self._console = console
        self._progress: Progress | None = None

    def event(self, kind: str, line: str, **fields: Any) -> None:
        self._console.print(escape(line), style=self.STYLES.get(kind), highlight=False, soft_wrap=True)

    def waiting(self, line: str | None) -> None:
        if line is None:
            if self._progress:
                self._progress.stop()
                self._progress = None
            return
        if self._progress is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
            self._progress.add_task(line, total=None)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], description=line, refresh=True)

    def text(self, piece: str) -> None:
        self._console.out(piece, end="", highlight=False)


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def make_report(as_json: bool) -> Report:
    if as_json:
        return JsonReport()
    console = Console()
    return TerminalReport(console) if console.is_terminal else PlainReport()
