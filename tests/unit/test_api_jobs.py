"""The routes of jobs, models, health and metrics over in-memory twins."""

import threading
from pathlib import Path
from typing import Any

import pytest

from api.schemas import ErrorBody, FinishedError, Health, Job, JobList, ModelList
from promptmill.core import events
from promptmill.core.errors import Unavailable
from promptmill.core.jobs import Choice, Finish, JobError, Outcome, Priority, QueueName, Status, Timings, Usage
from promptmill.core.ports import WorkerInfo
from storage.memory import MemoryFanOut, MemoryJobStore
from tests.support.api import TINY, Twins, make_twins
from tests.support.clock import FakeClock

NOBODY = "job_01m8000000000000000000000z"  # well formed, and nobody's
INTERACTIVE = QueueName(Priority.INTERACTIVE, TINY)
STANDARD = QueueName(Priority.STANDARD, TINY)
OUTCOME = Outcome((Choice(0, "four", (4, 5, 6), "length"),), Usage(2, 3))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def api(tmp_path: Path, clock: FakeClock) -> Twins:
    return make_twins(tmp_path, clock=clock)


def run(api: Twins, job_id: str, outcome: Outcome | None = OUTCOME, error: JobError | None = None) -> None:
    """What a worker does with the job, all at once."""
    (claim,) = api.store.claim_many([job_id], "worker-a", "node-a")
    assert claim is not None
    status = Status.FAILED if error else Status.SUCCEEDED
    assert api.store.finish_many([Finish(job_id, claim.attempt, "worker-a", status, outcome, error, Timings(total_ms=5.0))]) == [True]


# -- submit -----------------------------------------------------------------------------------------


def test_a_submitted_job_is_committed_and_answered_in_the_documented_shape(api: Twins):
    answer = api.submit({"prompt": "hi", "metadata": {"a": "b"}, "max_tokens": 3})
    assert answer.status_code == 202
    job = Job.model_validate(answer.json, strict=True)
    assert set(answer.json) == set(Job.model_fields)
    assert answer.headers["Location"] == f"/v1/jobs/{job.id}" == job.links.self
    assert api.store.get(job.id) is not None
    assert (job.status, job.priority, job.metadata) == ("queued", "standard", {"a": "b"})
    assert job.request == {"prompt": "hi", "metadata": {"a": "b"}, "max_tokens": 3}


def test_interactive_is_sent_at_once_and_the_others_are_fed(api: Twins):
    interactive = api.submit({"prompt": "hi", "priority": "interactive"}).json["id"]
    assert api.queue.take(INTERACTIVE) == interactive
    assert api.fed == []
    api.submit({"prompt": "hi"})
    assert api.fed == [STANDARD]
    assert api.queue.take(STANDARD) is None


