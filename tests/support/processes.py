"""What /proc tells of a process tree: names, memory, loaded libraries. Linux only, as the e2e tests are."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process seen once. ``name`` is what `up` called it (PROMPTMILL_PROCESS), "" if it was not named."""

    pid: int
    parent: int
    name: str

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.pid)

    @property
    def rss_bytes(self) -> int:
        for line in (PROC / str(self.pid) / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise ProcessLookupError(self.pid)

    @property
    def libraries(self) -> set[str]:
        """Names of all files that are mapped into memory."""
        lines = (PROC / str(self.pid) / "maps").read_text().splitlines()
        return {line.rsplit("/", 1)[1] for line in lines if "/" in line}

    @property
    def command(self) -> list[str]:
        return (PROC / str(self.pid) / "cmdline").read_bytes().decode().rstrip("\0").split("\0")


def environment(pid: int) -> dict[str, str]:
    raw = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    return dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that only waits to be reaped."""
    try:
        state = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def everyone() -> list[Process]:
    """All live processes that we may look into."""
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z":
                name = environment(int(entry.name)).get("PROMPTMILL_PROCESS", "")
                found.append(Process(int(entry.name), int(fields[1]), name))
    return found


def descendants(root: int) -> list[Process]:
    """All live children, grandchildren … of ``root``, parents before their children."""
    processes = everyone()
    family, grown = [], {root}
    while True:
        new = [p for p in processes if p.parent in grown and p.pid not in grown]
        if not new:
            return family
        family += new
        grown |= {p.pid for p in new}


def using(folder: Path) -> list[Process]:
    """All live processes of the data directory ``folder``, whoever is their parent now."""
    mark = str(folder)
    return [p for p in everyone() if p.pid != os.getpid() and _works_in(p, mark)]


def _works_in(process: Process, mark: str) -> bool:
    try:
        return process.environment.get("PROMPTMILL_DATA_DIR") == mark or any(mark in word for word in process.command)
    except OSError:
        return False
