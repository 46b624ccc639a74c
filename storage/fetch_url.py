"""Models at URLs: a single .gguf file, or a folder. ``http(s)`` by httpx, all others by fsspec."""

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import fsspec
import httpx

from promptmill.core.errors import ConfigError
from storage.download import CHUNK_BYTES, Fetched, Progress, fetching, need_space, save
from storage.model_folder import INDEX, TEMPLATE, wanted

_HASH = re.compile(r"sha256=(?P<hex>[0-9a-f]{64})", re.ASCII)
_TIMEOUT = httpx.Timeout(30, connect=10)
# A web server lists no folders, so these names are asked for.
_NEEDED = ("config.json", "tokenizer.json")
_OPTIONAL = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.json", TEMPLATE)

Download = tuple[int | None, Iterator[bytes]]  # size if known, and the bytes


class Remote(Protocol):
    def names(self) -> list[str]:
        """The wanted files of a folder."""

    def open(self, name: str) -> AbstractContextManager[Download]:
        """One file of the folder, or the URL itself for ``""``."""


@dataclass(frozen=True, slots=True)
class UrlSource:
    """``shown``: the URL without password and query, for cards and messages. ``sha256``: of a single file."""

    url: str
    shown: str
    sha256: str | None

    @classmethod
    def parse(cls, text: str) -> "UrlSource":
        url, _, fragment = text.partition("#")
        match = _HASH.fullmatch(fragment.lower())
        if fragment and not match:
            raise ConfigError(f"what follows # in a model's URL must be sha256=<64 hex digits>, not {fragment!r}")
        source = cls(url.rstrip("/"), _shown(urlsplit(url)), match["hex"] if match else None)
        if source.sha256 and not source.single:
            raise ConfigError("#sha256= goes with the URL of a single .gguf file")
        return source

    @property
    def single(self) -> bool:
        return self.shown.endswith(".gguf")

    @property
    def name(self) -> str:
        return unquote(PurePosixPath(self.shown).name).removesuffix(".gguf")

    def matches(self, recorded: str) -> bool:
        shown, _, recorded_hash = recorded.partition("#sha256=")
        return shown == self.shown and self.sha256 in (None, recorded_hash)

    def fetch(self, folder: Path, progress: Progress) -> Fetched:
        web = urlsplit(self.url).scheme in ("http", "https")
        with fetching(self.shown):
            remote: Remote = HttpRemote(self.url) if web else FsspecRemote(self.url)
            if self.single:
                target = folder / "model.gguf"
                self._save(remote, "", target, progress)
                return Fetched(target, self.shown + (f"#sha256={self.sha256}" if self.sha256 else ""))
            for name in remote.names():
                self._save(remote, name, folder / name, progress)
            return Fetched(folder, self.shown)

    def _save(self, remote: Remote, name: str, target: Path, progress: Progress) -> None:
        with remote.open(name) as (size, chunks):
            need_space(target.parent, size or 0)
            save(chunks, target, f"{self.shown}/{name}".rstrip("/"), size, self.sha256, progress)


def _shown(url: SplitResult) -> str:
    host = url.netloc.rpartition("@")[2]
    return urlunsplit((url.scheme, host, url.path.rstrip("/"), "", "")) if host else f"{url.scheme}://{url.path.strip('/')}"


class FsspecRemote:
    """Whatever fsspec knows: memory, s3, gs, …; some need a package of their own, and the error names it."""

    def __init__(self, url: str):
        self._fs: Any
        self._fs, self._root = fsspec.core.url_to_fs(url)

    def names(self) -> list[str]:
        entries = self._fs.ls(self._root, detail=True)
        # the last part of a name alone: a listing decides no path of ours
        names = [PurePosixPath(entry["name"]).name for entry in entries if entry["type"] == "file"]
        return sorted(name for name in names if wanted(name))

    @contextmanager
    def open(self, name: str) -> Iterator[Download]:
        path = f"{self._root}/{name}" if name else self._root
        with self._fs.open(path, "rb") as file:
            yield self._fs.size(path), iter(lambda: file.read(CHUNK_BYTES), b"")


class HttpRemote:
    def __init__(self, url: str):
        self._url = httpx.URL(url)

    def names(self) -> list[str]:
        names = [*_NEEDED, *(name for name in _OPTIONAL if self._exists(name))]
        if not self._exists(INDEX):
            return [*names, "model.safetensors"]
        with self.open(INDEX) as (_, chunks):
            shards = set(json.loads(b"".join(chunks))["weight_map"].values())
        if not all(isinstance(shard, str) and wanted(shard) for shard in shards):
            raise ConfigError(f"{INDEX} names a weight file that is no plain name")
        return [*names, INDEX, *sorted(shards)]

    @contextmanager
    def open(self, name: str) -> Iterator[Download]:
        with self._get(name) as answer:
            _check(answer)
            length = answer.headers.get("content-length", "")
            yield int(length) if length.isdigit() else None, answer.iter_raw(CHUNK_BYTES)

    def _exists(self, name: str) -> bool:
        with self._get(name) as answer:
            if answer.status_code == httpx.codes.NOT_FOUND:
                return False
            _check(answer)
            return True

    def _get(self, name: str) -> AbstractContextManager[httpx.Response]:
        url = self._url.copy_with(path=f"{self._url.path}/{name}") if name else self._url
        # identity: the bytes as they are, so that sizes and hashes mean the file
        return httpx.stream("GET", url, headers={"Accept-Encoding": "identity"}, follow_redirects=True, timeout=_TIMEOUT)


def _check(answer: httpx.Response) -> None:
    """Not ``raise_for_status``: its text holds the whole URL, with password and query."""
    if not answer.is_success:
        raise OSError(f"the server says {answer.status_code} {answer.reason_phrase} for {PurePosixPath(answer.url.path).name}")
