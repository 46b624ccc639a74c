"""Packages that a machine without network may lack: which, and the wheels that stand in for them.

    python -m bench.device_packages prepare   # where there is a network: fill bench/wheels, which git ignores
    python -m bench.device_packages           # there: unpack what is missing, print the folder for PYTHONPATH

The standard library alone, for it runs before anything else can.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "bench" / "wheels"
MOST_BYTES = 40 << 20  # with the tree and what else travels, under 64 MB
PYTHON, GLIBC = "3.12", 31  # of the machine that the wheels are for: 3.12, and 2.31 at least

# What the engine and the tests marked cuda import, and what is to be unpacked where it is missing.
_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions")
STAND_INS: dict[str, tuple[str, ...]] = {
    "structlog": ("structlog",),
    "llguidance": ("llguidance",),
    "pydantic": _PYDANTIC,
    "pydantic_settings": ("pydantic_settings", "python_dotenv", *_PYDANTIC),
    "prometheus_client": ("prometheus_client",),
    "jinja2": ("jinja2", "markupsafe"),
    "pytest": ("pytest", "iniconfig", "packaging", "pluggy", "pygments"),
    "pytest_timeout": ("pytest_timeout",),
    "xdist": ("pytest_xdist", "execnet"),
    "hypothesis": ("hypothesis", "sortedcontainers"),
}
# Too large to carry.
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def missing(names: Iterable[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def prepare() -> int:
    """Fetch the wheels, at the versions of constraints.txt. Raises CalledProcessError when pip cannot."""
    WHEELS.mkdir(exist_ok=True)
    (WHEELS / ".gitignore").write_text("*\n", encoding="utf-8")
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    wanted = sorted({wheel for wheels in STAND_INS.values() for wheel in wheels})
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]  # pip takes each for itself alone
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    target = [f"--python-version={PYTHON}", "--implementation=cp", *platforms, "--only-binary=:all:", "--no-deps"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *target, "-c", str(ROOT / "constraints.txt"), "-d", str(WHEELS)]
    subprocess.run([*command, *(name.replace("_", "-") for name in wanted)], check=True)
    total = sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    print(f"{len(list(WHEELS.glob('*.whl')))} wheels, {total / 1e6:.1f} MB in {WHEELS}")
    if total > MOST_BYTES:
        print(f"that is more than {MOST_BYTES / 1e6:.0f} MB, too much to travel", file=sys.stderr)
        return 1
    return 0


def stand_in(folder: Path, wheels: Path = WHEELS, wanted: Mapping[str, Sequence[str]] = STAND_INS) -> list[str]:
    """Unpack into ``folder`` what is missing here of ``wanted``; the names of what is missing and has no wheel that fits."""
    lacking, unpacked = [], set[str]()
    for name in missing(wanted):
        for part in wanted[name]:
            found = next((wheel for wheel in sorted(wheels.glob("*.whl")) if _project(wheel) == part and fits(wheel)), None)
            if found is None:
                # An older release of what others bring may be there.
                if importlib.util.find_spec(part.removeprefix("python_")) is None:
                    lacking.append(name)
            elif part not in unpacked:
                unpacked.add(part)
                with zipfile.ZipFile(found) as archive:
                    archive.extractall(folder)
    if unpacked:
        print(f"not installed here, taken from {wheels}: {', '.join(sorted(unpacked))}", file=sys.stderr)
    return sorted(set(lacking))


def fits(wheel: Path) -> bool:
    """Whether a wheel's name promises to run on this Python; the machine is the one it was fetched for."""
    python, abi = wheel.stem.split("-")[-3:-1]
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if abi == "abi3":
        oldest = int(python.split(".")[0].removeprefix("cp3") or 0)
        return oldest <= sys.version_info.minor
    return "py3" in python.split(".") or python == here


def _project(wheel: Path) -> str:
    return re.sub(r"[-_.]+", "_", wheel.name.split("-")[0]).lower()


def main() -> int:
    if sys.argv[1:] == ["prepare"]:
        return prepare()
    folder = Path(tempfile.mkdtemp(prefix="promptmill-wheels-"))
    if lacking := missing(NEEDED) + stand_in(folder):
        print(f"missing here: {', '.join(lacking)}; run bench/device.sh prepare where there is a network", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
