"""The api under a real gunicorn, on Valkey and SQLite; the test plays the worker."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from simple_websocket import ConnectionClosed, ConnectionError

from promptmill.core import events
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.jobs import Choice, Finish, Outcome, Status, Usage
from storage.db import Database
from storage.jobs import SqlJobStore
from storage.stream import RedisTokenStream
from tests.support.api import TINY, make_model_folder
from tests.support.client import Client, Viewer
from tests.support.processes import alive, descendants
from tests.support.servers import die_with_parent, eventually, free_port
from tests.support.websocket import WebSocket

ROOT = Path(__file__).parents[2]
LIMIT = 1_000_000
IDS = tuple(range(10))
TEXT = "abcdefghij"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    client: Client
    store: SqlJobStore
    stream: RedisTokenStream
    metrics: Path

    def submit(self, **fields: Any) -> str:
        job: str = self.client.submit("hi", **{"priority": "interactive", "cache": "off", **fields})["id"]
        return job

    def claim(self, job: str) -> None:
        (claim,) = self.store.claim_many([job], "w", "n")
        assert claim is not None
        self.stream.append([events.started(job, claim.attempt, TINY)])

    def say(self, job: str, begin: int, end: int) -> None:
        self.stream.append([events.tokens(job, 1, index=0, pos=begin, text=TEXT[begin:end], token_ids=IDS[begin:end])])

    def finish(self, job: str, text: str = TEXT, ids: tuple[int, ...] = IDS) -> None:
        outcome = Outcome((Choice(0, text, ids, "length"),), Usage(2, len(ids)))
        assert self.store.finish_many([Finish(job, 1, "w", Status.SUCCEEDED, outcome)]) == [True]
        row = self.store.get(job)
        assert row is not None
        self.stream.append([events.terminal(job, 1, row.status, outcome=outcome, error=None, timings=row.timings, cache=row.cache)])

    def viewers(self, transport: str) -> float:
        return self.client.metric("promptmill_stream_viewers", transport=transport)


def healthy(client: Client) -> bool:
    try:
        return client.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def serving(tmp_path: Path, sqlite_url: str, redis_url: str, **settings: Any) -> Iterator[Server]:
    make_model_folder(tmp_path / "models" / TINY)
    port = free_port()
    given = {"data_dir": tmp_path, "model": TINY, "database_url": sqlite_url, "redis_url": redis_url, "port": port, **settings}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PROMPTMILL_", "PROMETHEUS_"))}
    environment |= {f"PROMPTMILL_{name.upper()}": str(value) for name, value in given.items()}
    options = [
        "--worker-class=api.server.Worker",
        f"--workers={settings.get('api_workers', 1)}",
        f"--threads={settings.get('api_threads', 100)}",
    ]
    command = [sys.executable, "-m", "gunicorn", "api.wsgi:app", *options, f"--bind=127.0.0.1:{port}", "--no-control-socket"]
    with (tmp_path / "api.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=log, preexec_fn=die_with_parent)
    client = Client(f"http://127.0.0.1:{port}")
    store, stream = SqlJobStore(Database.connect(sqlite_url)), RedisTokenStream(redis_url)
    try:
        eventually(lambda: healthy(client), 30, "the api's health")
        yield Server(process, client, store, stream, tmp_path / "metrics")
    finally:
        client.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            store.close()
            stream.close()


@pytest.fixture
def server(tmp_path: Path, sqlite_url: str, redis_url: str) -> Iterator[Server]:
    with serving(tmp_path, sqlite_url, redis_url, max_body_bytes=LIMIT, api_threads=100) as running:
        yield running


def test_live_late_and_returning_viewers_see_each_token_once(server: Server):
    job = server.submit()
    with ThreadPoolExecutor(2) as pool:
        sse = pool.submit(Viewer().watch, server.client.events(job))
        ws = pool.submit(Viewer().watch, server.client.ws_events(job))
        eventually(lambda: server.viewers("sse") == server.viewers("ws") == 1)
        server.claim(job)
        for at in range(0, 10, 2):
            server.say(job, at, at + 2)
        server.finish(job)
        by_sse, by_ws = sse.result(20), ws.result(20)
    assert by_sse == by_ws
    assert (by_sse.text, by_sse.token_ids, by_sse.resets) == (TEXT, list(IDS), 0)
    late = Viewer().watch(server.client.events(job))
    assert late.text == TEXT
    for listen in (server.client.events, server.client.ws_events):
        viewer = Viewer()
        while viewer.ended is None:
            connection = listen(job, viewer.last)
            viewer.see(next(connection))
            connection.close()
        assert viewer.text == TEXT
    eventually(lambda: server.viewers("sse") == server.viewers("ws") == 0)


def test_wait_is_woken_by_the_end(server: Server):
    job = server.submit()
    server.claim(job)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.client.get, job, 60)
        server.finish(job)
        assert waiting.result(20)["status"] == "succeeded"
    assert server.client.get(job, wait=60)["result"]["choices"][0]["text"] == TEXT


def test_close_codes_of_a_websocket(server: Server):
    job = server.submit()
    server.claim(job)
    server.finish(job)
    end = Viewer().watch(server.client.events(job)).last
    base = server.client.url.replace("http", "ws", 1)
    for path, code in (
        (f"{job}/ws?after=nonsense", 4400),
        (f"{job}/ws?after=9-0", 4400),
        ("job_00000000000000000000000000/ws", 4404),
        (f"{job}/ws?after={end}", 1000),
    ):
        ws = WebSocket.connect(f"{base}/v1/jobs/{path}")
        with pytest.raises(ConnectionClosed) as closed:
            ws.receive(timeout=20)
        assert closed.value.reason == code, path


def test_a_websocket_of_another_page_is_refused_before_the_handshake(server: Server):
    url = f"{server.client.url.replace('http', 'ws', 1)}/v1/jobs/{server.submit()}/ws"
    with pytest.raises(ConnectionError) as refused:
        WebSocket.connect(url, headers={"Origin": "https://evil.example"})
    assert refused.value.status_code == 403


def test_a_broken_handshake_is_a_400_in_the_common_shape(server: Server):
    headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
    answer = server.client.http.get(f"/v1/jobs/{server.submit()}/ws", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_whole_text_larger_than_a_socket_buffer_arrives_over_a_websocket(server: Server):
    job, text = server.submit(), "x" * 8_000_000
    server.claim(job)
    server.finish(job, text, (1,))
    server.stream._redis.delete(f"pm:tok:{job}")
    viewer = Viewer().watch(server.client.ws_events(job))
    assert viewer.text == text
    assert viewer.ended is not None


def test_a_client_that_hangs_up_frees_its_place(server: Server):
    job = server.submit()
    server.claim(job)
    sse = server.client.events(job)
    next(sse)
    ws = WebSocket.connect(f"{server.client.url.replace('http', 'ws', 1)}/v1/jobs/{job}/ws")
    assert json.loads(ws.receive(timeout=20))["type"] == "started"
    assert (server.viewers("sse"), server.viewers("ws")) == (1, 1)
    sse.close()
    ws.close()
    eventually(lambda: server.viewers("ws") == 0)
    server.say(job, 0, 1)  # a dead SSE client is found by writing
    server.say(job, 1, 2)
    eventually(lambda: server.viewers("sse") == 0, 20)
    row = server.store.get(job)
    assert row is not None
    assert row.status is Status.RUNNING, "a viewer that left cancelled the job"


def test_beyond_the_cap_streams_get_503_and_the_rest_answers(server: Server):
    job = server.submit()
    server.claim(job)
    streams = [server.client.events(job) for _ in range(100 - 64)]
    for stream in streams:
        next(stream)
    answer = server.client.http.get(f"/v1/jobs/{job}/events")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    ws = WebSocket.connect(f"{server.client.url.replace('http', 'ws', 1)}/v1/jobs/{job}/ws")
    with pytest.raises(ConnectionClosed) as closed:
        ws.receive(timeout=20)
    assert closed.value.reason == 1013
    assert server.client.http.get("/health").status_code == 200
    other = server.submit()
    assert server.client.http.post(f"/v1/jobs/{other}/cancel").status_code == 200
    server.finish(job)
    for stream in streams:
        assert list(stream)[-1]["type"] == "done"


def test_sigterm_ends_open_streams_and_the_server(server: Server):
    job = server.submit()
    server.claim(job)
    sse = server.client.events(job)
    next(sse)
    ws = WebSocket.connect(f"{server.client.url.replace('http', 'ws', 1)}/v1/jobs/{job}/ws")
    ws.receive(timeout=20)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.client.get, job, 60)
        eventually(lambda: server.viewers("ws") == 1)
        server.process.send_signal(signal.SIGTERM)
        assert list(sse) == []
        with pytest.raises(ConnectionClosed) as closed:
            ws.receive(timeout=20)
        assert closed.value.reason == 1012
        assert waiting.result(20)["status"] == "running"
    assert server.process.wait(10) == 0


def test_a14_a_body_over_the_limit_reads_413_and_the_next_request_is_fine(server: Server):
    for size in (LIMIT + 1, 50 * LIMIT):
        answer = server.client.http.post("/v1/jobs", content=b"a" * size, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "payload_too_large"

    def chunks(count: int) -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(count):
            yield b"a" * 10
        yield b'"}'

    headers = {"content-type": "application/json"}
    assert server.client.http.post("/v1/jobs", content=chunks(3), headers=headers).status_code == 202
    assert server.client.http.post("/v1/jobs", content=chunks(LIMIT // 10 + 1), headers=headers).status_code == 413
    assert server.submit()


def test_a14_a_client_that_asks_for_leave_to_send_is_told(server: Server):
    port = int(server.client.url.rsplit(":", 1)[1])
    body = b'{"prompt": "hi"}'
    with socket.create_connection(("127.0.0.1", port), 20) as sock:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        sock.sendall((head + "Expect: 100-continue\r\n\r\n").encode())
        assert b"100" in sock.recv(100)
        sock.sendall(body)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status == 202


def test_d10_fifty_posts_with_one_key_make_one_job(server: Server):
    def post(_: int) -> httpx.Response:
        return server.client.http.post("/v1/jobs", json={"prompt": "hi"}, headers={"Idempotency-Key": "one"})

    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(post, range(50)))
    assert {reply.status_code for reply in replies} == {202}
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert sum("idempotent-replayed" not in reply.headers for reply in replies) == 1


def test_several_gunicorn_workers_share_their_metrics(tmp_path: Path, sqlite_url: str, redis_url: str):
    with serving(tmp_path, sqlite_url, redis_url, api_workers=2) as server:
        clients = [Client(server.client.url) for _ in range(12)]
        barrier = threading.Barrier(len(clients))

        def ask(client: Client) -> None:
            barrier.wait(20)
            client.http.get("/v1/models")

        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(ask, clients))
        for client in clients:
            client.close()
        assert server.client.metric("promptmill_requests_total", route="/v1/models", code="200") == len(clients)
        names = {path.name for path in server.metrics.glob("*.lock")}
        assert names == {"api.lock", "api-2.lock"}


def test_redis_away_still_takes_jobs_in(tmp_path: Path, sqlite_url: str):
    with serving(tmp_path, sqlite_url, f"redis://127.0.0.1:{free_port()}/0") as server:
        assert server.client.http.get("/health").json()["redis"] == "unreachable"
        begun = SYSTEM_CLOCK.monotonic()
        job = server.client.submit("hi", seed=1, priority="interactive")["id"]
        assert SYSTEM_CLOCK.monotonic() - begun < 30
        (claim,) = server.store.claim_many([job], "w", "n")
        assert claim is not None
        outcome = Outcome((Choice(0, TEXT, IDS, "length"),), Usage(2, 10))
        server.store.finish_many([Finish(job, 1, "w", Status.SUCCEEDED, outcome)])
        assert Viewer().watch(server.client.events(job)).text == TEXT


def raw(server: Server, sent: bytes) -> socket.socket:
    """A connection that has sent ``sent`` and nothing more."""
    url = httpx.URL(server.client.url)
    connection = socket.create_connection((url.host, url.port), timeout=20)
    connection.sendall(sent)
    return connection


def post(server: Server, headers: str, body: bytes) -> bytes:
    host = httpx.URL(server.client.url).netloc.decode()
    lines = f"POST /v1/jobs HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{headers}\r\n\r\n"
    with raw(server, lines.encode() + body) as connection:
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_clients_that_do_not_hang_up_keep_nobody_waiting(server: Server):
    """gthread would wait 2 s for each of them on the loop that serves all: 40 s in all, beyond the patience below."""
    host = httpx.URL(server.client.url).netloc
    held = [raw(server, b"GET /health/live HTTP/1.0\r\nHost: " + host + b"\r\n\r\n") for _ in range(20)]
    try:
        assert httpx.get(f"{server.client.url}/health/live", timeout=15, trust_env=False).status_code == 200
        for connection in held:
            assert b" 200 OK" in connection.recv(65536)
    finally:
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("Transfer-Encoding: chunked", b'{"prompt":"my diary"}\r\n'),
        ("Transfer-Encoding: chunked", b"zz\r\n"),
        ("Transfer-Encoding: chunked", b'20\r\n{"prompt":"my diary'),
        ("Content-Length: 90", b'{"prompt":"my diary","max_tokens":1}'),
    ],
    ids=["a chunk that is none", "no size", "a chunk cut off", "a body cut off"],
)
def test_a_broken_transfer_is_400_and_stays_out_of_the_log(server: Server, headers: str, body: bytes):
    answer = post(server, headers, body)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"code": "invalid_json"' in answer or b'"code":"invalid_json"' in answer
    assert b"diary" not in (server.metrics.parent / "api.log").read_bytes()
    assert server.client.jobs() == []


def test_a_worker_whose_master_was_killed_ends_with_its_viewers(server: Server):
    job = server.submit()
    shown = server.client.events(job)
    assert next(shown)["type"] == "queued"
    workers = [process.pid for process in descendants(server.process.pid)]
    assert workers
    server.process.kill()
    eventually(lambda: not any(alive(pid) for pid in workers), 20, "the end of the workers")
    shown.close()


def test_a_grammar_is_compiled_before_there_is_a_job(server: Server):
    good = {"prompt": "hi", "guided_regex": "[a-z]+", "max_tokens": 5}
    assert server.client.http.post("/v1/jobs", json=good).status_code == 202
    schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}}
    for field, bad in (("guided_regex", "("), ("response_format", {"type": "json_schema", "json_schema": schema})):
        answer = server.client.http.post("/v1/jobs", json={"prompt": "hi", field: bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
