"""What `up` refuses before it starts anything, each in one line."""

import os
import socket
from pathlib import Path

import pytest

from promptmill.core.errors import ConfigError
from promptmill.core.models import ModelCard
from promptmill.core.settings import Settings
from promptmill.supervisor.preflight import DataLock, Running, check_disk, check_models, check_port, running

HERE = Running(os.getpid(), "http://127.0.0.1:8123", "redis://127.0.0.1:1/0", None)


def refusal(caught: pytest.ExceptionInfo[ConfigError]) -> str:
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_data_directory_is_held_once_and_the_refusal_names_its_holder(tmp_path: Path):
    lock = DataLock(tmp_path / "new" / "data")
    lock.say(HERE)
    with pytest.raises(ConfigError) as caught:
        DataLock(tmp_path / "new" / "data")
    assert str(os.getpid()) in refusal(caught)
    assert HERE.url in refusal(caught)
    lock.release()
    DataLock(tmp_path / "new" / "data").release()


def test_a_held_directory_tells_where_its_servers_are(tmp_path: Path):
    assert running(tmp_path) is None
    lock = DataLock(tmp_path)
    assert running(tmp_path) is None, "it is still starting"
    lock.say(HERE)
    assert running(tmp_path) == HERE
    lock.release()
    assert running(tmp_path) is None


def test_what_a_killed_up_left_is_not_believed(tmp_path: Path):
    lock = DataLock(tmp_path)
    lock.say(HERE)
    left = (tmp_path / "up.lock").read_bytes()
    lock.release()
    (tmp_path / "up.lock").write_bytes(left)
    assert running(tmp_path) is None
    DataLock(tmp_path).release()


def test_a_data_directory_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data directory"):
        DataLock(tmp_path / "file" / "data")


def test_a_taken_port_is_refused_and_a_free_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_port("127.0.0.1", port)
        assert str(port) in refusal(caught)
    check_port("127.0.0.1", port)
    check_port("127.0.0.1", 0)


def test_a_host_that_is_not_ours_is_refused():
    with pytest.raises(ConfigError) as caught:
        check_port("192.0.2.1", 8123)
    assert "192.0.2.1" in refusal(caught)


def test_a_full_disk_is_refused(tmp_path: Path):
    check_disk(tmp_path, needed=1)
    with pytest.raises(ConfigError) as caught:
        check_disk(tmp_path, needed=2**63)
    assert "full" in refusal(caught)


def test_a_missing_model_is_refused_with_the_command_that_brings_it(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        check_models(Settings(data_dir=tmp_path))
    assert "promptmill models pull" in refusal(caught)


def test_the_models_to_serve_are_found(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / "models" / name).mkdir(parents=True)
        ModelCard(name, "abc", "here", 64, 100, (2,), 1, "<s>", "</s>", 0).save(tmp_path / "models" / name)
    assert [card.name for card in check_models(Settings(data_dir=tmp_path, model="two,one"))] == ["two", "one"]
