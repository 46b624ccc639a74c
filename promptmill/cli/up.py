"""`up` and `demo`: everything on this machine."""

from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from promptmill.cli.options import DataDir, Json
from promptmill.core.settings import load_settings

Host = Annotated[str | None, typer.Option("--host", help="Address that api and Flower listen on. Default: 127.0.0.1.")]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port of the api; 0 = any free one. Default: 8000.")]
Model = Annotated[str | None, typer.Option("--model", help="Model to serve; several with the instant engine, comma separated.")]
Engine = Annotated[Literal["torch", "instant"] | None, typer.Option("--engine", help="instant answers without weights. Default: torch.")]
Workers = Annotated[int, typer.Option("--workers", min=1, max=64, help="Engine processes.")]
NoFlower = Annotated[bool, typer.Option("--no-flower", help="Start no dashboard.")]
FlowerPort = Annotated[
    int | None, typer.Option("--flower-port", min=0, max=65535, help="Port of Flower; a free one if taken. Default: 5555.")
]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="All on one machine")(up)
    app.command(rich_help_panel="All on one machine")(demo)


def up(
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    model: Model = None,
    engine: Engine = None,
    workers: Workers = 1,
    no_flower: NoFlower = False,
    flower_port: FlowerPort = None,
    no_demo: Annotated[bool, typer.Option("--no-demo", help="Ask no question when ready.")] = False,
    json: Json = False,
) -> None:
    """Start everything on this machine, show one answer, and stay until Ctrl-C."""
    flags = {"host": host, "port": port, "data_dir": data_dir, "model": model, "engine": engine, "flower_port": flower_port}
    _run(flags, workers=workers, flower=not no_flower, demo=not no_demo, once=False, json=json)


def demo(
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    model: Model = None,
    engine: Engine = None,
    workers: Workers = 1,
    no_flower: NoFlower = False,
    flower_port: FlowerPort = None,
    json: Json = False,
) -> None:
    """Start everything, show one answer, and stop."""
    flags = {"host": host, "port": port, "data_dir": data_dir, "model": model, "engine": engine, "flower_port": flower_port}
    _run(flags, workers=workers, flower=not no_flower, demo=True, once=True, json=json)


def _run(flags: Mapping[str, object], *, workers: int, flower: bool, demo: bool, once: bool, json: bool) -> None:
    settings = load_settings(**flags)
    from promptmill.supervisor.report import make_report
    from promptmill.supervisor.up import Options
    from promptmill.supervisor.up import up as run

    raise typer.Exit(run(settings, Options(workers=workers, flower=flower, demo=demo, once=once), make_report(json)))
