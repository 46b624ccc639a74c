"""`submit`, `tail`, `jobs`, `cancel`: jobs over HTTP."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from promptmill.cli.client import Client, server_url
from promptmill.cli.options import Json, Url
from promptmill.cli.output import as_json, note, piece, say, table
from promptmill.core.errors import PromptmillError
from promptmill.core.events import EventType
from promptmill.core.settings import load_settings

WAIT_S = 30
Priority = Literal["interactive", "standard", "bulk"]
Status = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]


class JobFailed(PromptmillError):
    """The job's own end, shown like an error."""


def register(app: typer.Typer) -> None:
    for command in (submit, tail, jobs, cancel):
        app.command(rich_help_panel="Jobs")(command)


def submit(
    text: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    stream: Annotated[bool, typer.Option("--stream", help="Print the tokens as they come.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Print the answer when it is complete.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    model: Annotated[str | None, typer.Option("--model")] = None,
    priority: Annotated[Priority | None, typer.Option("--priority")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    n: Annotated[int | None, typer.Option("--n", help="So many answers.")] = None,
    logprobs: Annotated[int | None, typer.Option("--logprobs", help="Logprobs with so many alternatives; see them with --json.")] = None,
    schema: Annotated[Path | None, typer.Option("--json-schema", help="Answer in JSON of the schema in this file.")] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="Answer with a match of it.")] = None,
    choice: Annotated[list[str] | None, typer.Option("--choice", help="Answer with one of the choices; repeat it.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a prompt; print the job's id, or with --stream or --wait its answer (then as an interactive job)."""
    if raw and system is not None:
        raise typer.BadParameter("--raw takes no --system")
    if stream and not json and n is not None and n > 1:
        raise typer.BadParameter("the tokens of several answers come mixed: use --wait, or --json")
    prompt = sys.stdin.read() if text == "-" else text
    attended: Priority | None = "interactive" if stream or wait else None
    fields = {
        "model": model,
        "priority": priority or attended,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "n": n,
        "guided_json": _read(schema) if schema else None,
        "guided_regex": regex,
        "guided_choice": choice or None,
        "logprobs": logprobs if raw or logprobs is None else True,
        "top_logprobs": None if raw else logprobs,
    }
    body: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if raw:
        body["prompt"] = prompt
    else:
        said = [{"role": "system", "content": system}] if system is not None else []
        body["messages"] = [*said, {"role": "user", "content": prompt}]
    with _client(url) as client:
        job = client.post("/v1/jobs", body)
        try:
            _show(client, job, stream=stream, wait=wait, json=json)
        except KeyboardInterrupt:
            note(f"\n{job['id']} goes on; see it with: promptmill tail {job['id']}, stop it with: promptmill cancel {job['id']}")
            raise


def tail(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    after: Annotated[str | None, typer.Option("--after", help="Event id to go on after.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Print a job's tokens from its first one on, to its end."""
    with _client(url) as client:
        _follow(client.events(job, after), json)


def jobs(
    status: Annotated[Status | None, typer.Option("--status")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100)] = 20,
    url: Url = None,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    with _client(url) as client:
        page = client.get("/v1/jobs", status=status, limit=limit)
    if json:
        as_json(page)
        return
    columns = ("JOB", "STATUS", "PRIORITY", "MODEL", "ATTEMPT", "CACHE", "TOKENS", "TOTAL MS")
    table(columns, (_row(job) for job in page["data"]))


def cancel(job: Annotated[str, typer.Argument(help="The job's id.")], url: Url = None, json: Json = False) -> None:
    """Cancel a job, waiting or running."""
    with _client(url) as client:
        answer = client.post(f"/v1/jobs/{job}/cancel")
    if json:
        as_json(answer)
    else:
        say(f"{answer['id']} {answer['status']}" + (" (stops at its next step)" if answer["status"] == "running" else ""))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from None


def _client(url: str | None) -> Client:
    return Client(server_url(url, load_settings()))


def _show(client: Client, job: dict[str, Any], *, stream: bool, wait: bool, json: bool) -> None:
    if stream:
        _follow(client.events(job["id"]), json)
    elif wait:
        _answer(_finished(client, job), json)
    elif json:
        as_json(job)
    else:
        say(job["id"])


def _finished(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    while job["status"] in ("queued", "running"):
        job = client.get(f"/v1/jobs/{job['id']}", wait=WAIT_S)
    return job


def _answer(job: dict[str, Any], json: bool) -> None:
    if json:
        as_json(job)
    elif result := job.get("result"):
        for choice in result["choices"]:
            if len(result["choices"]) > 1:
                note(f"[{choice['index']}]")
            say(choice["message"]["content"] if "message" in choice else choice["text"])
    _judge(job["id"], job["status"], job.get("error"))


def _follow(events: Iterable[dict[str, Any]], json: bool) -> None:
    """Print events as they come: as JSON lines, or the text alone with all else on standard error."""
    shown = False
    for event in events:
        kind = EventType(event["type"])
        if json:
            as_json(event)
        elif kind is EventType.TOKEN:
            piece(event["text"])
            shown = True
        elif kind is EventType.RESET and shown:
            note("\n(the worker was lost; the answer starts again)")
        if kind.terminal:
            if not json:
                piece("\n")
            _judge(event["job"], event["status"], event.get("error"))


def _judge(job: str, status: str, error: dict[str, Any] | None) -> None:
    """Raises JobFailed unless the job succeeded."""
    if status != "succeeded":
        reason = f": {error['code']}: {error['message']}" if error else ""
        raise JobFailed(f"{job} {status}{reason}")


def _row(job: dict[str, Any]) -> tuple[object, ...]:
    usage = (job.get("result") or {}).get("usage") or {}
    total = (job.get("timings") or {}).get("total_ms")
    spent = None if total is None else round(total)
    columns = (job[name] for name in ("id", "status", "priority", "model", "attempt", "cache"))
    return (*columns, usage.get("completion_tokens"), spent)
