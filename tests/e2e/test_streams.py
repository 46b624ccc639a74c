"""Must show 3: every way to read a job gives the same text, each token once and in order."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from simple_websocket import ConnectionClosed

from tests.support.client import Client, Viewer, text_of
from tests.support.system import System
from tests.support.websocket import WebSocket

pytestmark = pytest.mark.e2e

PROMPTS = ("A tale of two cities.", "Zürich, 東京, Αθήνα", "🙂🙃 mixed with plain words", "def f(x):\n    return x", "one two three")
TOKENS = 60


@pytest.fixture
def client(slow: System) -> Client:
    return slow.client


def submit(client: Client, prompt: str, tokens: int = TOKENS) -> str:
    return client.submit(prompt, max_tokens=tokens, temperature=0, cache="off", priority="interactive")["id"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_sse_websocket_and_the_stored_text_are_equal(client: Client, prompt: str):
    job = submit(client, prompt)
    with ThreadPoolExecutor(2) as pool:
        sse = pool.submit(Viewer().watch, client.events(job))
        ws = pool.submit(Viewer().watch, client.ws_events(job))
        by_sse, by_ws = sse.result(), ws.result()
    stored = client.wait(job)
    assert by_sse.text == by_ws.text == text_of(stored)
    assert by_sse.token_ids == by_ws.token_ids
    assert len(by_sse.token_ids) == stored["result"]["usage"]["completion_tokens"] == TOKENS
    assert by_sse.ended == by_ws.ended
    assert by_sse.ended["type"] == "done"
    assert by_sse.ended["status"] == "succeeded"


def test_the_stored_result_can_be_read_when_the_terminal_event_arrives(client: Client):
    job = submit(client, "whoever sees done can read the result", 5)
    viewer = Viewer().watch(client.events(job))
    assert text_of(client.get(job)) == viewer.text


@pytest.mark.parametrize("transport", ["events", "ws_events"])
def test_a_late_viewer_gets_the_whole_story(client: Client, transport: str):
    job = submit(client, "late")
    early = client.events(job)
    seen = next(event for event in early if event["type"] == "token" and event["pos"] >= 20)
    early.close()
    viewer = Viewer().watch(getattr(client, transport)(job))
    assert seen["pos"] > 0
    assert viewer.text == text_of(client.wait(job))
    assert len(viewer.token_ids) == TOKENS


@pytest.mark.parametrize("transport", ["events", "ws_events"])
def test_a_viewer_that_drops_and_returns_sees_each_token_once(client: Client, transport: str):
    job = submit(client, "a bad line")
    listen = getattr(client, transport)
    viewer = Viewer()
    reads = 0
    while viewer.ended is None:
        connection = listen(job, viewer.last)
        for event in islice(connection, 5):
            viewer.see(event)
        connection.close()
        reads += 1
    assert reads > 3
    assert viewer.resets == 0
    assert viewer.text == text_of(client.wait(job))
    assert len(viewer.token_ids) == TOKENS


def test_two_viewers_of_one_job_do_not_disturb_each_other(client: Client):
    job = submit(client, "two of us")
    impatient = client.events(job)
    next(impatient)
    impatient.close()
    with ThreadPoolExecutor(2) as pool:
        viewers = [pool.submit(Viewer().watch, client.events(job)) for _ in range(2)]
        first, second = (viewer.result() for viewer in viewers)
    assert first == second


def test_a_viewer_after_the_end_gets_the_log_again(client: Client):
    job = submit(client, "over", 8)
    live = Viewer().watch(client.events(job))
    assert Viewer().watch(client.events(job)) == live
    assert Viewer().watch(client.ws_events(job)) == live


def test_a_cursor_at_the_terminal_event_has_nothing_more_to_say(client: Client):
    job = submit(client, "over", 4)
    end = Viewer().watch(client.events(job)).last
    answer = client.http.get(f"/v1/jobs/{job}/events", params={"after": end})
    assert answer.status_code == 204
    assert list(client.ws_events(job, end)) == []


@pytest.mark.parametrize("bad", ["nonsense", "1", "1-", "-1-0", "1-2-3", "1-99999999", "9-0", "٣-٤"])
def test_a_malformed_cursor_or_one_beyond_the_end_is_refused(client: Client, bad: str):
    job = submit(client, "short", 3)
    client.wait(job)
    answer = client.http.get(f"/v1/jobs/{job}/events", params={"after": bad})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad_cursor"


def test_a_bad_cursor_closes_a_websocket_with_4400(client: Client):
    job = submit(client, "short", 3)
    client.wait(job)
    socket = WebSocket.connect(f"{client.url.replace('http', 'ws', 1)}/v1/jobs/{job}/ws?after=nonsense")
    with pytest.raises(ConnectionClosed) as closed:
        socket.receive(timeout=20)
    assert closed.value.reason == 4400


def test_the_stream_says_that_no_proxy_may_hold_it_back(client: Client):
    job = submit(client, "headers", 2)
    with client.http.stream("GET", f"/v1/jobs/{job}/events") as answer:
        assert answer.headers["cache-control"].startswith("no-cache")
        assert answer.headers["x-accel-buffering"] == "no"
        body = b"".join(answer.iter_raw())
    assert body.isascii()
    assert body.endswith(b"\n\n")


def test_a_cancelled_job_ends_its_streams(client: Client):
    job = submit(client, "stop me", 1000)
    events = client.events(job)
    viewer = Viewer()
    for event in events:
        viewer.see(event)
        if event["type"] == "token":
            break
    answer = client.http.post(f"/v1/jobs/{job}/cancel")
    assert answer.status_code == 202, "it stops at its next step"
    viewer.watch(events)
    assert viewer.ended["type"] == "done"
    assert viewer.ended["status"] == "cancelled"
    assert 0 < len(viewer.token_ids) < 1000
    assert client.wait(job)["status"] == "cancelled"
    again = client.http.post(f"/v1/jobs/{job}/cancel")
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "already_finished"
