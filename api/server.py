"""gunicorn's gthread worker, made safe against clients that are slow to send, to read, or to go.

gthread closes a connection on the loop that serves everybody and waits there up to 2 s for the
client (RFC 9112 section 9.6): a few idle sockets would freeze the api. And it waits for ever for the
rest of a request. Here a connection is closed on its request's own thread, and no read or write
of a socket waits longer than SOCKET_S.
"""

import contextlib
import signal
from typing import Any

from gunicorn.workers.gthread import TConn, ThreadWorker

SOCKET_S = 30.0


class Worker(ThreadWorker):
    def handle(self, conn: TConn) -> Any:
        """Serve one request; the truth of the answer says whether the connection goes on."""
        if not isinstance(conn.init, _Init):
            conn.init = _Init(conn)
        goes_on = super().handle(conn)
        if not goes_on:
            with contextlib.suppress(OSError):  # closed already, such as by a WebSocket's end
                conn.close(graceful=True)
            conn.close = _closed
        return goes_on

    def is_parent_alive(self) -> bool:
        """A worker whose master was killed ends as if it were told to: its viewers too (api.stopping)."""
        alive = bool(super().is_parent_alive())
        if not alive:
            signal.raise_signal(signal.SIGTERM)
        return alive


class _Init:
    """``TConn.init``, which gthread calls before each request, after it has made the socket blocking."""

    def __init__(self, conn: TConn):
        self._conn = conn
        self._init = conn.init

    def __call__(self) -> None:
        self._init()
        self._conn.sock.settimeout(SOCKET_S)


def _closed(graceful: bool = False) -> None:
    """Nothing is left to close when the loop comes to it."""
