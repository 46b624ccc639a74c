"""`promptmill demo`: everything starts, one answer streams, everything stops, and the exit code tells how it went."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from promptmill.core.models import CARD, DEFAULT_MODEL
from tests.support.processes import using
from tests.support.servers import absent
from tests.support.system import MODELS, free_port, run_cli

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def _default_model() -> None:
    if not (MODELS / DEFAULT_MODEL / CARD).is_file():
        absent("the default model (make setup fetches it)")


def demo(data_dir: Path, *options: str, **settings: str) -> dict[str, list[dict[str, Any]]]:
    """The events of a demo that must succeed, by kind, in order."""
    words = ("demo", "--json", "--engine", "instant", "--port", "0", "--data-dir", str(data_dir), *options)
    done = run_cli(*words, timeout=150, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        event = json.loads(line)
        found.setdefault(event["event"], []).append(event)
    return found


def test_the_demo_shows_one_answer_and_leaves_nothing_behind(tmp_path: Path):
    """Flower takes another port when its own is taken; only the api's is worth an error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = demo(tmp_path / "data", "--flower-port", str(port))
    assert found["warning"][0]["port"] != port
    assert found["places"][0]["flower"] == f"http://127.0.0.1:{found['warning'][0]['port']}"
    assert "".join(event["text"] for event in found["token"]).strip()
    assert found["answered"][0]["status"] == "succeeded"
    assert list(found)[-1] == "stopped"
    assert "killed" not in found
    assert "died" not in found
    assert using(tmp_path / "data") == []


def test_a_redis_that_was_named_is_used_and_none_is_embedded(tmp_path: Path, redis_url: str):
    found = demo(tmp_path / "data", "--no-flower", redis_url=redis_url)
    assert found["started"][0]["processes"] == ["api", "worker-1", "maintenance", "beat"]
    assert found["redis"][0]["url"] == redis_url
    assert not (tmp_path / "data" / "redis").exists()


def test_a_named_redis_that_is_away_stops_the_start(tmp_path: Path):
    url = f"redis://127.0.0.1:{free_port()}/0"
    done = run_cli("up", "--engine", "instant", "--port", "0", "--data-dir", str(tmp_path / "data"), redis_url=url)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "Redis" in line
    assert using(tmp_path / "data") == []
