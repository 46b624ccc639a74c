"""The composition roots of the worker and of maintenance: the only module here that joins packages."""

import os
import secrets
import socket
from dataclasses import replace

from batching.engines import create_engine
from batching.options import EngineOptions
from batching.window import MicroBatcher
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.errors import Unavailable
from promptmill.core.jobs import Finish
from promptmill.core.logs import get_logger
from promptmill.core.metrics import Metrics, exposition, share
from promptmill.core.models import ModelCard, chosen_models
from promptmill.core.ports import JobQueue, WorkerInfo
from promptmill.core.settings import Settings
from storage.cache import SqlResultCache
from storage.db import Database
from storage.jobs import SqlJobStore
from storage.stream import RedisTokenStream
from storage.workers import RedisWorkerDirectory
from workers.claims import Arrival, Claims
from workers.engine_thread import EngineThread
from workers.feeder import Feeder
from workers.flusher import Flusher
from workers.gate import Capacity, CapacityGate
from workers.heartbeat import Heartbeat
from workers.maintenance import Maintenance
from workers.metrics_server import MetricsServer
from workers.registry import Abort, Registry, Run
from workers.sink import Sink
from workers.way import JobWay, Parts

COMMIT_SECONDS = 2.0  # at least, for the last results of a drained engine
FETCH_SECONDS = 5.0  # a ready worker's consumer has asked the broker within these

log = get_logger(__name__)


def engine_options(settings: Settings) -> EngineOptions:
    """``models`` are those this worker serves: all chosen ones, or the first if it needs weights."""
    models = tuple(chosen_models(settings.models_path, settings.model))
    return EngineOptions(
        kind=settings.engine,
        models=models if settings.engine == "instant" else models[:1],
        rows=settings.engine_rows,
        reserved_rows=settings.reserved_rows,
        prefill_tokens=settings.prefill_tokens,
        target_itl_s=settings.target_itl_ms / 1000,
        idle_window_s=settings.idle_window_ms / 1000,
        prefix_cache=settings.prefix_cache,
        kv_cache_bytes=settings.kv_cache_bytes,
        threads=settings.threads,
        device=settings.device,
        dtype=settings.dtype,
        kernels=settings.kernels,
        kernels_dir=settings.kernels_dir,
        instant_step_s=settings.instant_step_ms / 1000,
    )


def served(settings: Settings) -> dict[str, str]:
    """Name -> revision of the models to serve. Raises ConfigError for one that is not prepared."""
    cards = [ModelCard.load(folder) for folder in engine_options(settings).models]
    return {card.name: card.revision for card in cards}


