"""The cap on answers that hold a thread for long: streams, WebSockets and waiting calls."""

import threading

from promptmill.core.errors import Overloaded


class LongLived:
    """Counts places; thread-safe. A place is taken before the first byte and given back once."""

    def __init__(self, limit: int):
        self._limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    def enter(self) -> "Place":
        """Raises Overloaded when all places are taken."""
        with self._lock:
            if self._taken >= self._limit:
                raise Overloaded("this server has no room for a further open stream; poll the job, or try again later")
            self._taken += 1
        return Place(self)

    def _leave(self) -> None:
        with self._lock:
            self._taken -= 1

    @property
    def taken(self) -> int:
        return self._taken


class Place:
    """One long-lived answer's claim on a thread. ``leave`` twice is harmless: a stream may end by
    itself and then be closed by the server."""

    def __init__(self, owner: LongLived):
        self._owner: LongLived | None = owner
        self._lock = threading.Lock()

    def leave(self) -> None:
        with self._lock:
            owner, self._owner = self._owner, None
        if owner is not None:
            owner._leave()

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
