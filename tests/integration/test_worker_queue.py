"""CeleryQueue against a real broker, and against none."""

import subprocess
import sys

import pytest

from promptmill.core.errors import Unavailable
from promptmill.core.jobs import JobRef, Priority, QueueName
from promptmill.core.settings import load_settings
from tests.support.servers import free_port
from tests.support.workers import REPOSITORY
from workers.queue import CeleryQueue

BULK, STANDARD = QueueName(Priority.BULK, "tiny"), QueueName(Priority.STANDARD, "tiny")


def connect(redis_url: str) -> CeleryQueue:
    return CeleryQueue.connect(load_settings(redis_url=redis_url))


def refs(queue: QueueName, count: int) -> list[JobRef]:
    return [JobRef(f"job_{number}", queue) for number in range(count)]


@pytest.mark.parametrize("count", [1, 3, 250])
def test_a_queue_is_empty_until_jobs_are_sent_to_it(redis_url: str, count: int) -> None:
    queue = connect(redis_url)
    assert queue.empty([BULK, STANDARD]) == {BULK, STANDARD}
    queue.send(refs(BULK, count))
    assert queue.empty([BULK, STANDARD]) == {STANDARD}
    with queue.app.pool.acquire(block=True) as connection:
        assert connection.default_channel.queue_declare(queue=str(BULK)).message_count == count


def test_a_broker_that_is_away_never_fails_a_submit() -> None:
    queue = connect(f"redis://127.0.0.1:{free_port()}/0")
    queue.send(refs(BULK, 1))
    queue.send(refs(BULK, 5))
    queue.cancel("job_0", "worker-1@nowhere")
    with pytest.raises(Unavailable):
        queue.empty([BULK])


def test_sending_loads_neither_torch_nor_a_worker() -> None:
    code = "import sys, workers.queue; print([m for m in ('torch', 'transformers', 'workers.runtime', 'storage') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
