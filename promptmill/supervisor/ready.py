"""Whether the started system serves: the api answers and lists every worker as ready."""

from typing import Any

import httpx

from promptmill.core.settings import Settings
from promptmill.supervisor.commands import address

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address to listen on -> one to ask


def own_url(settings: Settings) -> str:
    """Where this machine itself reaches the api."""
    return f"http://{address(ANY.get(settings.host, settings.host), settings.port)}"


def waiting_for(url: str, workers: int) -> str | None:
    """What is not ready yet, in words; None when all is."""
    try:
        response = httpx.get(f"{url}/health/ready", timeout=2.0)
        body = response.json()
    except (httpx.HTTPError, ValueError):
        return "the api"
    missing = workers - ready_workers(body)
    if missing > 0:
        return "the worker to load the model" if workers == 1 else f"{missing} of {workers} workers to load the model"
    return None if response.is_success else "the api"


def ready_workers(body: Any) -> int:
    """How many workers the body of /health/ready calls ready."""
    workers = body.get("workers", []) if isinstance(body, dict) else []
    return sum(1 for worker in workers if isinstance(worker, dict) and worker.get("ready"))
