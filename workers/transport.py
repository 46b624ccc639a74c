"""The Celery app every process starts from: broker, transport and what must be off.

Celery carries ids. It keeps no state, no results, no retries and no acknowledgements of jobs
(docs/decisions/0001).
"""

from typing import Any

from celery import Celery
from kombu.entity import Exchange, Queue

from promptmill.core.jobs import QueueName
from promptmill.core.settings import Settings

TASK = "promptmill.generate"
MAINTENANCE = "maintenance"
PREFIX = "pm:"


def base_app(settings: Settings, cls: type[Celery] = Celery, **options: Any) -> Celery:
    """An app that can send jobs and control commands. Connects to nothing yet."""
    app = cls("promptmill", broker=settings.broker, set_as_current=False, **options)
    app.conf.update(
        broker_transport_options={
            "queue_order_strategy": "workers.gate:CapacityGate",
            "polling_interval": 0.1,  # with 1 s a pending interactive-only fetch holds a free bulk slot for half a second
            "global_keyprefix": PREFIX,
            "socket_connect_timeout": 2,
            "socket_timeout": 5,  # else a publish on a half-open socket hangs for ever
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_pool_limit=20,
        broker_pool_acquire_timeout=2,
        task_send_sent_event=True,
        task_ignore_result=True,
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0},
        task_default_queue=MAINTENANCE,
        task_routes={"promptmill.maintenance.*": {"queue": MAINTENANCE}},
    )
    return app


def job_queue(name: QueueName) -> Queue:
    """The broker queue of a priority and model: direct, by the anonymous exchange, unacknowledged."""
    return Queue(str(name), Exchange("", type="direct"), routing_key=str(name), no_ack=True)
