"""The checks of `doctor`, one function each. None of them changes anything."""

import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import httpx

import promptmill
from promptmill.core.errors import PromptmillError
from promptmill.core.settings import Settings, mask
from promptmill.supervisor.preflight import DISK_BYTES, check_models
from promptmill.supervisor.services import OLDEST, port_is_free

PACKAGES = ("celery", "kombu", "redis", "sqlalchemy", "flask", "gunicorn", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    mend: str | None = None


def examine(settings: Settings, redis_url: str, api_url: str) -> Iterator[Finding]:
    yield versions()
    yield disk(settings)
    yield from _guarded("redis", lambda: redis(redis_url), "start `promptmill up`, which brings its own, or set PROMPTMILL_REDIS_URL")
    yield from _guarded("sql", lambda: sql(settings), "run `promptmill migrate`, or check PROMPTMILL_DATABASE_URL")
    yield from _guarded("model", lambda: model(settings), None)
    yield from _guarded("worker", lambda: worker(settings.stream_url or redis_url), "start Redis first")
    yield api(settings, api_url)


def versions() -> Finding:
    found, missing = [f"promptmill {promptmill.__version__}", f"Python {platform.python_version()}"], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        return Finding("versions", "fail", f"missing: {', '.join(missing)}", "run `make setup`, or pip install promptmill again")
    return Finding("versions", "ok", ", ".join(found))


def disk(settings: Settings) -> Finding:
    if not settings.data_dir.is_dir():
        return Finding("disk", "warn", f"{settings.data_dir} does not exist yet", "`promptmill up` makes it")
    free = shutil.disk_usage(settings.data_dir).free
    text = f"{free / 2**30:.1f} GB free at {settings.data_dir}"
    return Finding("disk", "ok", text) if free >= DISK_BYTES else Finding("disk", "fail", text, "make room, or set PROMPTMILL_DATA_DIR")


def redis(url: str) -> Finding:
    from storage.redis_client import connect, reaching

    client = connect(url)
    try:
        with reaching("check"):
            info: Mapping[str, Any] = client.info()
    finally:
        client.close()
    return judge_redis(url, info)


def judge_redis(url: str, info: Mapping[str, Any]) -> Finding:
    """By the answer of INFO. Valkey says there with which Redis it is compatible."""
    text = str(info.get("redis_version", "0"))
    place = f"{info.get('server_name', 'redis')} {info.get('valkey_version', text)} at {mask(url)}"
    if tuple(int(part) for part in text.split(".")[:2]) < OLDEST:
        return Finding("redis", "fail", f"{place} is too old", f"Redis {'.'.join(map(str, OLDEST))} or newer is needed")
    weak = []
    if str(info.get("maxmemory_policy", "noeviction")) != "noeviction":
        weak.append(f"maxmemory-policy is {info['maxmemory_policy']} and may drop waiting messages: set noeviction")
    if not int(info.get("aof_enabled", 0)):
        weak.append("appendonly is off, so a restart loses the streams of running jobs: set appendonly yes")
    return Finding("redis", "warn", place, "; ".join(weak)) if weak else Finding("redis", "ok", place)


def sql(settings: Settings) -> Finding:
    from storage.db import Database
    from storage.jobs import SqlJobStore

    place = mask(settings.database)
    if not settings.database_url and not (settings.data_dir / "promptmill.db").exists():
        return Finding("sql", "fail", f"{place} does not exist", "run `promptmill migrate` or `promptmill up`")
    store = SqlJobStore(
        Database.connect(settings.database), lease_seconds=settings.lease_seconds, idempotency_seconds=settings.idempotency_seconds
    )
    try:
        store.check()
    finally:
        store.close()
    return Finding("sql", "ok", f"{place} is migrated")


def model(settings: Settings) -> Finding:
    cards = check_models(settings)
    return Finding("model", "ok", ", ".join(f"{card.name} ({card.revision})" for card in cards))


def worker(redis_url: str) -> Finding:
    from storage.workers import RedisWorkerDirectory

    directory = RedisWorkerDirectory(redis_url)
    try:
        live = directory.live()
    finally:
        directory.close()
    ready = [one for one in live if one.ready]
    if not ready:
        text = f"{len(live)} of them still loading" if live else "none is live"
        return Finding("worker", "fail", text, "start `promptmill up` or `promptmill worker`, and see its log")
    return Finding("worker", "ok", ", ".join(f"{one.node} ({one.engine}: {', '.join(one.models)})" for one in ready))


def api(settings: Settings, url: str, timeout_s: float = 5.0) -> Finding:
    try:
        response = httpx.get(f"{url}/health/ready", timeout=timeout_s)
    except httpx.HTTPError:
        if port_is_free(settings.host, settings.port):
            mend = "start `promptmill up` or `promptmill api`"
            return Finding("api", "warn", f"not running; port {settings.port} is free", mend)
        mend = "stop what listens there, or set PROMPTMILL_PORT"
        return Finding("api", "fail", f"port {settings.port} is taken by something that is not promptmill", mend)
    if not response.headers.get("content-type", "").startswith("application/json"):
        return Finding("api", "fail", f"{url} is not promptmill", "set PROMPTMILL_PORT, or give --url")
    if response.is_success:
        return Finding("api", "ok", f"ready at {url}")
    return Finding("api", "fail", f"{url} is not ready ({response.status_code})", "see the findings above and the api's log")


def _guarded(name: str, check: Callable[[], Finding], mend: str | None) -> Iterator[Finding]:
    try:
        yield check()
    except PromptmillError as error:
        yield Finding(name, "fail", error.message, mend)
