"""Celery's thread pool around one engine: each task thread parks on its job's future.

The threads pool cannot stop a job (celery#10490). Here the task's id stands in for the pid that
Celery hands to ``terminate_job``, so that a cold shutdown and ``revoke(terminate=True)`` find it.
"""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery.apps.worker import Worker
from celery.concurrency.thread import ApplyResult, TaskPool

from promptmill.core.errors import ConfigError
from promptmill.core.jobs import QueueName
from promptmill.core.logs import get_logger
from workers.app import settings
from workers.queue import CeleryQueue
from workers.runtime import Runtime

EXIT_CONFIG = 78  # EX_CONFIG

log = get_logger(__name__)


class EnginePool(TaskPool):
    """Starts with the engine loaded, stops with every job finished or given back."""

    runtime: Runtime | None = None

    def on_start(self) -> None:
        app, node = self.options["initargs"]
        # SIGTERM must drain within a bound; the environment's REMAP_SIGTERM does the same where it is set.
        signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGQUIT))
        try:
            self.runtime = app.runtime = Runtime(settings, CeleryQueue(app), node)
            self._resize(self.runtime.start().total)
        except ConfigError as error:
            log.critical("worker cannot start", reason=error.message)
            raise SystemExit(EXIT_CONFIG) from None

    def _resize(self, limit: int) -> None:
        """One thread per job that the engine takes; Celery asks for the limit before each fetch."""
        self.limit = limit
        self.executor = ThreadPoolExecutor(limit, thread_name_prefix="job")

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        correlation_id: str | None = None,
        **options: Any,
    ) -> ApplyResult:
        def accepted(_pid: int, at: float) -> None:
            if accept_callback is not None:
                accept_callback(correlation_id, at)

        counted = self._counted(target, args or ())
        return super().on_apply(counted, args, kwargs, callback, accepted, **options)

    def _counted(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """Count the job as in flight from its delivery, on the hub's thread, before the gate orders
        the next fetch; and as gone before its end wakes the hub."""
        queue = QueueName.parse(_routing_key(args))
        runtime = self.runtime
        if queue is None or runtime is None:
            return target
        registry, priority = runtime.registry, queue.priority
        registry.arrive(priority)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return target(*args, **kwargs)
            finally:
                registry.depart(priority)

        return run

    def terminate_job(self, pid: str, signal: int | None = None) -> None:
        if self.runtime is not None:
            self.runtime.release(pid)

    def drain(self, seconds: float) -> None:
        """Let running jobs finish, for ``seconds`` at most."""
        if self.runtime is not None:
            self.runtime.drain(seconds)

    def on_stop(self) -> None:
        runtime = self.runtime
        if runtime is not None:
            runtime.drain()
            runtime.release_all()
        super().on_stop()
        if runtime is not None:  # a cold shutdown stops the pool twice
            self.runtime = None
            runtime.close()


class DrainingWorker(Worker):
    """The worker program, with an engine's pool or any other."""

    def on_consumer_ready(self, consumer: Any) -> None:
        super().on_consumer_ready(consumer)
        if isinstance(self.pool, EnginePool) and self.pool.runtime is not None:
            self.pool.runtime.consuming()

    def wait_for_soft_shutdown(self) -> None:
        """Celery sleeps the whole timeout; with an engine the drain ends with the last job."""
        if isinstance(self.pool, EnginePool):
            self.pool.drain(self.app.conf.worker_soft_shutdown_timeout)
        else:
            super().wait_for_soft_shutdown()


def _routing_key(args: tuple[Any, ...]) -> str:
    """Of a traced task's arguments (type, id, request, …): the queue its message came from."""
    request = args[2] if len(args) > 2 else None
    delivery = request.get("delivery_info") if isinstance(request, dict) else None
    return str((delivery or {}).get("routing_key") or "")
