"""Logs and metrics: a job's whole story can be read from them, and no prompt can."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client, Viewer
from tests.support.servers import eventually
from tests.support.system import System

pytestmark = pytest.mark.e2e

SECRET = "xylophone-quartz-47"


def lines(system: System) -> list[dict[str, Any]]:
    """Every JSON line of every process's log."""
    found = []
    for file in sorted((system.data_dir / "logs").glob("*.log")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("{"):
                found.append(json.loads(line))
    return found


def story(system: System, job: str) -> list[dict[str, Any]]:
    return sorted((line for line in lines(system) if line.get("job") == job), key=lambda line: line["timestamp"])


def test_the_logs_tell_the_whole_story_of_a_job(instant: System):
    job = instant.client.submit(f"{SECRET} story", max_tokens=5, temperature=0, cache="off", priority="interactive")["id"]
    Viewer().watch(instant.client.events(job))
    eventually(
        lambda: ("delivered", "worker-1") in {(line["event"], line["process"]) for line in story(instant, job)}, what="the last line"
    )
    told = story(instant, job)
    words = [line["event"] for line in told]
    in_order = ["received", "batched", "started", "first_token", "finished", "delivered"]
    assert [word for word in dict.fromkeys(words) if word in in_order] == in_order
    by_word = {line["event"]: line for line in told if line["process"] == "worker-1"}
    assert {line["process"] for line in told} == {"api", "worker-1"}
    assert by_word["batched"]["size"] >= 1
    assert by_word["batched"]["by"] in ("size", "time", "gap")
    for word in in_order[1:]:
        assert by_word[word]["attempt"] == 1, word
        assert by_word[word]["tenant"] == "default", word
        assert by_word[word]["worker"], word
    assert by_word["finished"]["status"] == "succeeded"


def test_no_log_holds_a_prompt(instant: System):
    job = instant.client.run(f"{SECRET} quiet", max_tokens=3)
    instant.client.http.post("/v1/jobs", json={"prompt": SECRET, "max_tokens": -1})
    instant.client.http.post("/v1/jobs", content=f'{{"prompt": "{SECRET}'.encode(), headers={"content-type": "application/json"})
    assert story(instant, job["id"])
    for file in (instant.data_dir / "logs").iterdir():
        assert SECRET not in file.read_text(encoding="utf-8", errors="replace"), file.name


def test_metrics_of_all_processes_are_at_the_api(instant: System):
    client = instant.client
    before = metrics(client)
    submitted = client.submit("count me", max_tokens=7, temperature=0, cache="off", priority="interactive")
    Viewer().watch(client.events(submitted["id"]))  # its terminal event comes after all is counted
    job = client.get(submitted["id"])
    after = metrics(client)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["promptmill_generation_tokens_total"] == 7
    assert grown["promptmill_prompt_tokens_total"] == job["result"]["usage"]["prompt_tokens"]
    assert grown["promptmill_jobs_total"] == 1
    assert grown["promptmill_claim_batch_size_count"] == 1
    assert grown["promptmill_time_to_first_token_seconds_count"] == 1
    assert grown["promptmill_e2e_request_latency_seconds_count"] == 1
    assert grown["promptmill_engine_decode_rows_count"] > 0
    assert grown["promptmill_requests_total"] > 0


def metrics(client: Client) -> dict[str, float]:
    names = ("generation_tokens_total", "prompt_tokens_total", "jobs_total", "requests_total", "claim_batch_size_count")
    histograms = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "engine_decode_rows")
    return {f"promptmill_{name}": client.metric(f"promptmill_{name}") for name in (*names, *(f"{name}_count" for name in histograms))}


def test_the_queues_can_be_seen(instant: System):
    text = instant.client.http.get("/metrics").text
    for name in (
        "promptmill_queue_depth",
        "promptmill_queue_oldest_seconds",
        "promptmill_queue_wait_seconds_bucket",
        "promptmill_engine_rows",
    ):
        assert f"\n{name}{{" in text, name


def test_the_data_directory_holds_what_the_documentation_says(instant: System):
    documented = {"promptmill.db", "redis", "logs", "metrics", "up.lock"}
    assert documented <= {path.name for path in Path(instant.data_dir).iterdir()}
