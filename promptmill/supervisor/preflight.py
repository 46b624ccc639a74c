"""What must hold before anything is started. Each check raises ConfigError with one line that says how to mend it."""

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from promptmill.core.errors import ConfigError
from promptmill.core.models import ModelCard, chosen_models
from promptmill.core.settings import Settings
from promptmill.supervisor.services import port_is_free

LOCK = "up.lock"
DISK_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Running:
    """Where the `up` of a data directory listens, for `doctor` and the client commands."""

    pid: int
    url: str
    redis_url: str
    flower_url: str | None


class DataLock:
    """Held for the life of an `up`; the kernel drops it with the process, so it cannot go stale."""

    def __init__(self, data_dir: Path):
        """Raises ConfigError when another `up` holds it or the directory cannot be written."""
        path = data_dir / LOCK
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot write to the data directory {data_dir}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = _read(self._file)
            where = f" (process {other.pid}, {other.url})" if other else ""
            self._file.close()
            raise ConfigError(f"promptmill already runs on {data_dir}{where}; stop it or give another --data-dir") from None
        self._file.truncate(0)

    def say(self, running: Running) -> None:
        self._file.truncate(0)
        self._file.write(json.dumps(asdict(running)).encode())
        self._file.flush()

    def release(self) -> None:
        self._file.truncate(0)
        self._file.close()


def running(data_dir: Path) -> Running | None:
    """The `up` that holds this data directory now, if there is one and it is past its first steps."""
    try:
        with (data_dir / LOCK).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read(file)
    except OSError:
        pass
    return None


def check_port(host: str, port: int) -> None:
    if port and not port_is_free(host, port):
        raise ConfigError(f"port {port} on {host} is taken; stop what listens there or give another --port (0 = any free one)")


def check_disk(data_dir: Path, needed: int = DISK_BYTES) -> None:
    free = shutil.disk_usage(data_dir).free
    if free < needed:
        raise ConfigError(
            f"the disk of {data_dir} is full: {free // 2**20} MB free, {needed // 2**20} MB needed; make room or give another --data-dir"
        )


def check_models(settings: Settings) -> list[ModelCard]:
    """The cards of the models that will be served."""
    return [ModelCard.load(folder) for folder in chosen_models(settings.models_path, settings.model)]


def _read(file: BinaryIO) -> Running | None:
    try:
        return Running(**json.loads(os.pread(file.fileno(), 4096, 0)))
    except (ValueError, TypeError):  # empty while the other one starts
        return None
