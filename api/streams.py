"""A job's events over SSE and over a WebSocket: the same JSON, the same viewer."""

import json
from collections.abc import Iterator

from flask import Blueprint, Flask, Response, request
from flask_sock import Sock
from simple_websocket import ConnectionClosed, Server
from wsproto.utilities import RemoteProtocolError

from api import errors, websocket
from api.jobs import checked_id
from api.services import Services, services
from api.viewer import Viewer
from promptmill.core.errors import BadCursor, BadRequest, NotFound, Unavailable
from promptmill.core.events import StreamEvent
from promptmill.core.logs import get_logger

log = get_logger(__name__)
blueprint = Blueprint("streams", __name__)

PING_S = 15.0  # of silence, then a comment: keeps proxies from hanging up, and finds dead clients
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
NORMAL, GOING_AWAY, POLICY, RESTART, TRY_LATER = 1000, 1001, 1008, 1012, 1013
BAD_CURSOR, UNKNOWN_JOB = 4400, 4404


def install(app: Flask) -> None:
    app.config["SOCK_SERVER_OPTIONS"] = websocket.OPTIONS
    app.before_request(websocket.wrap_socket)
    app.register_blueprint(blueprint)
    sock = Sock(app)
    sock.route("/v1/jobs/<job_id>/ws", endpoint="websocket")(over_websocket)
    app.register_error_handler(RemoteProtocolError, _no_handshake)


def _no_handshake(_: RemoteProtocolError) -> Response:
    return errors.answer(BadRequest("the WebSocket handshake is not complete"))


def frame(event: StreamEvent) -> bytes:
    """One SSE event. ASCII, so that no line reader splits it inside a text."""
    return f"id: {event.cursor}\ndata: {message(event)}\n\n".encode("ascii")


def message(event: StreamEvent) -> str:
    return json.dumps(event.to_json(), ensure_ascii=True, separators=(",", ":"))


@blueprint.get("/v1/jobs/<job_id>/events")
def over_sse(job_id: str) -> Response:
    own = services()
    after = request.args.get("after") or request.headers.get("Last-Event-ID") or ""
    place = own.long_lived.enter()
    try:
        viewer = _open(own, checked_id(job_id), after)
    except BaseException:
        place.leave()
        raise
    own.viewers.joined("sse")
    body: Iterator[bytes] = iter(()) if viewer.at_end else _frames(own, viewer, job_id)
    response = Response(body, status=204 if viewer.at_end else 200, headers=HEADERS)
    response.content_type = "text/event-stream; charset=utf-8"

    def leave() -> None:
        """Also when the body was never iterated: HEAD, or a client that left at once."""
        viewer.close()
        place.leave()
        own.viewers.left("sse")

    response.call_on_close(leave)
    return response


def _frames(own: Services, viewer: Viewer, job_id: str) -> Iterator[bytes]:
    wrote = own.clock.monotonic()
    yield b""  # sends the headers
    for event in viewer.events():
        now = own.clock.monotonic()
        if event is None and now - wrote < PING_S:
            continue
        wrote = now
        yield b": ping\n\n" if event is None else frame(event)
    if viewer.ended:
        log.info("delivered", job=job_id, transport="sse")


def over_websocket(ws: Server, job_id: str) -> None:
    """Close codes: 1000 after the terminal event, 4400 bad cursor, 4404 unknown job, 1012 the server
    stops, 1013 no room or a store is away."""
    own = services()
    try:
        with own.long_lived.enter():
            viewer = _open(own, checked_id(job_id), request.args.get("after", ""))
            own.viewers.joined("ws")
            try:
                _serve(own, ws, viewer, job_id)
            finally:
                viewer.close()
                own.viewers.left("ws")
    except BadCursor as error:
        websocket.close(ws, BAD_CURSOR, error.code)
    except NotFound as error:
        websocket.close(ws, UNKNOWN_JOB, error.code)
    except Unavailable as error:
        websocket.close(ws, TRY_LATER, error.code)


def _serve(own: Services, ws: Server, viewer: Viewer, job_id: str) -> None:
    if viewer.at_end:
        return websocket.close(ws, NORMAL)
    try:
        for event in viewer.events():
            if event is not None:
                ws.send(message(event))
            if not ws.connected:
                return None
            if websocket.flooded(ws):
                return websocket.close(ws, POLICY, "this socket takes no messages")
    except (ConnectionClosed, OSError):
        return None  # the peer left; the job goes on
    if viewer.ended:
        log.info("delivered", job=job_id, transport="ws")
        return websocket.close(ws, NORMAL)
    return websocket.close(ws, RESTART if own.stop.is_set() else GOING_AWAY)


def _open(own: Services, job_id: str, after: str) -> Viewer:
    return Viewer.open(job_id, after, store=own.store, stream=own.stream, fanout=own.fanout, clock=own.clock, stop=own.stop)
