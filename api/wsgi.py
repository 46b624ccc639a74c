"""The composition root of the api: ``gunicorn --worker-class api.server.Worker … api.wsgi:app``.

gunicorn loads it in each worker process (no --preload), so connections and threads belong to the
worker. Loads neither torch nor transformers.
"""

import fcntl
import itertools
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flask import Flask
from tokenizers import Tokenizer

from api.app import create_app
from api.services import Services
from api.stopping import stop_on_sigterm
from api.tokenizing import ServedModel
from promptmill.core.errors import ConfigError
from promptmill.core.jobs import Grammar
from promptmill.core.logs import configure_logs
from promptmill.core.metrics import Metrics, share
from promptmill.core.models import ModelCard, chosen_models
from promptmill.core.ports import Feed
from promptmill.core.settings import Settings, load_settings
from storage.cache import SqlResultCache
from storage.db import Database
from storage.fanout import RedisFanOut
from storage.jobs import SqlJobStore
from storage.stream import RedisTokenStream
from storage.workers import RedisWorkerDirectory
from workers.queue import CeleryQueue, Feeder

if TYPE_CHECKING:
    from batching.grammar import GrammarCompiler

APP_LOAD_ERROR = 4  # gunicorn's exit code for "do not start this worker again"


class StartedByViewer:
    """A fan-out whose thread starts with the first viewer, so that importing this module connects to nothing."""

    def __init__(self, fanout: RedisFanOut):
        self._fanout = fanout
        self._lock = threading.Lock()
        self._started = False

    def open(self, job: str) -> Feed:
        with self._lock:
            if not self._started:
                self._fanout.start()
                self._started = True
        return self._fanout.open(job)

    def close_feed(self, feed: Feed) -> None:
        self._fanout.close_feed(feed)


class GrammarChecker:
    """Compiles a grammar as the engines will. What that needs is built for the first one: most servers see none."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard):
        self._tokenizer = tokenizer
        self._card = card
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def __call__(self, grammar: Grammar) -> str | None:
        from batching.grammar import GrammarCompiler, GrammarError

        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._tokenizer, self._card.vocab_size, self._card.eos_token_ids)
        try:
            self._compiler.check(grammar)
        except GrammarError as error:
            return error.message
        return None


def metrics_name(directory: Path, process: str) -> str:
    """This process's name in the metrics directory: ``process``, or ``process-2``, … for the further
    workers of one gunicorn. Two processes must not write one file, and a restarted one takes over the
    name of its forerunner, so that the directory does not grow. Held by a lock until the process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        name = process if number == 1 else f"{process}-{number}"
        lock = (directory / f"{name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        _held.append(lock)
        return name
    raise AssertionError("unreachable")


_held: list[object] = []  # open locks


def compose(settings: Settings) -> Flask:
    """Raises ConfigError for a model that is not there or a bad database URL."""
    share(settings.metrics_dir, metrics_name(settings.metrics_dir, settings.process or "api"))
    make = GrammarChecker if find_spec("llguidance") else None
    served = [ServedModel.load(folder, make_grammar_check=make) for folder in chosen_models(settings.models_path, settings.model)]
    db = Database.connect(settings.database, sqlite_synchronous=settings.sqlite_synchronous)
    store = SqlJobStore(db, lease_seconds=settings.lease_seconds, idempotency_seconds=settings.idempotency_seconds)
    queue = CeleryQueue.connect(settings)
    services = Services(
        settings=settings,
        store=store,
        queue=queue,
        feeder=Feeder(store, queue, settings.feed_bound).nudge,
        stream=RedisTokenStream(settings.stream, ttl_seconds=settings.log_ttl_seconds),
        fanout=StartedByViewer(RedisFanOut(settings.stream)),
        cache=SqlResultCache(
            db,
            settings.cache,
            max_bytes=settings.cache_max_bytes,
            max_age_seconds=settings.cache_max_age_seconds,
            hot_seconds=settings.cache_hot_seconds,
        ),
        workers=RedisWorkerDirectory(settings.stream),
        models={model.card.name: model for model in served},
        metrics=Metrics(),
    )
    stop_on_sigterm(services.stop)
    return create_app(services)


def _load() -> Flask:
    try:
        settings = load_settings()
        configure_logs(settings)
        return compose(settings)
    except ConfigError as error:
        print(f"promptmill: {error.message}", file=sys.stderr)  # noqa: T201 (the process ends with this line)
        raise SystemExit(APP_LOAD_ERROR) from None


app = _load()
