"""Must show 5 (and case D01): no job is lost or finished twice when its worker dies by SIGKILL."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.client import Client, Viewer, text_of
from tests.support.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

JOBS = 8


def fields(number: int, tokens: int) -> dict[str, object]:
    """Half of them greedy, half of them sampled with a seed."""
    drawn = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
    return {"max_tokens": tokens, "cache": "off", "priority": "interactive", **drawn}


def unbroken(client: Client, tokens: int, least: int) -> list[tuple[str, dict[str, object], str]]:
    """(prompt, fields, text) of JOBS requests that give at least ``least`` tokens when nothing happens."""
    asked = [(f"Story number {number}. Once upon a time there was a sailor, and", fields(number, tokens)) for number in range(2 * JOBS)]
    ids = [client.submit(prompt, **how)["id"] for prompt, how in asked]
    done = [client.wait(job, 120) for job in ids]
    long = [(*ask, text_of(job)) for ask, job in zip(asked, done, strict=True) if job["result"]["usage"]["completion_tokens"] >= least]
    assert len(long) >= JOBS
    return long[:JOBS]


def kill_the_worker_in_mid_run(system: System, tokens: int, shown: int) -> None:
    """``shown``: tokens that every job has published when the worker dies."""
    client = system.client
    requests = unbroken(client, tokens, least=4 * shown)
    expected = [text for _, _, text in requests]
    succeeded = client.metric("promptmill_jobs_total", status="succeeded")
    jobs = [client.submit(prompt, **how)["id"] for prompt, how, _ in requests]

    def watch_begin(job: str):
        events = client.events(job, timeout=120)
        viewer = Viewer()
        for event in events:
            viewer.see(event)
            if len(viewer.token_ids) >= shown:
                return viewer, events
        raise AssertionError(f"{job} ended before the worker could be killed")

    with ThreadPoolExecutor(JOBS) as pool:
        watched = list(pool.map(watch_begin, jobs))
        killed = system.kill("worker-1")
        for _ in pool.map(lambda pair: pair[0].watch(pair[1]), watched):
            pass
    done = [client.wait(job, 120) for job in jobs]

    assert [job["status"] for job in done] == ["succeeded"] * JOBS
    assert [text_of(job) for job in done] == expected
    assert [viewer.text for viewer, _ in watched] == expected
    assert [job["attempt"] for job in done] == [2] * JOBS
    assert client.metric("promptmill_jobs_total", status="succeeded") - succeeded == JOBS, "finished once each"
    assert client.metric("promptmill_leases_recovered_total") >= JOBS
    assert system.process("worker-1").pid != killed


def test_d01_eight_running_jobs_survive_the_death_of_their_worker(tmp_path: Path):
    with System(tmp_path / "data", instant_step_ms=20) as system:
        kill_the_worker_in_mid_run(system, tokens=150, shown=10)


@pytest.mark.model
def test_d01_the_real_model_gives_the_same_texts_after_the_death_of_its_worker(tmp_path: Path):
    with System(tmp_path / "data", engine="torch") as system:
        kill_the_worker_in_mid_run(system, tokens=40, shown=4)


def test_d01_jobs_that_wait_are_not_charged_for_a_dead_worker(tmp_path: Path):
    """Standard and bulk jobs behind the running ones keep their place and run in their first attempt."""
    with System(tmp_path / "data", instant_step_ms=20, engine_rows=2, reserved_rows=1) as system:
        client = system.client
        running = [client.submit(f"run {n}", max_tokens=200, cache="off", temperature=0, priority="standard")["id"] for n in range(2)]
        for job in running:
            next(event for event in client.events(job) if event["type"] == "token")
        waiting = [client.submit(f"wait {n}", max_tokens=4, cache="off", temperature=0, priority="bulk")["id"] for n in range(6)]
        system.kill("worker-1")
        done = [client.wait(job, 120) for job in running + waiting]
    assert [job["status"] for job in done] == ["succeeded"] * 8
    assert [job["attempt"] for job in done[:2]] == [2, 2]
    assert all(job["attempt"] <= 2 for job in done[2:])
