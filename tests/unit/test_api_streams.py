"""The bytes of SSE, and which requests a browser on another page may make."""

from pathlib import Path

import pytest

from api.guard import host_allowed, origin_allowed
from api.streams import PING_S
from promptmill.core import events
from promptmill.core.jobs import Choice, Finish, Outcome, Status, Usage
from promptmill.core.settings import Settings
from tests.support.api import TINY, Twins, make_twins, parse_events
from tests.support.clock import FakeClock

TEXT = "ü\u2028\U0001f642\n\ndata: x\x00"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def api(tmp_path: Path, clock: FakeClock) -> Twins:
    return make_twins(tmp_path, clock=clock)


def finished(api: Twins, *, log: bool = True) -> str:
    job = api.submit().json["id"]
    api.store.claim_many([job], "w", "n")
    outcome = Outcome((Choice(0, TEXT, (1, 2), "stop"),), Usage(2, 2))
    api.store.finish_many([Finish(job, 1, "w", Status.SUCCEEDED, outcome)])
    if log:
        row = api.store.get(job)
        assert row is not None
        api.stream.append(
            [
                events.started(job, 1, TINY),
                events.tokens(job, 1, index=0, pos=0, text=TEXT, token_ids=(1, 2)),
                events.terminal(job, 1, row.status, outcome=outcome, error=None, timings=row.timings, cache=row.cache),
            ]
        )
    return job


@pytest.mark.parametrize("log", [True, False])
def test_b07_b12_every_frame_is_id_and_data_in_ascii_and_the_last_is_terminal(api: Twins, log: bool):
    answer = api.client.get(f"/v1/jobs/{finished(api, log=log)}/events")
    assert answer.status_code == 200
    assert answer.data.isascii()
    assert answer.data.endswith(b"}\n\n")
    assert b"event:" not in answer.data.replace(TEXT.encode(), b"")
    found = parse_events(answer.data)
    assert [event["type"] for event in found] == ["started" if log else "reset", "token", "done"]
    assert found[1]["text"] == TEXT
    assert found[2]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_b10_the_headers_keep_proxies_from_holding_the_stream_back(api: Twins, method: str):
    answer = api.client.open(f"/v1/jobs/{finished(api)}/events", method=method)
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in answer.headers
    assert "Content-Encoding" not in answer.headers
    answer.close()
    assert api.services.long_lived.taken == 0


def test_b11_the_cursor_comes_as_header_or_query(api: Twins):
    job = finished(api)
    with api.client.get(f"/v1/jobs/{job}/events") as answer:
        whole = parse_events(answer.data)
    for options in ({"headers": {"Last-Event-ID": whole[0]["id"]}}, {"query_string": {"after": whole[0]["id"]}}):
        answer = api.client.get(f"/v1/jobs/{job}/events", **options)
        assert parse_events(answer.data) == whole[1:]
        answer.close()
    end = api.client.get(f"/v1/jobs/{job}/events?after={whole[-1]['id']}")
    assert (end.status_code, end.data) == (204, b"")
    end.close()
    bad = api.client.get(f"/v1/jobs/{job}/events?after=9-0")
    assert (bad.status_code, bad.json["error"]["code"]) == (400, "bad_cursor")
    assert api.services.long_lived.taken == 0


def test_b12_a_silent_stream_pings_after_fifteen_seconds_and_not_before(api: Twins, clock: FakeClock):
    job = api.submit().json["id"]
    answer = api.client.get(f"/v1/jobs/{job}/events", buffered=False)
    chunks = (chunk for chunk in answer.response if chunk)
    assert b"queued" in next(chunks)
    clock.advance(PING_S)
    assert next(chunks) == b": ping\n\n"
    api.services.stop.set()
    clock.advance(PING_S - 1)
    assert list(chunks) == []
    answer.close()


def test_a_stream_counts_as_a_viewer_until_it_is_closed(api: Twins):
    job = api.submit().json["id"]
    answer = api.client.get(f"/v1/jobs/{job}/events", buffered=False)
    assert 'promptmill_stream_viewers{transport="sse"} 1.0' in api.client.get("/metrics").text
    answer.close()
    assert 'promptmill_stream_viewers{transport="sse"} 0.0' in api.client.get("/metrics").text
    assert api.services.long_lived.taken == 0


