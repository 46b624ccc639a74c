"""Fixtures of every test. The servers start only when a test asks for one."""

import hypothesis
import pytest

import batching.engines.torch  # noqa: F401 (sets how libgomp waits, before any test loads torch)
from tests.support.servers import (
    _fakeredis,
    _postgres_template,
    _sqlite_template,
    clean_environment,
    empty_postgres_url,
    fakeredis_url,
    postgres_server,
    postgres_url,
    redis_url,
    sqlite_url,
    valkey_url,
)
from tests.support.stores import stand

hypothesis.settings.register_profile("promptmill", deadline=None)  # how long an example takes is the machine's affair
hypothesis.settings.load_profile("promptmill")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest-xdist: the real model takes all cores, so its tests run in one process, one after the other."""
    for item in items:
        if item.get_closest_marker("model"):
            item.add_marker(pytest.mark.xdist_group("model"))


__all__ = [
    "_fakeredis",
    "_postgres_template",
    "_sqlite_template",
    "clean_environment",
    "empty_postgres_url",
    "fakeredis_url",
    "postgres_server",
    "postgres_url",
    "redis_url",
    "sqlite_url",
    "stand",
    "valkey_url",
]
