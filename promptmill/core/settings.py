"""All settings, read once at a process's entry point.

Later wins: defaults < ``config/$PROMPTMILL_ENV.toml`` < ``.env`` < environment < flags.
``promptmill config`` prints each value and where it came from.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from promptmill.core.errors import ConfigError

PREFIX = "PROMPTMILL_"
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Millis = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseSettings):
    """One frozen value. The comment behind a field is its documentation (docs/configuration.md)."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_file=".env", env_file_encoding="utf-8", extra="ignore", frozen=True)

    env: Literal["development", "test", "production"] = "development"  # which file of config/ is read
    process: str = ""  # name of this process in metrics and logs; `up` sets it, such as worker-1
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # prompts appear at debug only

    data_dir: Path = Path("var")  # SQLite file, embedded Valkey, models, metrics, logs
    models_dir: Path | None = None  # default: <data_dir>/models
    database_url: str = ""  # default: SQLite in the data directory
    sqlite_synchronous: Literal["normal", "full"] = "normal"  # full: a power cut loses nothing, commits are slower
    redis_url: str = "redis://127.0.0.1:6379/0"  # `up` embeds a server when this is not set
    broker_url: str = ""  # default: redis_url
    stream_url: str = ""  # default: redis_url
    cache_url: str = ""  # default: redis_url

    host: str = "127.0.0.1"  # every server of ours listens there
    port: Port = 8000  # of the api
    api_workers: Positive = 1  # gunicorn processes
    api_threads: Annotated[int, Field(ge=80)] = 512  # per process; long-lived answers hold one each, 64 stay free
    max_body_bytes: Positive = 10 * 1024 * 1024  # of a request; beyond it 413
    max_tokens_cap: Positive = 2048  # largest max_tokens of a job; larger ones are clamped
    job_tokens_cap: Positive = 32_768  # largest max_tokens times n, or times beam_width, of a job; beyond it 400
    allowed_origins: tuple[str, ...] = ()  # besides the server's own origin
    allowed_hosts: tuple[str, ...] = ()  # besides host:port, localhost and 127.0.0.1
    metrics_port: Port = 0  # of a worker; 0 = any free one

    model: str = ""  # served names, comma separated; default: the one `models use` chose
    engine: Literal["torch", "instant"] = "torch"  # instant: no weights, a made-up text; for tests and load
    engine_rows: Count = 0  # rows for all priorities; 0 = 32 on CPU, 128 on CUDA
    reserved_rows: Count = 4  # further rows, for interactive jobs only
    prefill_tokens: Positive = 256  # most prompt tokens per step
    target_itl_ms: Millis = 0.0  # inter-token latency that rows and prefill of a step are held to; 0 = throughput only
    idle_window_ms: Millis = 20.0  # an idle engine waits so long for company; interactive does not wait
    prefix_cache: bool = True  # requests of a tenant share the KV of equal beginnings
    kv_cache_bytes: Count = 0  # 0 = a quarter of the memory on CPU, what the weights leave on CUDA
    kernels: Literal["auto", "native", "torch"] = "auto"  # auto on CPU: C kernels where there is a compiler, else torch
    threads: Count = 0  # torch threads; 0 = all cores
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a GPU
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto on CPU: bfloat16 where the CPU computes in it
    instant_step_ms: Millis = 0.0  # duration of a step of the instant engine

    claim_max_size: Positive = 64  # the micro-batch window of claims: size,
    claim_probe_ms: Millis = 3.0  # time for a lone one,
    claim_max_wait_ms: Millis = 20.0  # and time once a second one came
    lease_seconds: Seconds = 8.0  # how long a silent worker keeps its jobs
    heartbeat_seconds: Seconds = 2.0  # between two renewals of a worker's leases
    stall_seconds: Seconds = 30.0  # an engine that has not stepped for so long loses its process
    sweep_seconds: Seconds = 2.0  # between two runs of the maintenance tasks
    feed_bound: Positive = 128  # published, unclaimed standard or bulk jobs per queue
    drain_seconds: Seconds = 20.0  # a stopping worker lets its jobs run so long, then gives them back

    cache_max_bytes: Count = 256 * 1024 * 1024  # of the result cache in SQL; 0 = no cache
    cache_max_age_seconds: Seconds = 7 * 86400.0  # of a cached result
    cache_hot_seconds: Seconds = 3600.0  # life of a result in Redis
    log_ttl_seconds: Seconds = 60.0  # life of a token log after its terminal event
    idempotency_seconds: Seconds = 86400.0  # life of an Idempotency-Key

    flower_port: Port = 5555  # of the dashboard; `up` takes a free one when it is taken

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, dotenv_settings, TomlConfigSettingsSource(cls, config_file()))

    @property
    def models_path(self) -> Path:
        return self.models_dir or self.data_dir / "models"

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'promptmill.db'}"

    @property
    def broker(self) -> str:
        return self.broker_url or self.redis_url

    @property
    def stream(self) -> str:
        return self.stream_url or self.redis_url

    @property
    def cache(self) -> str:
        return self.cache_url or self.redis_url

    @property
    def kernels_dir(self) -> Path:
        return self.data_dir / "kernels"

    @property
    def metrics_dir(self) -> Path:
        return self.data_dir / "metrics"


def config_file() -> Path:
    """``config/<env>.toml`` under the working directory, or under $PROMPTMILL_CONFIG_DIR."""
    name = os.environ.get(f"{PREFIX}ENV", "development")
    return Path(os.environ.get(f"{PREFIX}CONFIG_DIR", "config")) / f"{name}.toml"


def load_settings(**flags: Any) -> Settings:
    """The effective settings. Raises ConfigError with one line that names the bad value's setting."""
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        raise ConfigError(f"bad setting {name} ({PREFIX}{name.upper()}): {first['msg']}") from None
    except (OSError, ValueError) as error:  # a damaged TOML file
        raise ConfigError(f"cannot read the settings from {config_file()}: {error}") from None


def explain(settings: Settings, **flags: Any) -> list[tuple[str, str, str]]:
    """(name, value with secrets masked, where it came from) for every setting."""
    sources = [
        ("flag", {name: value for name, value in flags.items() if value is not None}),
        ("environment", EnvSettingsSource(Settings)()),
        (".env", DotEnvSettingsSource(Settings)()),
        (str(config_file()), TomlConfigSettingsSource(Settings, config_file())()),
    ]
    rows = []
    for name in Settings.model_fields:
        origin = next((label for label, values in sources if name in values), "default")
        rows.append((name, mask(str(getattr(settings, name))), origin))
    return rows


def mask(text: str) -> str:
    """Hide the password of a URL."""
    return re.sub(r"(?<=://)([^:/@\s]*):[^@/\s]+@", r"\1:***@", text)
