"""The command lines of the processes: the flags that a wrong one of would cost data or a port."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from promptmill.core.settings import Settings
from promptmill.supervisor.commands import COMMANDS, Command, address

SETTINGS = Settings(host="10.0.0.1", port=8123, flower_port=5999, api_workers=2, api_threads=100)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_process_is_a_module_of_this_interpreter(name: str):
    """Not a console script: the first line of one cannot hold a path with a space."""
    assert COMMANDS[name](SETTINGS).argv[:2] == (sys.executable, "-m")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_process_is_named_by_its_role_or_by_its_setting(name: str):
    assert COMMANDS[name](SETTINGS).env["PROMPTMILL_PROCESS"] == name
    assert COMMANDS[name](SETTINGS.model_copy(update={"process": "other-3"})).env["PROMPTMILL_PROCESS"] == "other-3"


def test_the_api_listens_where_the_settings_say():
    argv = COMMANDS["api"](SETTINGS).argv
    assert {"--bind=10.0.0.1:8123", "--workers=2", "--threads=100", "--worker-class=api.server.Worker", "--graceful-timeout=25"} <= set(
        argv
    )


def test_the_worker_takes_the_pool_of_the_app_and_drains_on_sigterm():
    command = COMMANDS["worker"](SETTINGS.model_copy(update={"process": "worker-2"}))
    assert "-P" not in command.argv, "a pool named here would replace the engine's"
    assert command.env["REMAP_SIGTERM"] == "SIGQUIT"
    assert command.argv[-2:] == ("-n", "worker-2@%h")


def test_maintenance_loads_no_engine_and_beat_is_not_embedded():
    argv = COMMANDS["maintenance"](SETTINGS).argv
    assert argv[argv.index("-P") + 1] == "threads"
    assert argv[argv.index("-Q") + 1] == "maintenance"
    assert not any("-B" in COMMANDS[name](SETTINGS).argv for name in COMMANDS)


def test_flower_listens_on_the_host_alone_and_is_bounded():
    assert {"--address=10.0.0.1", "--port=5999", "--max_tasks=10000"} <= set(COMMANDS["flower"](SETTINGS).argv)


def test_flags_travel_in_the_environment_but_do_not_rename_the_process():
    command = Command("api", ("x",), {"PROMPTMILL_PROCESS": "api"}).with_flags({"port": 9, "host": None, "process": "no"})
    assert command.env == {"PROMPTMILL_PROCESS": "api", "PROMPTMILL_PORT": "9"}


def test_execute_becomes_the_command_line():
    code = (
        "from promptmill.supervisor.commands import Command\nCommand('n', ('/bin/sh', '-c', 'echo $$ $WORD'), {'WORD': 'here'}).execute()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], env=os.environ
    ) as done:
        assert done.communicate()[0].split() == [str(done.pid), "here"]


def test_an_ipv6_address_is_bracketed():
    assert address("::1", 80) == "[::1]:80"
    assert address("127.0.0.1", 80) == "127.0.0.1:80"
