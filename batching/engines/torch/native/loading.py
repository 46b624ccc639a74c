"""Loading the kernels, or saying why not."""

from pathlib import Path

from batching.engines.torch.native.build import BuildError, build, default_folder
from batching.engines.torch.native.library import Native
from batching.engines.torch.native.probe import disagreement
from promptmill.core.logs import get_logger

_log = get_logger(__name__)
_MAPS = Path("/proc/self/maps")
_RUNTIMES = ("libgomp", "libomp", "libiomp")


def load_native(folder: Path | None) -> Native | None:
    """The kernels, kept in ``folder`` (None = a folder of the user's cache) and built there first if need be.

    None, with the reason logged, where they cannot be had: no compiler, no OpenMP in common with torch,
    or a kernel that disagrees with torch.
    """
    try:
        native = Native(build(folder or default_folder(), _openmp_of_torch()))
        # Two runtimes would be two pools of threads that fight for the same cores.
        if len(runtimes := openmp_runtimes()) != 1:
            raise BuildError(f"the kernels brought an OpenMP runtime of their own: {', '.join(map(str, runtimes))}")
    except (BuildError, OSError) as error:
        _log.warning("kernels_unavailable", reason=str(error))
        return None
    if (reason := disagreement(native)) is not None:
        _log.warning("kernels_unavailable", reason=reason)
        return None
    return native


def openmp_runtimes() -> list[Path]:
    """The OpenMP libraries that this process has mapped, in order of their names."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line}
    return sorted(path for path in paths if path.name.startswith(_RUNTIMES))


def _openmp_of_torch() -> Path:
    """Raises BuildError."""
    runtimes = openmp_runtimes()
    if len(runtimes) != 1:
        raise BuildError(f"torch runs on {len(runtimes)} OpenMP runtimes, not on one")
    return runtimes[0]
