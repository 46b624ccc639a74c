"""Options that several commands share."""

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Url = Annotated[str | None, typer.Option("--url", help="The server. Default: $PROMPTMILL_URL, else the `up` of the data directory.")]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="Where everything is kept. Default: var.")]
