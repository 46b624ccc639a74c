"""What the routes work with, handed to ``create_app`` by a composition root or a test."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from flask import Flask, current_app

from api.longlived import LongLived
from api.tokenizing import ServedModel
from api.viewers import Viewers
from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.jobs import QueueName
from promptmill.core.metrics import Metrics
from promptmill.core.ports import FanOut, JobQueue, JobStore, ResultCache, TokenStream, WorkerDirectory
from promptmill.core.settings import Settings

EXTENSION = "promptmill"
FREE_THREADS = 64  # of a process, kept for short requests: health, submit and cancel always answer


@dataclass(frozen=True)
class Services:
    """``feeder`` publishes what waits in SQL for one queue. ``models``: served name -> model, the
    first one is the default if it is the only one. ``stop`` is set when this process shall end:
    long-lived answers then end within a second."""

    settings: Settings
    store: JobStore
    queue: JobQueue
    feeder: Callable[[QueueName], object]
    stream: TokenStream
    fanout: FanOut
    cache: ResultCache
    workers: WorkerDirectory
    models: Mapping[str, ServedModel]
    metrics: Metrics
    clock: Clock = SYSTEM_CLOCK
    stop: threading.Event = field(default_factory=threading.Event)
    long_lived: LongLived = field(init=False)
    viewers: Viewers = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "long_lived", LongLived(self.settings.api_threads - FREE_THREADS))
        object.__setattr__(self, "viewers", Viewers(self.metrics))

    def attach(self, app: Flask) -> None:
        app.extensions[EXTENSION] = self


def services() -> Services:
    """Those of the app that answers the current request."""
    return cast(Services, current_app.extensions[EXTENSION])
