import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from workers.metrics_server import MetricsServer


class Host:
    ready = True


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def server(host: Host) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, lambda: b"promptmill_up 1\n", lambda: host.ready)
    server.start()
    yield server
    server.close()


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_metrics_and_health(server: MetricsServer, host: Host) -> None:
    assert get(f"{server.url}/metrics") == (200, b"promptmill_up 1\n")
    assert get(f"{server.url}/health/live")[0] == 200
    assert get(f"{server.url}/health/ready")[0] == get(f"{server.url}/health")[0] == 200
    host.ready = False
    status, body = get(f"{server.url}/health/ready")
    assert (status, json.loads(body)) == (503, {"status": "not ready"})
    assert get(f"{server.url}/health/live")[0] == 200
    assert get(f"{server.url}/else")[0] == 404


def test_a_taken_port_falls_back_to_a_free_one(server: MetricsServer) -> None:
    other = MetricsServer("127.0.0.1", int(server.url.rsplit(":", 1)[1]), lambda: b"", lambda: True)
    assert other.url != server.url
    other.close()
