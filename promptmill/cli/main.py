"""The command ``promptmill``. Every command has --json; errors are one line on standard error.

Exit codes:
  0    done
  1    failed: a bad setting, a request the server refused, a job that failed, a check of `doctor`
  2    wrong usage of the command line
  3    not available now: no server answers, Redis or SQL is away, the server is overloaded
  130  interrupted by Ctrl-C (`up` and the other servers: 0, since that is how they are stopped)
"""

import sys
from typing import Annotated

import typer

import promptmill
from promptmill.cli import config, doctor, jobs, models, run, stats, up
from promptmill.cli.output import note, say
from promptmill.core.errors import PromptmillError, Unavailable

app = typer.Typer(
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not available now, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (up, run, jobs, stats, models, config, doctor):
    module.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"promptmill {promptmill.__version__}")
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    """A queue-backed job system for LLM inference: durable jobs, micro-batches, resumable token streams."""


def main() -> None:
    try:
        app()
    except PromptmillError as error:
        note(f"promptmill: {error.message}")
        sys.exit(exit_code(error))


def exit_code(error: PromptmillError) -> int:
    return 3 if isinstance(error, Unavailable) else 1
