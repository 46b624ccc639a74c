"""The model store: prepared models as folders under one directory (layout in promptmill.core.models).

<models_dir>/
    <name>/          a prepared model; it appears whole, by one rename
    default          name of the model served by default
    .<name>.lock     held while <name> is pulled, so that parallel pulls do the work once
    .<name>.part/    a pull at work (raw/ = as fetched, model/ = as prepared); left by a killed one,
                     removed by the next
"""

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import ConfigError
from promptmill.core.logs import get_logger
from promptmill.core.models import CARD, DEFAULT_MODEL, ModelCard
from storage.download import DISK_FULL, Progress
from storage.fetch import Source, parse_source
from storage.model_folder import adopt, describe

log = get_logger(__name__)

Convert = Callable[[Path, Path], None]  # (a .gguf file, an empty folder): write the model's files into it
POINTER = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)


class ModelStore:
    def __init__(self, models_dir: Path, *, clock: Clock = SYSTEM_CLOCK):
        self._dir = models_dir
        self._clock = clock

    def pull(
        self, source: str, *, name: str | None = None, revision: str | None = None, progress: Progress | None = None, convert: Convert
    ) -> ModelCard:
        """Bring a model in, or find that it is here already.

        ``source``: the bundled model's name, a Hugging Face id ``org/name[@revision]``, a URL, a
        folder or a .gguf file. ``progress(what, bytes done, bytes in all or None)`` is called from
        the caller's thread. Raises ConfigError with one line that says what is wrong.
        """
        origin = parse_source(source, revision)
        name = checked_name(name or origin.name)
        with _clear_errors(self._dir):
            self._dir.mkdir(parents=True, exist_ok=True)
            with self._locked(name):
                folder = self._dir / name
                if folder.exists():
                    return _existing(folder, origin)
                return self._prepare(origin, name, folder, progress or _silent, convert)

    def cards(self) -> list[ModelCard]:
        """The models that are here, by name."""
        cards = []
        for path in sorted(self._dir.glob(f"*/{CARD}")) if self._dir.is_dir() else []:
            if path.parent.name.startswith("."):
                continue
            try:
                cards.append(ModelCard.load(path.parent))
            except ConfigError as error:
                log.warning("a damaged model is left out", problem=error.message)
        return cards

    def folder(self, name: str) -> Path:
        return self._dir / checked_name(name)

    def use(self, name: str) -> ModelCard:
        """Make ``name`` the model served by default. Raises ConfigError when it is not here."""
        card = ModelCard.load(self.folder(name))
        temporary = self._dir / f".{POINTER}.part"
        temporary.write_text(name + "\n", encoding="utf-8")
        temporary.replace(self._dir / POINTER)
        return card

    def default(self) -> str:
        pointer = self._dir / POINTER
        return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else DEFAULT_MODEL

    def _prepare(self, origin: Source, name: str, folder: Path, progress: Progress, convert: Convert) -> ModelCard:
        work = self._dir / f".{name}.part"
        if work.exists():
            shutil.rmtree(work)
        raw, model = work / "raw", work / "model"
        raw.mkdir(parents=True)
        model.mkdir()
        try:
            fetched = origin.fetch(raw, progress)
            if fetched.path.is_dir():
                adopt(fetched.path, model)
            else:
                progress(f"converting {fetched.path.name}", 0, None)
                convert(fetched.path, model)
            card = describe(model, name, fetched.recorded, int(self._clock.time()))
            card.save(model)
            model.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        log.info("model pulled", model=name, revision=card.revision, source=card.source)
        return card

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One pull of a name at a time, over threads and processes; the kernel frees it with its owner."""
        with (self._dir / f".{name}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == POINTER:
        raise ConfigError(f"{name!r} cannot be a model's name here; give one of letters, digits, '.', '_' and '-' with --name")
    return name


def _existing(folder: Path, origin: Source) -> ModelCard:
    if not (folder / CARD).is_file():
        raise ConfigError(f"{folder} is in the way: it is no prepared model; remove it, or pull under another --name")
    card = ModelCard.load(folder)
    if not origin.matches(card.source):
        raise ConfigError(f"{folder.name} is here already, from {card.source}; pull under another --name, or remove {folder}")
    return card


@contextmanager
def _clear_errors(models_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise ConfigError(f"no space left in {models_dir}") from error
        raise ConfigError(f"cannot bring the model into {models_dir}: {error}") from error


def _silent(what: str, done: int, total: int | None) -> None:
    pass