class Runtime:
    """A running worker: the engine and all around it. Raises ConfigError for what is missing here."""

    def __init__(self, settings: Settings, queue: JobQueue, node: str):
        self._settings = settings
        self._models = served(settings)
        self._clock = clock = SYSTEM_CLOCK
        self._node = node
        self._ready = False
        share(settings.metrics_dir, settings.process or node)
        metrics = Metrics()
        worker = f"{node}/{secrets.token_hex(4)}"  # a restarted worker of the same name is another one
        self.registry = Registry(Capacity(0, 0), clock)
        self._db = Database.connect(settings.database, sqlite_synchronous=settings.sqlite_synchronous)
        store = SqlJobStore(self._db, lease_seconds=settings.lease_seconds, idempotency_seconds=settings.idempotency_seconds)
        self._stream = RedisTokenStream(settings.stream, ttl_seconds=settings.log_ttl_seconds)
        self._cache = result_cache(settings, self._db)
        self._directory = RedisWorkerDirectory(settings.stream)
        self._feeder = Feeder(store, queue, settings.feed_bound)
        engine = create_engine(replace(engine_options(settings), metrics=metrics))
        self._engine = EngineThread(engine, on_death=lambda: self._heartbeat.beat_now())
        self._flusher = Flusher(self._stream, clock, on_fenced=lambda job, attempt: self.way.lose(job, attempt))
        self._sink = Sink(self.registry, self._flusher, metrics, clock, worker)
        claims = Claims(store, self.registry, lambda run: self.way.abort(run, Abort.LOST), metrics, clock, worker, node)
        self._claim = MicroBatcher[Arrival, Run | None](
            claims.claim,
            max_size=settings.claim_max_size,
            probe_s=settings.claim_probe_ms / 1000,
            max_wait_s=settings.claim_max_wait_ms / 1000,
            on_batch=claims.on_batch,
        )
        self._finish = MicroBatcher[Finish, bool](
            store.finish_many,
            max_size=settings.claim_max_size,
            probe_s=0.0,
            max_wait_s=0.0,
            on_batch=lambda size, _waited_s, _reason: metrics.finish_batch_size.observe(size),
            retry_alone=True,
        )
        self.way = JobWay(
            Parts(
                store=store,
                queue=queue,
                cache=self._cache,
                engine=engine,
                flusher=self._flusher,
                registry=self.registry,
                metrics=metrics,
                clock=clock,
                worker=worker,
                claim=self._claim,
                finish=self._finish,
                finished=lambda claim: self._feeder.finished(claim.queue),
            )
        )
        self._heartbeat = Heartbeat(
            store,
            self.registry,
            self.way,
            self._engine,
            self._directory,
            self.info,
            clock,
            worker=worker,
            seconds=settings.heartbeat_seconds,
            stall_seconds=settings.stall_seconds,
        )
        self._server = MetricsServer(settings.host, settings.metrics_port, lambda: exposition(metrics), self.ready)

    def start(self) -> Capacity:
        """Load the engine, then take up the rest; how many jobs may be in flight. Raises ConfigError."""
        self._server.start()
        self._engine.start(self._sink)
        self.registry.capacity = Capacity(self._engine.stats().rows, self._settings.reserved_rows)
        CapacityGate.load = self.registry
        self._flusher.start()
        self._heartbeat.start()
        log.info("engine started", node=self._node, models=list(self._models), rows=self.registry.capacity.rows, metrics=self._server.url)
        return self.registry.capacity

    def consuming(self) -> None:
        """The consumer is up: say at once that jobs are taken."""
        self._ready = True
        self.registry.polled()
        self._heartbeat.beat_now()

    def ready(self) -> bool:
        """Whether jobs are fetched and the engine runs them."""
        return self._ready and self._engine.alive and self.registry.fetching(FETCH_SECONDS)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            node=self._node,
            models=self._models,
            engine=self._settings.engine,
            rows=self.registry.capacity.rows,
            ready=self.ready(),
            metrics_url=f"{self._server.url}/metrics",
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def release(self, job_id: str) -> None:
        """Stop the job here and give it back, to be run elsewhere."""
        run = self.registry.of_job(job_id)
        if run is not None:
            self.way.abort(run, Abort.RELEASE)

    def drain(self, seconds: float | None = None) -> None:
        """Let what the engine runs finish, for ``seconds`` (default: drain_seconds) at most, then give the rest
        back; what is done is committed meanwhile."""
        self._ready = False
        seconds = self._settings.drain_seconds if seconds is None else seconds
        end = self._clock.monotonic() + seconds
        self.way.give_back(self._engine.drain(seconds))
        self.registry.wait_idle(max(COMMIT_SECONDS, end - self._clock.monotonic()))

    def release_all(self) -> None:
        self.way.close()

    def close(self) -> None:
        """Once; when no task thread is left."""
        CapacityGate.load = None
        self._heartbeat.close()
        self._engine.close()
        self._flusher.close()
        self._feeder.close()
        try:
            self._directory.withdraw(self._node)
        except Unavailable as error:  # it vanishes by itself
            log.warning("not withdrawn", node=self._node, reason=error.message)
        self._server.close()
        for part in (self._claim, self._finish, self._directory, self._cache, self._stream, self._db):
            part.close()
        log.info("worker stopped", node=self._node)


def result_cache(settings: Settings, db: Database) -> SqlResultCache:
    return SqlResultCache(
        db,
        settings.cache,
        max_bytes=settings.cache_max_bytes,
        max_age_seconds=settings.cache_max_age_seconds,
        hot_seconds=settings.cache_hot_seconds,
    )


def open_maintenance(settings: Settings, queue: JobQueue) -> Maintenance:
    """The recovery of this process; it loads no model."""
    share(settings.metrics_dir, settings.process or "maintenance")
    db = Database.connect(settings.database, sqlite_synchronous=settings.sqlite_synchronous)
    store = SqlJobStore(db, lease_seconds=settings.lease_seconds, idempotency_seconds=settings.idempotency_seconds)
    return Maintenance(
        store=store,
        queue=queue,
        stream=RedisTokenStream(settings.stream, ttl_seconds=settings.log_ttl_seconds),
        cache=result_cache(settings, db),
        feeder=Feeder(store, queue, settings.feed_bound),
        metrics=Metrics(),
        clock=SYSTEM_CLOCK,
        lease_seconds=settings.lease_seconds,
    )
