"""The verdicts of `doctor`."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptmill.cli import findings
from promptmill.cli.main import app
from promptmill.core.settings import Settings
from promptmill.supervisor.services import free_port

GOOD = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2", "aof_enabled": 1, "maxmemory_policy": "noeviction"}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [({}, "ok"), ({"redis_version": "6.0.16"}, "fail"), ({"aof_enabled": 0}, "warn"), ({"maxmemory_policy": "allkeys-lru"}, "warn")],
)
def test_redis_is_judged_by_version_persistence_and_eviction(change: dict[str, object], verdict: str):
    found = findings.judge_redis("redis://:secret@h/0", {**GOOD, **change})
    assert found.verdict == verdict
    assert (found.mend is None) == (verdict == "ok"), "what is not ok says how to mend it"
    assert "secret" not in found.found


def test_redis_is_checked_on_a_real_server(redis_url: str):
    assert findings.redis(redis_url).verdict == "ok"


def test_a_port_that_another_program_holds_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = findings.api(Settings(port=port), f"http://127.0.0.1:{port}", timeout_s=0.2)
    assert found.verdict == "fail"
    assert str(port) in found.found


def test_an_api_that_does_not_run_is_only_a_warning():
    port = free_port()
    assert findings.api(Settings(port=port), f"http://127.0.0.1:{port}").verdict == "warn"


def test_sql_is_ok_only_when_it_is_migrated(tmp_path: Path, sqlite_url: str):
    assert findings.sql(Settings(database_url=sqlite_url)).verdict == "ok"
    assert findings.sql(Settings(data_dir=tmp_path / "none")).verdict == "fail"
    assert not (tmp_path / "none").exists(), "the check made something"


def test_doctor_tells_all_findings_and_fails_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PROMPTMILL_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    monkeypatch.setenv("PROMPTMILL_PORT", str(free_port()))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "--json", "--data-dir", str(tmp_path)])
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert list(found) == ["versions", "disk", "redis", "sql", "model", "worker", "api"]
    assert {name for name, one in found.items() if one["verdict"] == "fail"} == {"redis", "sql", "model", "worker"}
    assert all(one["mend"] for name, one in found.items() if one["verdict"] == "fail" and name != "model")
    assert "models pull" in found["model"]["found"]
    assert done.exit_code == 1
