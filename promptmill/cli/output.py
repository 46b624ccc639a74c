"""Printing, the same in all commands: tables on a terminal, tab-separated lines in a pipe, JSON on demand."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from promptmill.core.logs import configure_logs
from promptmill.core.settings import Settings


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def note(line: str) -> None:
    """Something beside the result, so that the result can be piped."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def piece(text: str) -> None:
    """Part of a text that is still growing."""
    sys.stdout.write(text)
    sys.stdout.flush()


def as_json(value: Any) -> None:
    say(json.dumps(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    console = Console()
    if not console.is_terminal:
        for row in rows:
            say("\t".join(_cell(value) for value in row))
        return
    grid = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        grid.add_row(*(escape(_cell(value)) for value in row))
    console.print(grid)


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def quiet_logs(settings: Settings) -> None:
    """For commands that use other parts in this process: of their log lines only warnings, on standard error."""
    configure_logs(settings.model_copy(update={"log_level": "warning"}))
