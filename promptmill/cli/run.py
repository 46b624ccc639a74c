"""The servers as single processes (docs/architecture.md), for Procfile, compose and units, and `migrate`."""

from typing import Annotated

import typer

from promptmill.cli.options import DataDir, Json
from promptmill.cli.output import as_json, say
from promptmill.core.settings import load_settings, mask
from promptmill.supervisor import commands

Host = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]


def register(app: typer.Typer) -> None:
    panel = "Servers"
    app.command(rich_help_panel=panel)(api)
    app.command(rich_help_panel=panel)(worker)
    app.command(rich_help_panel=panel)(maintenance)
    app.command(rich_help_panel=panel)(beat)
    app.command(rich_help_panel=panel)(flower)
    app.command(rich_help_panel=panel)(migrate)


def api(host: Host = None, port: Annotated[int | None, typer.Option("--port")] = None) -> None:
    """Run the HTTP server (gunicorn)."""
    _become("api", host=host, port=port)


def worker() -> None:
    """Run an engine behind the queues (Celery)."""
    _become("worker")


def maintenance() -> None:
    """Run the worker of the maintenance tasks (Celery)."""
    _become("maintenance")


def beat() -> None:
    """Run the clock of the maintenance tasks (Celery)."""
    _become("beat")


def flower(host: Host = None, port: Annotated[int | None, typer.Option("--port")] = None) -> None:
    """Run the dashboard of the workers (Flower)."""
    _become("flower", host=host, flower_port=port)


def migrate(data_dir: DataDir = None, json: Json = False) -> None:
    """Bring the database to the newest schema."""
    settings = load_settings(data_dir=data_dir)
    from storage.migrate import migrate as run

    run(settings.database)
    if json:
        as_json({"database": mask(settings.database), "migrated": True})
    else:
        say(f"migrated {mask(settings.database)}")


def _become(name: str, **flags: object) -> None:
    commands.COMMANDS[name](load_settings(**flags)).with_flags(flags).execute()
