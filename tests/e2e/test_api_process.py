"""Must show 7: the api is small. It never loads the engine's libraries, whatever it is asked."""

import subprocess
import sys

import pytest

from tests.support.processes import Process
from tests.support.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REQUESTS = 1000
LIMIT = 150 * 1000 * 1000
HEAVY = ("torch", "transformers")


def servers(system: System) -> list[Process]:
    """gunicorn's workers, not their arbiter."""
    arbiter = system.process("api")
    found = [p for p in system.processes() if p.parent == arbiter.pid]
    assert found
    return found


def test_a_thousand_requests_leave_each_api_process_under_150_megabytes(instant: System):
    client = instant.client
    for number in range(REQUESTS // 5):
        job = client.submit(f"memory {number}", max_tokens=8, priority="interactive")["id"]
        for _ in client.events(job):
            pass
        client.get(job)
        assert client.http.get("/v1/jobs", params={"limit": 5}).status_code == 200
        assert client.http.post("/v1/jobs", content=b"not json", headers={"content-type": "application/json"}).status_code == 400
    for server in servers(instant):
        assert server.rss_bytes < LIMIT


def test_the_api_maps_no_library_of_the_engine(instant: System):
    instant.client.run("load what there is to load", max_tokens=2)
    for server in servers(instant):
        heavy = [name for name in server.libraries if name.startswith(("libtorch", "libc10"))]
        assert heavy == []


def test_importing_the_api_imports_neither_torch_nor_transformers(instant: System):
    code = f"import sys, api.wsgi; sys.exit(','.join(m for m in {HEAVY} if m in sys.modules) or 0)"
    environment = instant.process("api").environment | {"PROMPTMILL_PROCESS": "api-import"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=instant.data_dir.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
