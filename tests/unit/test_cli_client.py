"""The client: each token once over dropped connections, and one clear line for every refusal."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from promptmill.cli.client import TRIES, Client, Refused, server_url
from promptmill.cli.main import exit_code
from promptmill.core.errors import Unavailable
from promptmill.core.settings import Settings
from promptmill.supervisor.preflight import DataLock, Running
from promptmill.supervisor.services import free_port

JOB = "job_1"
Answer = Callable[[BaseHTTPRequestHandler], None]


class Script:
    """A server that plays one answer per request, then repeats the last. ``seen``: (path, Last-Event-ID)."""

    def __init__(self, *answers: Answer):
        script = self
        self.seen: list[tuple[str, str | None]] = []
        self._answers = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                script.seen.append((self.path, self.headers.get("Last-Event-ID")))
                answer = script._answers.pop(0) if len(script._answers) > 1 else script._answers[0]
                answer(self)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Script]]:
    scripts: list[Script] = []

    def start(*answers: Answer) -> Script:
        scripts.append(Script(*answers))
        return scripts[-1]

    yield start
    for script in scripts:
        script.close()


def answer(status: int, body: object, kind: str = "application/json") -> Answer:
    def send(handler: BaseHTTPRequestHandler) -> None:
        raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return send


def stream(*events: dict[str, Any]) -> Answer:
    """The events, then the connection ends."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for event in events:
            handler.wfile.write(f"id: {event['id']}\ndata: {json.dumps(event)}\n\n".encode())
        handler.close_connection = True

    return send


def token(attempt: int, pos: int, text: str) -> dict[str, Any]:
    return {"id": f"{attempt}-{256 * (pos + 1)}", "job": JOB, "type": "token", "index": 0, "pos": pos, "text": text, "token_ids": [pos]}


STARTED = {"id": "1-0", "job": JOB, "type": "started"}
RESET = {"id": "2-0", "job": JOB, "type": "reset"}
DONE = {"id": "2-9", "job": JOB, "type": "done", "status": "succeeded"}


def client(script: Script) -> Client:
    return Client(script.url, pause=lambda _seconds: None)


def error(status: int, code: str) -> Answer:
    return answer(status, {"error": {"message": "no such thing", "type": "x", "param": None, "code": code}})


def test_a_dropped_stream_goes_on_after_its_last_event(serve: Callable[..., Script]):
    script = serve(stream(STARTED, token(1, 0, "a"), token(1, 1, "b")), stream(token(1, 1, "b"), token(1, 2, "c"), DONE))
    events = list(client(script).events(JOB))
    assert "".join(event.get("text", "") for event in events) == "abc", "a token was shown twice or lost"
    assert events[-1] == DONE
    assert [last for _, last in script.seen] == [None, "1-512"]


def test_after_a_reset_the_tokens_count_from_zero_again(serve: Callable[..., Script]):
    script = serve(stream(token(1, 0, "a"), token(1, 1, "b"), RESET, token(2, 0, "A"), token(2, 1, "B"), DONE))
    assert [event.get("text") for event in client(script).events(JOB)] == ["a", "b", None, "A", "B", None]


def test_a_server_that_is_away_for_a_moment_is_waited_for(serve: Callable[..., Script]):
    script = serve(stream(token(1, 0, "a")), error(503, "overloaded"), stream(DONE))
    assert list(client(script).events(JOB))[-1] == DONE


def test_a_stream_that_never_comes_back_is_given_up_with_the_way_to_go_on(serve: Callable[..., Script]):
    script = serve(stream())
    with pytest.raises(Unavailable, match=f"promptmill tail {JOB}"):
        list(client(script).events(JOB))
    assert len(script.seen) == TRIES


def test_a_cursor_at_the_end_gives_no_event(serve: Callable[..., Script]):
    script = serve(answer(204, ""))
    assert list(client(script).events(JOB, after="2-9")) == []
    assert script.seen == [(f"/v1/jobs/{JOB}/events", "2-9")]


@pytest.mark.parametrize(
    ("status", "code", "kind", "exits"),
    [(404, "not_found", Refused, 1), (400, "bad_cursor", Refused, 1), (429, "slow_down", Unavailable, 3)],
)
def test_a_refusal_is_one_line_with_its_code(serve: Callable[..., Script], status: int, code: str, kind: type[Exception], exits: int):
    with pytest.raises(kind) as caught:
        client(serve(error(status, code))).get("/v1/jobs")
    assert caught.value.message == f"{status} {code}: no such thing"
    assert exit_code(caught.value) == exits


def test_a_refused_stream_is_not_tried_again(serve: Callable[..., Script]):
    script = serve(error(404, "not_found"))
    with pytest.raises(Refused):
        list(client(script).events("job_unknown"))
    assert len(script.seen) == 1


def test_no_server_is_one_line_and_exit_code_3():
    with pytest.raises(Unavailable, match="promptmill up") as caught:
        Client(f"http://127.0.0.1:{free_port()}").get("/v1/jobs")
    assert exit_code(caught.value) == 3


def test_another_kind_of_server_is_said_to_be_one(serve: Callable[..., Script]):
    with pytest.raises(Unavailable, match="not a promptmill server"):
        client(serve(answer(200, "<html>", "text/html"))).get("/v1/jobs")


def test_the_url_comes_from_flag_environment_running_up_or_settings(tmp_path, monkeypatch: pytest.MonkeyPatch):
    settings = Settings(data_dir=tmp_path, host="0.0.0.0", port=8123)
    assert server_url(None, settings) == "http://127.0.0.1:8123"
    lock = DataLock(tmp_path)
    lock.say(Running(1, "http://127.0.0.1:9", "redis://x", None))
    assert server_url(None, settings) == "http://127.0.0.1:9"
    lock.release()
    monkeypatch.setenv("PROMPTMILL_URL", "http://there")
    assert server_url(None, settings) == "http://there"
    assert server_url("http://flag", settings) == "http://flag"
