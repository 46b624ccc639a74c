"""A small HTTP client for the native routes, used by the commands and by the demo of `up`."""

import os
from collections.abc import Callable, Iterator
from http import HTTPStatus
from threading import Event
from types import TracebackType
from typing import Any, Self

import httpx

from promptmill.cli import sse
from promptmill.core.errors import PromptmillError, Unavailable
from promptmill.core.events import EventType
from promptmill.core.settings import Settings
from promptmill.supervisor.preflight import running
from promptmill.supervisor.ready import own_url

Json = dict[str, Any]
SILENCE_S = 60.0  # a stream sends comments more often than that; else the connection is dead
TRIES = 8  # in a row, to get back to a stream: about 30 s


class Refused(PromptmillError):
    """The server's own error, shown with its code."""


class Client:
    """One server. Raises Refused for its errors and Unavailable when it cannot be reached."""

    def __init__(self, url: str, pause: Callable[[float], object] | None = None):
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(90.0, connect=5.0))
        self._pause = pause or Event().wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Json:
        return self._json("GET", path, params={name: value for name, value in params.items() if value is not None})

    def post(self, path: str, body: Json | None = None) -> Json:
        return self._json("POST", path, json=body or {})

    def text(self, path: str) -> str:
        return self._send("GET", path).text

    def events(self, job: str, after: str | None = None) -> Iterator[Json]:
        """A job's events up to its terminal one, each token once, over any number of dropped connections.

        A token event whose ``pos`` was seen already is dropped; ``reset`` starts the positions again.
        """
        shown, failures = 0, 0
        while True:
            try:
                for event in self._connection(job, after):
                    failures = 0
                    after = event["id"]
                    kind = event["type"]
                    if kind == EventType.RESET:
                        shown = 0
                    if kind == EventType.TOKEN:
                        if event["pos"] < shown:
                            continue
                        shown = event["pos"] + len(event["token_ids"])
                    yield event
                    if EventType(kind).terminal:
                        return
            except _StreamEnded:
                return
            except (httpx.TransportError, Unavailable) as error:
                reason = str(error) or type(error).__name__
            else:
                reason = "the stream ended early"
            failures += 1
            if failures >= TRIES:
                raise Unavailable(f"lost the stream of {job} at {self.url} ({reason}); go on with: promptmill tail {job}")
            self._pause(min(0.25 * 2**failures, 8.0))

    def _connection(self, job: str, after: str | None) -> Iterator[Json]:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        timeout = httpx.Timeout(SILENCE_S, connect=5.0)
        with self._http.stream("GET", f"/v1/jobs/{job}/events", headers=headers, timeout=timeout) as response:
            if response.status_code == HTTPStatus.NO_CONTENT:  # the cursor stands at the terminal event
                raise _StreamEnded
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield from sse.parse(response.iter_bytes())

    def _json(self, method: str, path: str, **options: Any) -> Json:
        response = self._send(method, path, **options)
        try:
            data: Json = response.json()
        except ValueError:
            raise Unavailable(f"{self.url} is not a promptmill server: {path} is not JSON") from None
        return data

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unavailable(f"cannot reach promptmill at {self.url} ({error}); is `promptmill up` running?") from None
        if response.is_error:
            raise _refusal(response)
        return response


class _StreamEnded(Exception):
    pass


def _refusal(response: httpx.Response) -> PromptmillError:
    try:
        error = response.json()["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, message = "http_error", response.reason_phrase
    text = f"{response.status_code} {code}: {message}"
    if response.status_code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return Unavailable(text, code=code)
    return Refused(text, code=code)


def server_url(url: str | None, settings: Settings) -> str:
    """``--url``, else $PROMPTMILL_URL, else the `up` of this data directory, else the settings' host and port."""
    if given := url or os.environ.get("PROMPTMILL_URL"):
        return given
    if up := running(settings.data_dir):
        return up.url
    return own_url(settings)
