"""Ends the long-lived answers of a gunicorn worker that is told to stop.

gunicorn's gthread worker answers SIGTERM by no longer accepting, then waits for its running requests;
an open stream would hold it until it is killed. The app is loaded in the worker after gunicorn
has set its signal handlers, in the main thread, so that one can be put before it: it sets ``stop``,
and every viewer ends within a second (viewer.TICK_S). Without gunicorn nothing is changed.
"""

import signal
import threading
from types import FrameType


def stop_on_sigterm(stop: threading.Event) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    graceful = signal.getsignal(signal.SIGTERM)
    if not callable(graceful):
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        graceful(number, frame)

    signal.signal(signal.SIGTERM, handle)
    signal.siginterrupt(signal.SIGTERM, False)  # as gunicorn has it: do not disturb running requests
