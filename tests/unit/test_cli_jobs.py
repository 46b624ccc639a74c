"""`submit`, `tail`, `jobs`, `cancel` against a scripted server: what is sent, what is printed, how they exit."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from promptmill.cli.main import app

JOB: dict[str, Any] = {
    "id": "job_1",
    "status": "succeeded",
    "priority": "standard",
    "model": "m",
    "attempt": 1,
    "cache": "miss",
    "result": {"choices": [{"message": {"content": "Paris."}}], "usage": {"completion_tokens": 3}},
    "error": None,
    "timings": {"total_ms": 12.4},
}
EVENTS = [
    {"id": "1-0", "job": "job_1", "type": "started"},
    {"id": "1-256", "job": "job_1", "type": "token", "pos": 0, "text": "Par", "token_ids": [1]},
    {"id": "2-0", "job": "job_1", "type": "reset"},
    {"id": "2-256", "job": "job_1", "type": "token", "pos": 0, "text": "Paris.", "token_ids": [1]},
]
DONE = {"id": "2-511", "job": "job_1", "type": "done", "status": "succeeded"}


class Server:
    """``job``: what a submit, get or cancel answers. ``end``: the terminal event. ``bodies``: what was posted."""

    def __init__(self) -> None:
        server = self
        self.job = JOB
        self.end: dict[str, Any] = DONE
        self.bodies: list[Any] = []
        self.paths: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.paths.append(self.path)
                if self.path.endswith("/events"):
                    raw = "".join(f"id: {event['id']}\ndata: {json.dumps(event)}\n\n" for event in [*EVENTS, server.end])
                    self._send(raw.encode(), "text/event-stream")
                elif self.path.startswith("/v1/jobs?"):
                    self._send(json.dumps({"object": "list", "data": [server.job], "has_more": False}).encode())
                else:
                    self._send(json.dumps(server.job).encode())

            def do_POST(self) -> None:
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.do_GET()

            def _send(self, raw: bytes, kind: str = "application/json") -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def run(server: Server) -> Callable[..., Result]:
    return lambda *words, **options: CliRunner().invoke(app, [*words, "--url", server.url], **options)


def test_submit_prints_the_id_and_leaves_the_priority_to_the_server(server: Server, run: Callable[..., Result]):
    done = run("submit", "Hi")
    assert done.stdout == "job_1\n"
    assert server.bodies == [{"messages": [{"role": "user", "content": "Hi"}]}]


def test_submit_sends_every_field_that_was_given_and_no_other(server: Server, run: Callable[..., Result]):
    run(
        "submit",
        "Hi",
        "--system",
        "Be brief",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "--seed",
        "7",
        "--model",
        "m",
        "--priority",
        "bulk",
    )
    assert server.bodies == [
        {
            "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
            "max_tokens": 5,
            "temperature": 0.0,
            "seed": 7,
            "model": "m",
            "priority": "bulk",
        }
    ]


def test_submit_sends_choices_logprobs_and_what_the_answer_must_match(run: Callable[..., Result], server: Server, tmp_path: Path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    run("submit", "Hi", "--n", "2", "--logprobs", "3", "--json-schema", str(schema))
    run("submit", "Hi", "--raw", "--logprobs", "0", "--regex", "a+")
    run("submit", "Hi", "--choice", "yes", "--choice", "no")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert server.bodies == [
        {**chat, "n": 2, "logprobs": True, "top_logprobs": 3, "guided_json": '{"type": "object"}'},
        {"prompt": "Hi", "logprobs": 0, "guided_regex": "a+"},
        {**chat, "guided_choice": ["yes", "no"]},
    ]


def test_submit_refuses_a_missing_schema_and_a_mixed_stream(run: Callable[..., Result], server: Server, tmp_path: Path):
    assert run("submit", "Hi", "--json-schema", str(tmp_path / "no.json")).exit_code == 2
    assert run("submit", "Hi", "--n", "2", "--stream").exit_code == 2
    assert server.bodies == []


def test_submit_wait_prints_every_answer(run: Callable[..., Result], server: Server):
    choices = [{"index": index, "message": {"content": text}} for index, text in enumerate(("Paris.", "Rome."))]
    server.job = {**JOB, "result": {"choices": choices, "usage": {"completion_tokens": 6}}}
    assert run("submit", "Hi", "--wait", "--n", "2").stdout == "Paris.\nRome.\n"


def test_submit_raw_reads_standard_input(server: Server, run: Callable[..., Result]):
    run("submit", "-", "--raw", input="Once upon\na time")
    assert server.bodies == [{"prompt": "Once upon\na time"}]


def test_submit_wait_prints_the_answer_of_an_interactive_job(server: Server, run: Callable[..., Result]):
    done = run("submit", "Hi", "--wait")
    assert done.stdout == "Paris.\n"
    assert server.bodies[0]["priority"] == "interactive"


def test_submit_stream_prints_the_text_alone_and_the_reset_beside_it(server: Server, run: Callable[..., Result]):
    done = run("submit", "Hi", "--stream")
    assert done.stdout == "ParParis.\n"
    assert "starts again" in done.stderr
    assert server.bodies[0]["priority"] == "interactive"


def test_tail_as_json_prints_every_event(run: Callable[..., Result]):
    assert [json.loads(line) for line in run("tail", "job_1", "--json").stdout.splitlines()] == [*EVENTS, DONE]


def test_a_failed_job_is_told_and_fails_the_command(server: Server, run: Callable[..., Result]):
    server.end = {**DONE, "type": "error", "status": "failed", "error": {"code": "worker_lost", "message": "three workers died"}}
    done = run("tail", "job_1")
    assert done.exit_code == 1
    assert str(done.exception) == "job_1 failed: worker_lost: three workers died"


def test_jobs_are_listed_as_lines_or_as_json(server: Server, run: Callable[..., Result]):
    done = run("jobs", "--status", "succeeded", "--limit", "5")
    assert done.stdout == "job_1\tsucceeded\tstandard\tm\t1\tmiss\t3\t12\n"
    assert server.paths == ["/v1/jobs?status=succeeded&limit=5"]
    assert json.loads(run("jobs", "--json").stdout)["data"] == [JOB]


def test_cancel_of_a_running_job_says_that_it_is_not_over_yet(server: Server, run: Callable[..., Result]):
    server.job = {**JOB, "status": "running"}
    assert run("cancel", "job_1").stdout == "job_1 running (stops at its next step)\n"
    assert server.paths == ["/v1/jobs/job_1/cancel"]