def test_the_websocket_address_over_plain_http_is_a_400(api: Twins):
    answer = api.client.get(f"/v1/jobs/{finished(api)}/ws")
    assert answer.status_code == 400
    assert "WebSocket" in answer.json["error"]["message"]


# -- Host and Origin --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 202),
        ("https://localhost", 202),
        ("https://console.example", 202),
        ("http://localhost:9999", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_a_post_from_another_page_is_refused(tmp_path: Path, origin: str, status: int):
    api = make_twins(tmp_path, allowed_origins=("https://console.example/",))
    answer = api.submit(headers={"Origin": origin})
    assert answer.status_code == status
    assert status == 202 or answer.json["error"]["code"] == "origin_not_allowed"


def test_deletes_and_websockets_check_the_origin_and_reads_do_not(api: Twins):
    job, evil = finished(api), {"Origin": "https://evil.example"}
    assert api.client.delete(f"/v1/jobs/{job}", headers=evil).status_code == 403
    assert api.client.get(f"/v1/jobs/{job}/ws", headers={**evil, "Upgrade": "websocket", "Connection": "Upgrade"}).status_code == 403
    assert api.client.get(f"/v1/jobs/{job}", headers=evil).status_code == 200


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:1", True),
        ("[::1]:8000", True),
        ("10.0.0.7:8000", True),
        ("api.example", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("[", False),
        ("", False),
    ],
)
def test_only_names_of_this_server_are_hosts(host: str, allowed: bool):
    settings = Settings(_env_file=None, host="10.0.0.7", allowed_hosts=("api.example:443",))
    assert host_allowed(host, settings) is allowed


def test_a_server_bound_to_every_address_knows_no_names():
    assert host_allowed("anything.example", Settings(_env_file=None, host="0.0.0.0"))
    assert not host_allowed("anything.example", Settings(_env_file=None, host="0.0.0.0", allowed_hosts=("api.example",)))


def test_a_foreign_host_is_403_in_the_common_shape(api: Twins):
    answer = api.client.get("/v1/models", headers={"Host": "evil.example"})
    assert answer.status_code == 403
    assert answer.json["error"]["code"] == "host_not_allowed"


def test_the_own_origin_is_host_and_port():
    settings = Settings(_env_file=None)
    assert origin_allowed("http://127.0.0.1:8000", "127.0.0.1:8000", settings)
    assert not origin_allowed("http://127.0.0.1:8001", "127.0.0.1:8000", settings)
    assert not origin_allowed("http://127.0.0.1:8000", None, settings)


# -- request ids and the common shape ---------------------------------------------------------------


def test_a_sane_request_id_is_echoed_and_another_replaced(api: Twins):
    assert api.client.get("/health/live", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for odd in ("x" * 129, "a b", "ü"):
        made = api.client.get("/health/live", headers={"x-request-id": odd.encode().decode("latin-1")}).headers["x-request-id"]
        assert made.startswith("req_")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_route"),
        ("GET", "/v1/nothing", 404, "unknown_route"),
        ("PUT", "/v1/jobs", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", 404, "route_not_available"),
        ("POST", "/v1/completions", 404, "route_not_available"),
        ("POST", "/v1/batches", 404, "route_not_available"),
        ("GET", "/v1/batches/batch_1", 404, "route_not_available"),
        ("GET", "/v1/files/file_1/content", 404, "route_not_available"),
        ("POST", "/v1/embeddings", 404, "route_not_available"),
        ("GET", "/v1/ws", 404, "route_not_available"),
        ("POST", "/tokenize", 404, "route_not_available"),
        ("GET", "/static/../app.py", 404, "unknown_route"),
        ("GET", "/docs/index.html", 404, "unknown_route"),
    ],
)
def test_what_is_not_there_is_refused_in_the_common_shape(api: Twins, method: str, path: str, status: int, code: str):
    answer = api.client.open(path, method=method)
    assert answer.status_code == status
    assert answer.content_type == "application/json"
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert answer.json["error"]["code"] == code
    assert answer.headers["x-request-id"]
    assert status != 405 or "GET" in answer.headers["Allow"]
