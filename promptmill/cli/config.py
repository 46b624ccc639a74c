"""`config`: the effective settings and where each came from."""

import typer

from promptmill.cli.options import DataDir, Json
from promptmill.cli.output import as_json, table
from promptmill.core.settings import PREFIX, explain, load_settings


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="This machine")(config)


def config(data_dir: DataDir = None, json: Json = False) -> None:
    """Show every setting, its value and where it came from; passwords are hidden."""
    rows = explain(load_settings(data_dir=data_dir), data_dir=data_dir)
    if json:
        as_json({name: {"value": value, "from": origin, "variable": PREFIX + name.upper()} for name, value, origin in rows})
    else:
        table(("SETTING", "VALUE", "FROM"), rows)
