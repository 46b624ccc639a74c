"""Sending: jobs to the broker, and SQL rows to it in time. For workers, maintenance and the api."""

from collections.abc import Collection, Sequence
from typing import Self

from celery import Celery
from kombu.messaging import Producer
from kombu.transport.virtual import Channel

from promptmill.core.errors import Unavailable
from promptmill.core.jobs import JobRef, QueueName
from promptmill.core.logs import get_logger
from promptmill.core.settings import Settings
from workers.feeder import Feeder
from workers.transport import TASK, base_app, job_queue

__all__ = ["CeleryQueue", "Feeder"]

ACQUIRE_S = 2.0

log = get_logger(__name__)


class CeleryQueue:
    """The port ``JobQueue`` over Celery. Fire and forget: rows in SQL are the outbox."""

    def __init__(self, app: Celery):
        self.app = app

    @classmethod
    def connect(cls, settings: Settings) -> Self:
        """For a process that only sends, such as the api. Connects with the first message."""
        return cls(base_app(settings))

    def send(self, jobs: Sequence[JobRef]) -> None:
        if not jobs:
            return
        try:
            with self.app.amqp.producer_pool.acquire(block=True, timeout=ACQUIRE_S) as producer:
                if len(jobs) == 1:
                    self._publish(producer, jobs[0])
                else:
                    with producer.batch():
                        for job in jobs:
                            self._publish(producer, job)
        except Exception as error:  # whatever it is: the rows are committed and the sweep sends them again
            log.warning("jobs not sent", jobs=len(jobs), reason=repr(error))

    def _publish(self, producer: Producer, job: JobRef) -> None:
        self.app.send_task(
            TASK,
            (job.id,),
            task_id=job.id,  # what Flower shows
            queue=job_queue(job.queue),
            producer=producer,
            ignore_result=True,
        )

    def cancel(self, job_id: str, node: str) -> None:
        try:
            self.app.control.broadcast("cancel_job", arguments={"job_id": job_id}, destination=[node])
        except Exception as error:  # the heartbeat is the slow path
            log.warning("cancel not sent", job=job_id, node=node, reason=repr(error))

    def empty(self, queues: Collection[QueueName]) -> set[QueueName]:
        try:
            with self.app.pool.acquire(block=True, timeout=ACQUIRE_S) as connection:
                return {queue for queue in queues if not _length(connection.default_channel, str(queue))}
        except Exception as error:
            raise Unavailable("the broker cannot be reached") from error


def _length(channel: Channel, name: str) -> int:
    # Not passive=True: that asks EXISTS, which kombu 5.7 forgets to prefix. Redis has nothing to declare.
    return int(channel.queue_declare(queue=name).message_count)
