"""WebSockets under gunicorn's gthread worker: what flask-sock and simple-websocket leave open."""

import contextlib
import socket
import threading
from typing import Any

from flask import request
from simple_websocket import ConnectionClosed, Server

MAX_UNREAD = 100  # messages that a peer may send to a socket that takes none


class DaemonThread(threading.Thread):
    """simple-websocket's reader thread, which must not keep a stopping process alive."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments, daemon=True)


OPTIONS = {"ping_interval": 25, "max_message_size": 65536, "thread_class": DaemonThread}


class WholeSocket:
    """A socket whose ``send`` sends all, one caller at a time. simple-websocket sends messages and
    pings from two threads by plain ``send``, which may write a part: frames would tear and mix."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, data: bytes) -> int:
        with self._lock:
            self._sock.sendall(data)
        return len(data)

    def recv(self, size: int) -> bytes:
        return self._sock.recv(size)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def wrap_socket() -> None:
    """Before a WebSocket request: put a WholeSocket where simple-websocket looks for the socket."""
    environ = request.environ
    if environ.get("HTTP_UPGRADE", "").lower() == "websocket" and "gunicorn.socket" in environ:
        environ["gunicorn.socket"] = WholeSocket(environ["gunicorn.socket"])


def close(ws: Server, code: int, message: str = "") -> None:
    """Close with a reason; a peer that is gone already is fine."""
    with contextlib.suppress(ConnectionClosed, OSError):
        ws.close(code, message or None)


def flooded(ws: Server) -> bool:
    """Drop what the peer sent; True when it sends more than anybody would by mistake."""
    return all(ws.receive(timeout=0) is not None for _ in range(MAX_UNREAD))
