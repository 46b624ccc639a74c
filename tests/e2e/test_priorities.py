"""Must show 4 (and case D08): a flood of bulk work is not felt by others, and is not starved by them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.client import Client
from tests.support.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FLOOD = 200
ROWS = 4


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Four rows and one in reserve, so that a flood takes some seconds."""
    folder: Path = tmp_path_factory.mktemp("narrow")
    with System(folder / "data", instant_step_ms=20, engine_rows=ROWS, reserved_rows=1) as system:
        yield system


def submit_many(client: Client, count: int, priority: str, tokens: int) -> list[str]:
    def one(number: int) -> str:
        return client.submit(f"{priority} {number}", max_tokens=tokens, temperature=0, cache="off", priority=priority)["id"]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(count)))


def test_d08_an_interactive_job_starts_before_a_flood_of_bulk_jobs_is_through(narrow: System):
    client = narrow.client
    flood = submit_many(client, FLOOD, "bulk", 8)
    client_job = client.submit("in a hurry", max_tokens=4, temperature=0, cache="off", priority="interactive")
    hurry = client.wait(client_job["id"])
    left = client.jobs(status="queued")
    assert hurry["status"] == "succeeded"
    assert len(left) > FLOOD // 4, "the flood was through before it could be overtaken"

    done = [client.wait(job, 120) for job in flood]
    assert {job["status"] for job in done} == {"succeeded"}
    overtakers = [job for job in done if hurry["created_at"] < job["started_at"] < hurry["started_at"]]
    assert len(overtakers) <= ROWS, "bulk jobs went on starting while an interactive one waited"
    after = [job for job in done if job["started_at"] > hurry["started_at"]]
    assert len(after) > FLOOD // 4


def test_d08_bulk_work_goes_on_under_a_steady_interactive_load(narrow: System):
    client = narrow.client
    crowd = submit_many(client, 60, "interactive", 20)
    patient = client.submit("patient", max_tokens=4, temperature=0, cache="off", priority="bulk")
    bulk = client.wait(patient["id"], 120)
    last = max(client.wait(job, 120)["started_at"] for job in crowd)
    assert bulk["status"] == "succeeded"
    assert bulk["started_at"] < last, "the bulk job waited for the end of the interactive load"


@pytest.mark.parametrize("value", [-1, 1, 9, 10, "high", "", True, ["bulk"]])
def test_d08_an_unknown_priority_is_refused(client: Client, value: object):
    answer = client.http.post("/v1/jobs", json={"prompt": "x", "priority": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("value", [None, 0])
def test_d08_no_priority_means_that_of_the_route(client: Client, value: object):
    answer = client.http.post("/v1/jobs", json={"prompt": "x", "priority": value, "max_tokens": 1})
    assert answer.status_code == 202
    assert answer.json()["priority"] == "standard"
