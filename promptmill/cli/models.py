"""`models pull|list|use`: joins the model store with the engine's converter."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from promptmill.cli.options import DataDir, Json
from promptmill.cli.output import as_json, note, quiet_logs, say, table
from promptmill.core.models import DEFAULT_MODEL, ModelCard
from promptmill.core.settings import load_settings

models = typer.Typer(help="Bring models in, list them, choose one.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(models, name="models", rich_help_panel="This machine")


@models.command()
def pull(
    source: Annotated[str, typer.Argument(help="A Hugging Face id, a URL, a folder or a .gguf file.")] = DEFAULT_MODEL,
    name: Annotated[str | None, typer.Option("--name", help="What to call it here. Default: from the source.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Commit, tag or branch of a Hugging Face repository.")] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Bring a model into the data directory; does nothing when it is there."""
    settings = load_settings(data_dir=data_dir)
    quiet_logs(settings)
    from storage.models import ModelStore

    with Meter() as meter:
        card = ModelStore(settings.models_path).pull(source, name=name, revision=revision, progress=meter, convert=_convert)
    if json:
        as_json(_described(card, settings.models_path))
    else:
        say(f"{card.name} is ready ({settings.models_path / card.name})")


@models.command("list")
def list_models(data_dir: DataDir = None, json: Json = False) -> None:
    """List the models of the data directory."""
    settings = load_settings(data_dir=data_dir)
    from storage.models import ModelStore

    store = ModelStore(settings.models_path)
    cards, default = store.cards(), store.default()
    if json:
        as_json([{**_described(card, settings.models_path), "default": card.name == default} for card in cards])
        return
    rows = [(card.name, "*" if card.name == default else "", card.context_length, card.revision, card.source) for card in cards]
    table(("MODEL", "DEFAULT", "CONTEXT", "REVISION", "SOURCE"), rows)
    if not cards:
        note(f"no model yet; bring one with: promptmill models pull {DEFAULT_MODEL}")


@models.command()
def use(name: Annotated[str, typer.Argument(help="A model of `models list`.")], data_dir: DataDir = None, json: Json = False) -> None:
    """Choose the model that is served when no other is named; servers take it at their next start."""
    settings = load_settings(data_dir=data_dir)
    from storage.models import ModelStore

    card = ModelStore(settings.models_path).use(name)
    if json:
        as_json({**_described(card, settings.models_path), "default": True})
    else:
        say(f"{card.name} is the default model now")


class Meter:
    """The store's progress: a bar on a terminal, one line per step in a pipe."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._step: str | None = None

    def __enter__(self) -> "Meter":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if self._bar is None:
            if what != self._step:
                note(what)
        elif what != self._step:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(what, completed=done, total=total)
        else:
            self._bar.update(self._bar.task_ids[-1], completed=done, total=total)
        self._step = what


def _convert(source: Path, folder: Path) -> None:
    from batching.engines.torch.convert import convert_gguf

    convert_gguf(source, folder)


def _described(card: ModelCard, models_dir: Path) -> dict[str, object]:
    fields = ("name", "revision", "source", "context_length", "vocab_size")
    return {**{name: getattr(card, name) for name in fields}, "path": str(models_dir / card.name)}
