"""Settings: which source wins, what a bad value says, what `config` hides."""

from pathlib import Path

import pytest

from promptmill.core.errors import ConfigError
from promptmill.core.settings import Settings, explain, load_settings, mask


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a config/ in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    return tmp_path


def origin(name: str, **flags: object) -> tuple[str, str]:
    rows = {row[0]: row[1:] for row in explain(load_settings(**flags), **flags)}
    return rows[name]


def test_each_source_wins_over_the_one_before(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert origin("port") == ("8000", "default")
    (folder / "config" / "development.toml").write_text("port = 8001\n")
    assert origin("port") == ("8001", "config/development.toml")
    (folder / ".env").write_text("PROMPTMILL_PORT=8002\n")
    assert origin("port") == ("8002", ".env")
    monkeypatch.setenv("PROMPTMILL_PORT", "8003")
    assert origin("port") == ("8003", "environment")
    assert origin("port", port=8004) == ("8004", "flag")


def test_a_flag_that_was_not_given_hides_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PROMPTMILL_PORT", "8003")
    assert load_settings(port=None).port == 8003


def test_the_environment_chooses_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "config" / "production.toml").write_text('host = "0.0.0.0"\n')
    assert load_settings().host == "127.0.0.1"
    monkeypatch.setenv("PROMPTMILL_ENV", "production")
    assert load_settings().host == "0.0.0.0"


@pytest.mark.parametrize(
    ("name", "value"), [("port", "-1"), ("port", "many"), ("engine", "magic"), ("api_threads", "8"), ("lease_seconds", "nan")]
)
def test_a_bad_value_is_one_line_that_names_its_variable(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv(f"PROMPTMILL_{name.upper()}", value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert f"PROMPTMILL_{name.upper()}" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_damaged_file_is_named(folder: Path):
    (folder / "config" / "development.toml").write_text("port = = 1\n")
    with pytest.raises(ConfigError, match=r"development\.toml"):
        load_settings()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("postgresql+psycopg://me:secret@db/promptmill", "postgresql+psycopg://me:***@db/promptmill"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("sqlite:////data/a:b@c.db", "sqlite:////data/a:b@c.db"),
    ],
)
def test_passwords_of_urls_are_hidden(url: str, shown: str):
    assert mask(url) == shown


def test_explain_shows_no_password(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PROMPTMILL_REDIS_URL", "redis://:hunter2@host/0")
    assert all("hunter2" not in value for _, value, _ in explain(load_settings()))


def test_redis_stands_in_for_what_is_not_set_apart(folder: Path):
    settings = Settings(redis_url="redis://one/0", stream_url="redis://two/0")
    assert (settings.broker, settings.stream, settings.cache) == ("redis://one/0", "redis://two/0", "redis://one/0")


@pytest.mark.parametrize("env", ["development", "test", "production"])
def test_the_files_of_this_project_are_valid(env: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import tomllib

    config = Path(__file__).resolve().parents[2] / "config"
    monkeypatch.setenv("PROMPTMILL_CONFIG_DIR", str(config))
    monkeypatch.setenv("PROMPTMILL_ENV", env)
    monkeypatch.chdir(tmp_path)
    assert load_settings().env == env
    assert set(tomllib.loads((config / f"{env}.toml").read_text())) <= set(Settings.model_fields), "a name that no setting has"
