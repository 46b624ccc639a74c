"""Building the kernels on this machine, once: the library is kept under a name made of all that shapes it."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from batching.engines.torch.device import cpu_flags

_SOURCES = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
_LIMIT_S = 300.0
TARGET = ("-march=native",)
# No fused product but where the code asks for one, and no math that needs errno: the bits of a row hang on both.
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-psabi")
_LIBRARY = ("-fopenmp", "-shared", "-fPIC")


class BuildError(Exception):
    """Why there is no library."""


def default_folder() -> Path:
    """Where the user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "promptmill" / "kernels"


def find_compiler() -> list[str]:
    """$CC (which may hold arguments), else the first of the usual names. Raises BuildError."""
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]):
        return named
    found = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if found is None:
        raise BuildError("no C compiler: $CC, cc, gcc and clang were looked for")
    return [found]


def build(folder: Path, openmp: Path, target: Sequence[str] = TARGET) -> Path:
    """The library in ``folder``, built unless it is there. Several processes may build at once: each builds
    its own and the last rename wins, over an equal one. ``openmp``: the runtime to link to.

    Raises BuildError.
    """
    compiler = find_compiler()
    units = sorted(_SOURCES.glob("*.c"))
    # As needed, and torch's own runtime before the compiler's: so the compiler's is not taken on where names differ.
    arguments = [*_FLAGS, *target, *_LIBRARY, "-Wl,--as-needed"]
    library = folder / f"kernels-{_fingerprint(compiler, arguments, openmp)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
            made = Path(scratch) / library.name
            _run([*compiler, *arguments, *map(str, units), "-o", str(made), str(openmp), "-lm"])
            made.replace(library)
    except OSError as error:
        raise BuildError(f"cannot write to {folder}: {error.strerror}") from error
    return library


def _fingerprint(compiler: Sequence[str], arguments: Sequence[str], openmp: Path) -> str:
    version = _run([*compiler, "--version"])
    parts = [version, *compiler, *arguments, str(openmp), platform.machine(), *sorted(cpu_flags())]
    parts += [source.read_text(encoding="utf-8") for source in sorted([*_SOURCES.glob("*.c"), *_SOURCES.glob("*.h")])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(f"{command[0]} failed: {next((line for line in said if 'error' in line), said[-1])}")
    return done.stdout
