"""Must show 8: bad input gets its status and the common error shape, over a real socket."""

import json
from typing import Any

import pytest

from tests.support.client import Client, text_of

pytestmark = pytest.mark.e2e

JSON = {"content-type": "application/json"}
NOBODY = "job_00000000000000000000000000"
LONG = "word " * 20_000
HUGE = json.dumps({"prompt": "x" * (11 * 1024 * 1024)})

CASES: list[tuple[str, str, str, Any, dict[str, str], int]] = [
    # what, method, path, body, headers, status
    ("no body", "POST", "/v1/jobs", "", JSON, 400),
    ("no JSON", "POST", "/v1/jobs", "{", JSON, 400),
    ("a list", "POST", "/v1/jobs", "[]", JSON, 400),
    ("a string", "POST", "/v1/jobs", '"x"', JSON, 400),
    ("null", "POST", "/v1/jobs", "null", JSON, 400),
    ("no UTF-8", "POST", "/v1/jobs", b'{"prompt": "\xff"}', JSON, 400),
    ("a lone surrogate", "POST", "/v1/jobs", '{"prompt": "\\ud800"}', JSON, 400),
    ("a key twice", "POST", "/v1/jobs", '{"prompt": "a", "prompt": "b"}', JSON, 400),
    ("NaN", "POST", "/v1/jobs", '{"prompt": "a", "temperature": NaN}', JSON, 400),
    ("no prompt", "POST", "/v1/jobs", {}, {}, 400),
    ("an empty list of ids", "POST", "/v1/jobs", {"prompt": []}, {}, 400),
    ("an id out of the vocabulary", "POST", "/v1/jobs", {"prompt": [10_000_000]}, {}, 400),
    ("a negative id", "POST", "/v1/jobs", {"prompt": [-1]}, {}, 400),
    ("prompt of a wrong type", "POST", "/v1/jobs", {"prompt": 7}, {}, 400),
    ("prompt and messages", "POST", "/v1/jobs", {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, {}, 400),
    ("no messages", "POST", "/v1/jobs", {"messages": []}, {}, 400),
    ("an unknown role", "POST", "/v1/jobs", {"messages": [{"role": "king", "content": "y"}]}, {}, 400),
    ("an unknown model", "POST", "/v1/jobs", {"prompt": "x", "model": "no-such-model"}, {}, 404),
    ("a model of a wrong type", "POST", "/v1/jobs", {"prompt": "x", "model": 3}, {}, 400),
    ("too long a prompt", "POST", "/v1/jobs", {"prompt": LONG}, {}, 400),
    ("negative max_tokens", "POST", "/v1/jobs", {"prompt": "x", "max_tokens": -1}, {}, 400),
    ("zero max_tokens", "POST", "/v1/jobs", {"prompt": "x", "max_tokens": 0}, {}, 400),
    ("max_tokens as text", "POST", "/v1/jobs", {"prompt": "x", "max_tokens": "5"}, {}, 400),
    ("max_tokens true", "POST", "/v1/jobs", {"prompt": "x", "max_tokens": True}, {}, 400),
    ("a fraction of a token", "POST", "/v1/jobs", {"prompt": "x", "max_tokens": 1.5}, {}, 400),
    ("negative temperature", "POST", "/v1/jobs", {"prompt": "x", "temperature": -0.1}, {}, 400),
    ("top_p of 0", "POST", "/v1/jobs", {"prompt": "x", "top_p": 0}, {}, 400),
    ("a stop that is no text", "POST", "/v1/jobs", {"prompt": "x", "stop": 5}, {}, 400),
    ("an unknown cache word", "POST", "/v1/jobs", {"prompt": "x", "cache": "maybe"}, {}, 400),
    ("an empty stop", "POST", "/v1/jobs", {"prompt": "x", "stop": ""}, {}, 400),
    ("no choices", "POST", "/v1/jobs", {"prompt": "x", "n": 0}, {}, 400),
    ("a grammar that is none", "POST", "/v1/jobs", {"prompt": "x", "guided_regex": "("}, {}, 400),
    ("what is not built: deadline", "POST", "/v1/jobs", {"prompt": "x", "deadline": 4e9}, {}, 400),
    ("what is not built: webhook", "POST", "/v1/jobs", {"prompt": "x", "webhook": {"url": "http://127.0.0.1/"}}, {}, 400),
    ("text", "POST", "/v1/jobs", "prompt=x", {"content-type": "text/plain"}, 415),
    ("a form", "POST", "/v1/jobs", "prompt=x", {"content-type": "application/x-www-form-urlencoded"}, 415),
    ("11 MiB", "POST", "/v1/jobs", HUGE, JSON, 413),
    ("an empty idempotency key", "POST", "/v1/jobs", {"prompt": "x"}, {"idempotency-key": ""}, 400),
    ("an unknown job", "GET", f"/v1/jobs/{NOBODY}", None, {}, 404),
    ("a job id of a wrong form", "GET", "/v1/jobs/7", None, {}, 404),
    ("events of an unknown job", "GET", f"/v1/jobs/{NOBODY}/events", None, {}, 404),
    ("cancel of an unknown job", "POST", f"/v1/jobs/{NOBODY}/cancel", None, {}, 404),
    ("delete of an unknown job", "DELETE", f"/v1/jobs/{NOBODY}", None, {}, 404),
    ("wait of a wrong type", "GET", f"/v1/jobs/{NOBODY}?wait=long", None, {}, 400),
    ("a negative limit", "GET", "/v1/jobs?limit=-1", None, {}, 400),
    ("an unknown status", "GET", "/v1/jobs?status=happy", None, {}, 400),
    ("an unknown route", "GET", "/v1/nothing", None, {}, 404),
    ("a route of a later part", "POST", "/v1/batches", {}, {}, 404),
    ("a wrong method", "PUT", "/v1/jobs", {"prompt": "x"}, {}, 405),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input_is_answered_in_the_common_shape(client: Client, method: str, path: str, body: Any, headers: dict[str, str], status: int):
    arguments = {"json": body} if isinstance(body, dict | list) else {"content": body}
    answer = client.http.request(method, path, headers=headers, **arguments)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["code"], str)
    assert "Traceback" not in answer.text
    assert "word word" not in answer.text, "an error message holds the prompt"


def test_the_field_at_fault_is_named(client: Client):
    error = client.http.post("/v1/jobs", json={"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": 5}]}).json()[
        "error"
    ]
    assert error["param"].startswith("messages[1].content")


def test_bad_input_costs_nobody_else_anything(client: Client):
    """None of the above became a job, and a good request still gets its answer."""
    before = newest(client)
    for _, method, path, body, headers, _ in CASES:
        arguments = {"json": body} if isinstance(body, dict | list) else {"content": body}
        client.http.request(method, path, headers=headers, **arguments)
    assert newest(client) == before
    assert text_of(client.run("still here", max_tokens=3))


def newest(client: Client) -> list[str]:
    return [job["id"] for job in client.http.get("/v1/jobs", params={"limit": 1}).json()["data"]]
