"""A pull from the Hugging Face hub, against a stand-in that speaks the part of its protocol that is used.

The hub's library reads HF_ENDPOINT when it is imported, so each pull runs in a process of its own.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from promptmill.core.models import ModelCard
from tests.support.model_files import write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PULL = """
import sys
from pathlib import Path
from promptmill.core.errors import ConfigError
from storage.models import ModelStore
steps = []
try:
    ModelStore(Path(sys.argv[1])).pull(sys.argv[2], convert=None, progress=lambda *step: steps.append(step))
except ConfigError as error:
    sys.exit(error.message)
print(len([step for step in steps if step[0] == "model.safetensors" and step[1] == step[2]]))
"""


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """``org/net`` is ``folder``; branch main and tag v1 are COMMIT. Also gives the paths asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            head = {"X-Repo-Commit": COMMIT}
            status, body = 404, b"{}"
            if path in ("/api/models/org/net", *(f"/api/models/org/net/revision/{name}" for name in ("main", "v1", COMMIT))):
                siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in folder.iterdir()]
                status, body = 200, json.dumps({"id": "org/net", "sha": COMMIT, "siblings": siblings}).encode()
            elif path.startswith(f"/org/net/resolve/{COMMIT}/") and (file := folder / Path(path).name).is_file():
                status, body = 200, file.read_bytes()
                head["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
            else:
                head["X-Error-Code"] = "RevisionNotFound" if "/org/net/" in path else "RepoNotFound"
            self.send_response(status)
            for name, value in {**head, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pull(endpoint: str, models: Path, source: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(models.parent / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    return subprocess.run([sys.executable, "-c", PULL, str(models), source], env=environment, capture_output=True, text=True, timeout=100)


def test_a_hub_model_is_pinned_to_its_commit_and_a_second_pull_asks_nobody(tmp_path: Path) -> None:
    there = write_model(tmp_path / "there")
    (there / "modeling.py").write_text("import os")
    models = tmp_path / "models"
    with hub(there) as (endpoint, asked):
        done = pull(endpoint, models, "org/net@v1")
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.splitlines()[-1]) >= 1
        card = ModelCard.load(models / "net")
        assert card.source == f"org/net@{COMMIT}"
        assert (models / "net" / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()
        assert not [path for path in asked if path.endswith(".py")]
        assert sorted(path.name for path in models.iterdir()) == [".net.lock", "net"]
        asked.clear()
        for same in ("org/net", f"org/net@{COMMIT}"):
            assert pull(endpoint, models, same).returncode == 0
        assert asked == []


@pytest.mark.parametrize("source", ["org/other", "org/net@nosuch"])
def test_an_unknown_repository_or_revision_names_what_was_tried(tmp_path: Path, source: str) -> None:
    with hub(write_model(tmp_path / "there")) as (endpoint, _):
        done = pull(endpoint, tmp_path / "models", source)
    assert done.returncode == 1
    assert f"cannot fetch {endpoint}/{source.partition('@')[0]}" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_network_names_what_was_tried(tmp_path: Path) -> None:
    done = pull("http://127.0.0.1:1", tmp_path / "models", "org/net")
    assert done.returncode == 1
    assert "cannot fetch http://127.0.0.1:1/org/net" in done.stderr
    assert "Traceback" not in done.stderr
