"""The Celery app of the command lines: ``celery -A workers.app worker|beat|flower``.

A worker without ``-P`` gets the engine's pool and consumes the queues of its models; with
``-P threads -Q maintenance`` it loads no model.
"""

import logging
import threading
from typing import Any

from celery import Celery
from celery.signals import celeryd_init, setup_logging
from kombu.utils.objects import cached_property

from promptmill.core.errors import ConfigError
from promptmill.core.jobs import Priority, QueueName
from promptmill.core.logs import configure_logs
from promptmill.core.settings import load_settings
from workers.beat import ticks
from workers.maintenance import Maintenance
from workers.queue import CeleryQueue
from workers.transport import base_app, job_queue

CPU_ROWS = 32  # for the banner: the pool takes its size from the loaded engine

try:
    settings = load_settings()
except ConfigError as error:
    raise SystemExit(f"promptmill: {error.message}") from None


class App(Celery):
    """Celery with what its tasks need: a worker's runtime, or maintenance."""

    runtime: Any = None  # workers.runtime.Runtime, set by the engine's pool
    _maintenance: Maintenance | None = None
    _opening = threading.Lock()

    @cached_property
    def Worker(self) -> Any:
        return self.subclass_with_self("workers.pool:DrainingWorker", name="Worker")

    def maintenance(self) -> Maintenance:
        """Opened by the first tick: only then is it certain that this process does maintenance."""
        with self._opening:
            if self._maintenance is None:
                from workers.runtime import open_maintenance

                self._maintenance = open_maintenance(settings, CeleryQueue(self))
            return self._maintenance


app = base_app(settings, App, include=["workers.tasks"])
app.conf.update(
    worker_pool="workers.pool:EnginePool",
    worker_prefetch_multiplier=1,
    worker_disable_prefetch=True,
    worker_soft_shutdown_timeout=settings.drain_seconds,
    worker_send_task_events=True,
    worker_disable_rate_limits=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,  # True would abort all inference at each blip
    worker_detect_quorum_queues=False,
    beat_scheduler="celery.beat:Scheduler",  # no schedule file
    beat_schedule=ticks(settings.sweep_seconds),
)


@setup_logging.connect(weak=False)
def _set_up_logging(**_: Any) -> None:
    """Our lines instead of Celery's: two per job and one per tick would only repeat or bury them."""
    configure_logs(settings)
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("celery.beat").addFilter(lambda record: "Sending due task" not in str(record.msg))


@celeryd_init.connect(weak=False)
def _choose_queues(conf: Any, options: dict[str, Any], **_: Any) -> None:
    """An engine's worker consumes ``<priority>.<model>`` of each model it serves."""
    if getattr(options.get("pool"), "__module__", "") != "workers.pool":  # the command line hands over a class
        return
    from workers.runtime import engine_options

    models = [folder.name for folder in engine_options(settings).models]
    conf.worker_concurrency = (settings.engine_rows or CPU_ROWS) + settings.reserved_rows
    conf.task_queues = [job_queue(QueueName(priority, model)) for model in models for priority in Priority]
