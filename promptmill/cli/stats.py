"""`stats`: what the system does now, from /metrics."""

from collections.abc import Iterator
from threading import Event
from typing import Annotated, Any

import typer

from promptmill.cli.client import Client, server_url
from promptmill.cli.options import Json, Url
from promptmill.cli.output import as_json, note, table
from promptmill.cli.scrape import Sample, summary
from promptmill.core.clock import SYSTEM_CLOCK
from promptmill.core.settings import load_settings


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Jobs")(stats)


def stats(
    interval: Annotated[float, typer.Option("--interval", min=0.0, max=600.0, help="Seconds between the two looks; 0 = one look.")] = 2.0,
    url: Url = None,
    json: Json = False,
) -> None:
    """Rates, latencies, batch occupancy and queues."""
    with Client(server_url(url, load_settings())) as client:
        first, begun = Sample.parse(client.text("/metrics")), SYSTEM_CLOCK.monotonic()
        last, seconds = first, 0.0
        if interval:
            Event().wait(interval)
            last, seconds = Sample.parse(client.text("/metrics")), SYSTEM_CLOCK.monotonic() - begun
        rows = engine_rows(client.get("/health/ready"))
    found = summary(first, last, seconds, rows)
    if json:
        as_json(found)
        return
    span = f"the last {seconds:.1f} s" if found["window"] == "interval" else "all time since the start"
    note(f"latencies and batches over {span}")
    table(("WHAT", "VALUE"), lines(found))


def engine_rows(health: dict[str, Any]) -> float:
    """Rows of one ready worker, on average; 0 when none is ready."""
    rows = [worker["rows"] for worker in health.get("workers", []) if worker.get("ready")]
    return sum(rows) / len(rows) if rows else 0.0


def lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A summary as rows for people."""
    for name, title in (("requests_per_s", "requests/s"), ("jobs_per_s", "jobs finished/s"), ("generation_tokens_per_s", "tokens/s")):
        yield title, _number(found[name], 1)
    for name, title in (
        ("time_to_first_token_s", "time to first token"),
        ("inter_token_s", "between tokens"),
        ("queue_wait_s", "wait in queue"),
        ("e2e_s", "end to end"),
    ):
        yield title, "  ".join(f"{point} {_duration(value)}" for point, value in found[name].items())
    occupancy = found["occupancy"]
    share = f" ({occupancy:.0%} of the engine's rows)" if occupancy is not None else ""
    yield "rows decoding per step", _number(found["decode_rows_mean"], 2) + share
    yield "jobs per claim", _number(found["claim_batch_mean"], 2)
    for priority, depth in sorted(found["queue_depth"].items()):
        yield f"queue {priority}", f"{depth:.0f} waiting, oldest {_duration(found['queue_oldest_s'].get(priority))}"
    for status, count in sorted(found["jobs_total"].items()):
        yield f"jobs {status}", f"{count:.0f}"
    yield "cache hits", f"{found['cache_hits_total']:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
