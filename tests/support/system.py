"""The whole system as a user starts it: `promptmill up` in a subprocess, on free ports, with its own data."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any

from promptmill.core.clock import SYSTEM_CLOCK
from tests.support.client import Client
from tests.support.processes import Process, alive, descendants
from tests.support.servers import die_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "var" / "models"
PROMPTMILL = Path(sys.executable).with_name("promptmill")
READY_TIMEOUT = 90.0
STOP_TIMEOUT = 30.0  # what `up` promises


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clean_environment(**settings: str) -> dict[str, str]:
    """The caller's environment without its own PROMPTMILL_ variables, plus ``settings`` (names without the prefix)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PROMPTMILL_", "PROMETHEUS_"))}
    kept |= {"PYTHONUNBUFFERED": "1", "PROMPTMILL_MODELS_DIR": str(MODELS)}
    return kept | {f"PROMPTMILL_{name.upper()}": str(value) for name, value in settings.items()}


def run_cli(*words: str, timeout: float = 60, **settings: str) -> subprocess.CompletedProcess[str]:
    """One command of the CLI, to its end."""
    return subprocess.run([str(PROMPTMILL), *words], env=clean_environment(**settings), capture_output=True, text=True, timeout=timeout)


class System:
    """Use it as a context manager. ``settings`` become PROMPTMILL_ variables of all processes."""

    def __init__(self, data_dir: Path, *, engine: str = "instant", options: tuple[str, ...] = (), **settings: Any):
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings = settings
        self.command = [
            *(str(PROMPTMILL), "up", "--no-demo", "--json", "--engine", engine),
            *("--data-dir", str(data_dir), "--port", str(self.port), *options),
        ]
        self.log = data_dir.parent / f"{data_dir.name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._output: Queue[str | None] = Queue()
        self._client: Client | None = None

    def __enter__(self) -> "System":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            sys.stderr.write(self.tail())
        self.kill_everything()

    def start(self) -> None:
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.data_dir.parent,
                env=clean_environment(**self.settings),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,  # also when pytest itself is killed
            )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        try:
            self.ready = self.output("ready", READY_TIMEOUT)
        except BaseException:
            sys.stderr.write(self.tail())
            self.kill_everything()
            raise

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        with self.log.open("a", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self._output.put(line)
        self._output.put(None)

    def output(self, event: str, timeout: float) -> dict[str, Any]:
        """The next line of `up --json` whose ``event`` is ``event``."""
        deadline = SYSTEM_CLOCK.monotonic() + timeout
        while True:
            try:
                line = self._output.get(timeout=max(0.0, deadline - SYSTEM_CLOCK.monotonic()))
            except Empty:
                raise TimeoutError(f"`up` did not say {event} within {timeout} s") from None
            if line is None:
                raise RuntimeError(f"`up` ended before it said {event}")
            body = json.loads(line)
            if body.get("event") == event:
                return body

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self.url)
        return self._client

    def processes(self) -> list[Process]:
        return descendants(self.pid)

    def process(self, name: str) -> Process:
        """The child of `up` with this name, such as ``worker-1`` (not its own children)."""
        found = [p for p in self.processes() if p.parent == self.pid and p.name == name]
        assert len(found) == 1, f"{name}: {[(p.pid, p.name) for p in self.processes()]}"
        return found[0]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal one child; the pid it had."""
        pid = self.process(name).pid
        os.kill(pid, number)
        return pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask `up` to end, as a service manager does; its exit code. Raises TimeoutExpired after 30 s."""
        assert self._process
        self._process.send_signal(number)
        return self._process.wait(STOP_TIMEOUT)

    def kill_everything(self) -> None:
        """Whatever happened before: nothing of this system lives on."""
        if self._client:
            self._client.close()
            self._client = None
        if self._process is None:
            return
        family = [p.pid for p in self.processes()]
        if self._process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pid in family:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        if self._process.stdout:
            self._process.stdout.close()

    def tail(self, lines: int = 80) -> str:
        """The end of all that the processes wrote."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:]) + "\n"
