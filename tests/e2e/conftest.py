"""Systems that several tests share; a test that kills, floods or stops one starts its own."""

from collections.abc import Iterator

import pytest

from promptmill.core.models import CARD, DEFAULT_MODEL
from tests.support.client import Client
from tests.support.servers import absent
from tests.support.system import MODELS, System

STEP_MS = 20  # of the slow instant engine: a job of 100 tokens runs for two seconds


@pytest.fixture(scope="session", autouse=True)
def _default_model() -> None:
    """Every engine needs its tokenizer at least."""
    if not (MODELS / DEFAULT_MODEL / CARD).is_file():
        absent("the default model (make setup fetches it)")


@pytest.fixture(scope="session")
def instant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The instant engine without any wait."""
    with System(tmp_path_factory.mktemp("instant") / "data") as system:
        yield system


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The instant engine at a speed that lets a test look at running jobs."""
    with System(tmp_path_factory.mktemp("slow") / "data", instant_step_ms=STEP_MS) as system:
        yield system


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The default model."""
    with System(tmp_path_factory.mktemp("real") / "data", engine="torch") as system:
        yield system


@pytest.fixture
def client(instant: System) -> Client:
    return instant.client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest-xdist: tests that share a system run in one process, so that it is started once."""
    shared = ("slow", "narrow", "restartable", "instant")
    for item in items:
        names = getattr(item, "fixturenames", ())
        group = next((name for name in shared if name in names), None)
        if group and "e2e" in item.path.parts and not item.get_closest_marker("model"):
            item.add_marker(pytest.mark.xdist_group(group))