def test_a_result_can_be_read_in_both_shapes(api: Twins):
    prompt, chat = (api.submit(body).json["id"] for body in ({"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}))
    run(api, prompt)
    run(api, chat)
    first, second = (api.client.get(f"/v1/jobs/{job}").json for job in (prompt, chat))
    Job.model_validate(first, strict=True)
    Job.model_validate(second, strict=True)
    assert first["result"]["choices"][0]["text"] == "four"
    assert first["result"]["id"] == prompt.replace("job_", "cmpl-")
    assert second["result"]["choices"][0]["message"] == {"role": "assistant", "content": "four"}
    assert second["result"]["usage"]["total_tokens"] == 5
    assert first["timings"]["total_ms"] == 5.0


def test_a_failed_job_shows_its_error(api: Twins):
    job = api.submit().json["id"]
    run(api, job, None, JobError("engine_failed", "the engine failed"))
    body = api.client.get(f"/v1/jobs/{job}").json
    assert body["status"] == "failed"
    assert body["error"] == {"code": "engine_failed", "message": "the engine failed"}
    assert body["result"] is None


class StoreAway(MemoryJobStore):
    def submit(self, jobs: Any) -> Any:
        raise Unavailable("the database cannot be reached", retry_after=500)

    def check(self) -> None:
        raise Unavailable("the database is not migrated")


class BrokenStore(MemoryJobStore):
    def get(self, job_id: str, tenant: str = "default") -> Any:
        raise RuntimeError("secret detail")


class HeardFanOut(MemoryFanOut):
    """Tells when a viewer came."""

    came = threading.Event()

    def open(self, job: str) -> Any:
        feed = super().open(job)
        self.came.set()
        return feed


def test_sql_away_gives_503_with_retry_after(tmp_path: Path):
    api = make_twins(tmp_path, store_type=StoreAway)
    answer = api.submit()
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "60"
    ErrorBody.model_validate(answer.json, strict=True)
    for path in ("/health", "/health/ready"):
        assert api.client.get(path).status_code == 503
    assert api.client.get("/health/live").status_code == 200


def test_a_fault_of_ours_is_a_500_without_details(tmp_path: Path):
    api = make_twins(tmp_path, store_type=BrokenStore)
    answer = api.client.get(f"/v1/jobs/{NOBODY}")
    assert answer.status_code == 500
    assert ErrorBody.model_validate(answer.json, strict=True).error.code == "internal_error"
    assert "secret" not in answer.text


# -- the result cache -------------------------------------------------------------------------------

GREEDY = {"prompt": "hi", "temperature": 0, "max_tokens": 3}


def cached(api: Twins, body: dict[str, Any] = GREEDY) -> None:
    job = api.store.get(api.submit(body).json["id"])
    assert job is not None
    api.cache.put("default", job.spec.cache_key(job.model_revision), OUTCOME)


def test_a_cache_hit_is_a_job_born_succeeded(api: Twins):
    cached(api)
    answer = api.submit({**GREEDY, "priority": "interactive"}).json
    assert (answer["status"], answer["cache"]) == ("succeeded", "hit")
    assert answer["result"]["choices"][0]["text"] == "four"
    assert api.queue.take(INTERACTIVE) is None
    assert 'promptmill_cache_hits_total{kind="exact"} 1.0' in api.client.get("/metrics").text


@pytest.mark.parametrize("change", [{"cache": "off"}, {"seed": 1}, {"max_tokens": 4}, {"stop": "x"}, {"prompt": "ho"}, {"temperature": 1}])
def test_what_changes_the_result_is_no_hit(api: Twins, change: dict[str, Any]):
    cached(api)
    assert api.submit({**GREEDY, **change}).json["status"] == "queued"


def test_only_deterministic_requests_use_the_cache(api: Twins):
    assert api.submit({"prompt": "hi"}).json["cache"] == "off"
    assert api.submit({"prompt": "hi", "seed": 5}).json["cache"] == "miss"
    assert api.submit({"prompt": "hi", "seed": 5, "cache": "off"}).json["cache"] == "off"


# -- idempotency ------------------------------------------------------------------------------------


def test_d10_the_same_key_and_body_give_the_same_job(api: Twins):
    headers = {"Idempotency-Key": "k"}
    first = api.client.post("/v1/jobs", data=b'{"prompt": "hi", "seed": 1}', content_type="application/json", headers=headers)
    again = api.client.post("/v1/jobs", data=b'{"seed": 1, "prompt": "hi"}', content_type="application/json", headers=headers)
    assert first.status_code == again.status_code == 202
    assert again.json["id"] == first.json["id"]
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert len(api.fed) == 1, "a replay was started again"


def test_d10_the_same_key_with_another_body_is_422(api: Twins):
    assert api.submit({"prompt": "a"}, headers={"Idempotency-Key": "k"}).status_code == 202
    answer = api.submit({"prompt": "b"}, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 422
    assert answer.json["error"]["code"] == "idempotency_key_reused"


@pytest.mark.parametrize("key", ["", "k" * 256, "k" * 5000, "ключ", "a\tb"])
def test_d10_a_bad_key_is_400(api: Twins, key: str):
    assert api.submit(headers={"Idempotency-Key": key.encode("utf-8").decode("latin-1")}).status_code == 400


def test_d10_a_refused_request_does_not_use_its_key_up(api: Twins):
    headers = {"Idempotency-Key": "k" * 255}
    assert api.submit({"prompt": "a", "n": 0}, headers=headers).status_code == 400
    assert api.submit({"prompt": "a"}, headers=headers).status_code == 202


# -- read and list ----------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [NOBODY, "7", "job_", "job_" + "A" * 26, "%00", "job_%00", "x" * 5000])
def test_an_unknown_job_is_404_everywhere(api: Twins, job: str):
    requests = [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/events")]
    for method, rest in requests:
        answer = api.client.open(f"/v1/jobs/{job}{rest}", method=method)
        assert answer.status_code == 404
        ErrorBody.model_validate(answer.json, strict=True)


def test_the_list_goes_page_by_page_newest_first(api: Twins, clock: FakeClock):
    ids = []
    for _ in range(5):
        clock.advance(1)
        ids.append(api.submit().json["id"])
    first = api.client.get("/v1/jobs?limit=3").json
    JobList.model_validate(first, strict=True)
    second = api.client.get(f"/v1/jobs?limit=3&after={first['last_id']}").json
    assert [job["id"] for job in first["data"] + second["data"]] == ids[::-1]
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert first["first_id"] == ids[-1]


def test_the_list_by_status(api: Twins):
    done, _ = (api.submit().json["id"] for _ in range(2))
    run(api, done)
    assert [job["id"] for job in api.client.get("/v1/jobs?status=succeeded").json["data"]] == [done]
    empty = api.client.get("/v1/jobs?status=failed").json
    assert empty == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("limit=1.0", "limit"),
        ("limit=٣", "limit"),
        ("status=happy", "status"),
        ("status=", "status"),
        ("after=7", "after"),
        ("batch_id=batch_1", "batch_id"),
    ],
)
def test_bad_queries_of_the_list_are_refused(api: Twins, query: str, param: str):
    answer = api.client.get(f"/v1/jobs?{query}")
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == param


# -- wait -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["long", "-1", "60.1", "nan", "inf", ""])
def test_a_bad_wait_is_refused(api: Twins, wait: str):
    answer = api.client.get(f"/v1/jobs/{NOBODY}?wait={wait}")
    assert answer.status_code == 400
    assert answer.json["error"]["param"] == "wait"


def test_wait_ends_with_the_terminal_event(tmp_path: Path):
    api = make_twins(tmp_path, fanout_type=HeardFanOut)
    job = api.submit().json["id"]
    answers: list[Any] = []
    caller = threading.Thread(target=lambda: answers.append(api.app.test_client().get(f"/v1/jobs/{job}?wait=60")))
    caller.start()
    assert HeardFanOut.came.wait(10)
    run(api, job)
    api.stream.append(
        [
            events.started(job, 1, TINY),
            events.terminal(job, 1, Status.SUCCEEDED, outcome=None, error=None, timings=Timings(), cache="off"),
        ]
    )
    caller.join(10)
    assert answers[0].json["status"] == "succeeded"
    assert api.services.long_lived.taken == 0


def test_wait_of_a_finished_job_returns_at_once_and_needs_no_place(api: Twins):
    job = api.submit().json["id"]
    run(api, job)
    while api.services.long_lived.taken < 512 - 64:
        api.services.long_lived.enter()
    assert api.client.get(f"/v1/jobs/{job}?wait=60").json["status"] == "succeeded"


def test_wait_beyond_the_cap_is_503_while_short_requests_answer(api: Twins):
    job = api.submit().json["id"]
    while api.services.long_lived.taken < 512 - 64:
        api.services.long_lived.enter()
    for path in (f"/v1/jobs/{job}?wait=5", f"/v1/jobs/{job}/events"):
        answer = api.client.get(path)
        assert answer.status_code == 503
        assert answer.json["error"]["code"] == "overloaded"
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert api.client.get("/health").status_code == 200
    assert api.submit().status_code == 202
    assert api.client.post(f"/v1/jobs/{job}/cancel").status_code == 200


# -- cancel -----------------------------------------------------------------------------------------


def cancelled(api: Twins) -> float:
    return api.services.metrics.registry.get_sample_value("promptmill_jobs_cancelled_total", {"reason": "requested"}) or 0.0


@pytest.mark.parametrize(("method", "rest"), [("POST", "/cancel"), ("DELETE", "")])
def test_a_queued_job_is_cancelled_at_once_and_its_viewers_are_told(api: Twins, method: str, rest: str):
    job = api.submit().json["id"]
    answer = api.client.open(f"/v1/jobs/{job}{rest}", method=method)
    assert answer.status_code == 200
    assert answer.json["status"] == "cancelled"
    marker, end = api.stream.read(job, events.START)
    assert (str(marker.cursor), end.type, end.data["status"]) == ("1-0", "done", "cancelled")
    assert api.queue.cancels == []
    assert cancelled(api) == 1


def test_a_running_job_is_told_to_stop(api: Twins):
    job = api.submit().json["id"]
    api.store.claim_many([job], "worker-a", "node-a")
    answer = api.client.post(f"/v1/jobs/{job}/cancel")
    assert answer.status_code == 202
    assert (answer.json["status"], answer.json["cancel_requested"]) == ("running", True)
    assert api.queue.cancels == [(job, "node-a")]
    assert api.client.post(f"/v1/jobs/{job}/cancel").status_code == 202
    assert cancelled(api) == 0, "the worker counts it once it has stopped"


def test_a_finished_job_cannot_be_cancelled(api: Twins):
    job = api.submit().json["id"]
    run(api, job)
    for method, rest in (("POST", "/cancel"), ("DELETE", "")):
        answer = api.client.open(f"/v1/jobs/{job}{rest}", method=method)
        assert answer.status_code == 409
        body = FinishedError.model_validate(answer.json, strict=True)
        assert body.error.code == "already_finished"
        assert body.job.status == "succeeded"
    assert cancelled(api) == 0


# -- models, health, metrics ------------------------------------------------------------------------


def test_models(tmp_path: Path):
    api = make_twins(tmp_path, names=("org/one", "two"))
    listed = api.client.get("/v1/models").json
    ModelList.model_validate(listed, strict=True)
    assert [model["id"] for model in listed["data"]] == ["org/one", "two"]
    assert api.client.get("/v1/models/org%2Fone").json == listed["data"][0]
    answer = api.client.get("/v1/models/three")
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "model_not_found")


def test_health_lists_the_workers_and_their_models(api: Twins):
    api.workers.announce(WorkerInfo("celery@a", {TINY: "r1"}, "instant", 32, True, "http://127.0.0.1:1/metrics", 7, "host"))
    body = api.client.get("/health").json
    Health.model_validate(body, strict=True)
    assert body["status"] == "ready"
    assert body["workers"][0]["models"] == {TINY: "r1"}
    assert body == api.client.get("/health/ready").json


def test_metrics_count_requests_by_route_and_show_the_queues(api: Twins, clock: FakeClock):
    api.submit()
    api.submit({"prompt": 5})
    api.client.get(f"/v1/jobs/{NOBODY}")
    api.client.get("/no/such/route")
    clock.advance(7)
    text = api.client.get("/metrics").text
    assert 'promptmill_requests_total{code="202",route="/v1/jobs"} 1.0' in text
    assert 'promptmill_requests_total{code="400",route="/v1/jobs"} 1.0' in text
    assert 'promptmill_requests_total{code="404",route="/v1/jobs/<job_id>"} 1.0' in text
    assert 'promptmill_requests_total{code="404",route="unknown"} 1.0' in text
    assert 'promptmill_queue_depth{priority="standard"} 1.0' in text
    assert 'promptmill_queue_depth{priority="bulk"} 0.0' in text
    assert 'promptmill_queue_oldest_seconds{priority="standard"} 7.0' in text


def test_many_scrapes_cost_one_query_a_second(api: Twins, clock: FakeClock):
    assert 'promptmill_queue_depth{priority="standard"} 0.0' in api.client.get("/metrics").text
    api.submit()
    assert 'promptmill_queue_depth{priority="standard"} 0.0' in api.client.get("/metrics").text
    clock.advance(1)
    assert 'promptmill_queue_depth{priority="standard"} 1.0' in api.client.get("/metrics").text
