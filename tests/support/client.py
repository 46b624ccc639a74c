"""A viewer and submitter over HTTP that knows nothing of the server's insides.

It checks what a strict client would check: events by ``pos``, one terminal event, ids in order.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from simple_websocket import ConnectionClosed

from promptmill.core.clock import SYSTEM_CLOCK
from tests.support.websocket import WebSocket

Json = dict[str, Any]
TERMINAL = ("done", "error")
FINAL_STATES = ("succeeded", "failed", "cancelled", "expired")


class Client:
    """HTTP, SSE and WebSocket against one server."""

    def __init__(self, url: str, timeout: float = 60):
        self.url = url.rstrip("/")
        self.http = httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None))

    def close(self) -> None:
        self.http.close()

    def submit(self, prompt: str, **fields: Any) -> Json:
        answer = self.http.post("/v1/jobs", json={"prompt": prompt, **fields})
        assert answer.status_code == 202, answer.text
        return answer.json()

    def get(self, job: str, wait: float = 0) -> Json:
        answer = self.http.get(f"/v1/jobs/{job}", params={"wait": wait} if wait else {})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait(self, job: str, timeout: float = 60) -> Json:
        """The job in its final state."""
        deadline = SYSTEM_CLOCK.monotonic() + timeout
        while (left := deadline - SYSTEM_CLOCK.monotonic()) > 0:
            body = self.get(job, wait=min(30, left))
            if body["status"] in FINAL_STATES:
                return body
        raise TimeoutError(f"{job} is {body['status']} after {timeout} s")

    def run(self, prompt: str, timeout: float = 60, **fields: Any) -> Json:
        """Submit and wait; the job must succeed."""
        body = self.wait(self.submit(prompt, **fields)["id"], timeout)
        assert body["status"] == "succeeded", body["error"]
        return body

    def jobs(self, **query: Any) -> list[Json]:
        """Every job of the list, page by page."""
        found: list[Json] = []
        query = {"limit": 100, **query}
        while True:
            page = self.http.get("/v1/jobs", params=query).json()
            found += page["data"]
            if not page["has_more"]:
                return found
            query["after"] = page["last_id"]

    def events(self, job: str, after: str | None = None, timeout: float = 60) -> Iterator[Json]:
        """The job's events over SSE. Closing the generator drops the connection."""
        headers = {"Last-Event-ID": after} if after else {}
        with self.http.stream("GET", f"/v1/jobs/{job}/events", headers=headers, timeout=timeout) as answer:
            if answer.status_code == 204:
                return
            assert answer.status_code == 200, answer.read().decode()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield from parse_sse(answer.iter_lines())

    def ws_events(self, job: str, after: str | None = None, timeout: float = 60) -> Iterator[Json]:
        """The same over a WebSocket."""
        query = f"?after={after}" if after else ""
        socket = WebSocket.connect(f"{self.url.replace('http', 'ws', 1)}/v1/jobs/{job}/ws{query}")
        try:
            while (message := socket.receive(timeout=timeout)) is not None:
                yield json.loads(message)
            raise TimeoutError(f"no event of {job} for {timeout} s")
        except ConnectionClosed as closed:
            if closed.reason not in (None, 1000):
                raise
        finally:
            if socket.connected:
                socket.close()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples called ``name`` whose labels include ``labels``."""
        text = self.http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def parse_sse(lines: Iterable[str]) -> Iterator[Json]:
    """Events by the rules of the HTML standard, section 9.2.6; the id line must repeat the id of the JSON."""
    data: list[str] = []
    event_id = None
    for line in lines:
        if line == "":
            if data:
                event = json.loads("\n".join(data))
                assert event_id is None or event_id == event["id"]
                yield event
            data, event_id = [], None
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                data.append(value)
            elif name == "id":
                event_id = value


@dataclass
class Viewer:
    """What a viewer has on its screen; complains about every gap, repeat or event out of order."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    last: str | None = None
    resets: int = 0
    ended: Json | None = None

    def see(self, event: Json) -> None:
        assert self.ended is None, f"an event after the terminal one: {event}"
        order = cursor(event["id"])
        assert self.last is None or order > cursor(self.last), f"{event['id']} after {self.last}"
        self.last = event["id"]
        kind = event["type"]
        if kind == "reset":
            self.text, self.resets = "", self.resets + 1
            self.token_ids.clear()
        elif kind == "token":
            assert event["pos"] == len(self.token_ids), f"pos {event['pos']} with {len(self.token_ids)} tokens shown"
            self.token_ids += event["token_ids"]
            self.text += event["text"]
        elif kind in TERMINAL:
            self.ended = event

    def watch(self, events: Iterable[Json]) -> "Viewer":
        for event in events:
            self.see(event)
        return self


def cursor(event_id: str) -> tuple[int, int]:
    attempt, seq = event_id.split("-")
    return int(attempt), int(seq)


def text_of(job: Json) -> str:
    """The stored text of a prompt job's only choice."""
    (choice,) = job["result"]["choices"]
    return choice["text"]
