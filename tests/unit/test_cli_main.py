"""The command line itself: quick to start, one line per error, documented exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptmill.cli.main import app
from promptmill.supervisor.services import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("up", "demo", "api", "worker", "maintenance", "beat", "flower", "migrate")
HEAVY = ("torch", "transformers", "celery", "sqlalchemy", "flask", "alembic", "redis", "numpy")


def run(*words: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **{f"PROMPTMILL_{k.upper()}": v for k, v in settings.items()}}
    return subprocess.run([sys.executable, "-m", "promptmill", *words], capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.mark.parametrize("words", [["--help"], ["config", "--json"]], ids=" ".join)
def test_nothing_heavy_is_imported_to_start(words: list[str], tmp_path: Path):
    code = f"""
import sys
sys.argv = ["promptmill", *{words}]
from promptmill.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_every_command_explains_itself():
    names = (*SERVERS, "submit", "tail", "jobs", "cancel", "stats", "config", "doctor", "models")
    for name in names:
        done = CliRunner().invoke(app, [name, "--help"])
        assert done.exit_code == 0, name
    assert {command.name or command.callback.__name__ for command in app.registered_commands if command.callback} == set(names) - {"models"}


def test_config_shows_values_origins_and_no_password(tmp_path: Path):
    done = run("config", "--json", cwd=tmp_path, redis_url="redis://:hunter2@h/0", port="8111")
    found = json.loads(done.stdout)
    assert found["port"] == {"value": "8111", "from": "environment", "variable": "PROMPTMILL_PORT"}
    assert "hunter2" not in done.stdout
    plain = run("config", cwd=tmp_path, port="8111").stdout
    assert "port\t8111\tenvironment" in plain.splitlines()


def test_a_bad_setting_is_one_line_and_exit_code_1(tmp_path: Path):
    done = run("config", cwd=tmp_path, port="many")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith("promptmill: ")
    assert "PROMPTMILL_PORT" in done.stderr


def test_wrong_usage_is_exit_code_2(tmp_path: Path):
    assert run("submit", "--no-such-option", cwd=tmp_path).returncode == 2
    assert run("submit", "x", "--priority", "urgent", cwd=tmp_path).returncode == 2


def test_no_server_is_one_line_and_exit_code_3(tmp_path: Path):
    done = run("jobs", cwd=tmp_path, port=str(free_port()))
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)


def test_the_version_is_told(tmp_path: Path):
    assert run("--version", cwd=tmp_path).stdout.startswith("promptmill 0.")


def test_a_missing_model_stops_up_with_one_line(tmp_path: Path):
    done = run("up", "--port", "0", "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "promptmill models pull" in done.stderr


def test_no_model_is_listed_as_no_model(tmp_path: Path):
    assert json.loads(run("models", "list", "--json", cwd=tmp_path).stdout) == []
    assert run("models", "use", "nothing", cwd=tmp_path).returncode == 1
