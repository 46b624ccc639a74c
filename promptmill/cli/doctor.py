"""`doctor`: what works on this machine, what does not, and how to mend it."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from promptmill.cli.options import DataDir, Json
from promptmill.cli.output import as_json, quiet_logs, say
from promptmill.core.settings import load_settings

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="This machine")(doctor)


def doctor(
    data_dir: DataDir = None,
    url: Annotated[str | None, typer.Option("--url", help="The api to ask. Default: as for the other commands.")] = None,
    json: Json = False,
) -> None:
    """Check Redis, SQL, models, workers, the api's port, disk and versions. Exit code 1 if something fails."""
    settings = load_settings(data_dir=data_dir)
    quiet_logs(settings)
    from promptmill.cli.client import server_url
    from promptmill.cli.findings import examine
    from promptmill.supervisor.preflight import running

    up = running(settings.data_dir)
    found = list(examine(settings, up.redis_url if up else settings.redis_url, server_url(url, settings)))
    if json:
        as_json([{"name": one.name, "verdict": one.verdict, "found": one.found, "mend": one.mend} for one in found])
    else:
        console = Console()
        for one in found:
            line = f"{one.verdict:<5}{one.name:<9}{one.found}"
            mend = f"              -> {one.mend}" if one.mend else None
            if console.is_terminal:
                console.print(escape(line), style=STYLES[one.verdict], highlight=False, soft_wrap=True)
            else:
                say(line)
            if mend:
                say(mend)
    raise typer.Exit(1 if any(one.verdict == "fail" for one in found) else 0)
