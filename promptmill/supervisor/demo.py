"""The demo of `up`: one question to the server that has just started, the answer as it is generated."""

from promptmill.cli.client import Client
from promptmill.core.events import EventType
from promptmill.supervisor.report import Report

QUESTION = "Name the capital of France."
REQUEST = {
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 64,
    "priority": "interactive",
    "cache": "off",  # the engine is to be seen, not an earlier answer
}


def demo(url: str, report: Report) -> bool:
    """Whether the answer came to its end. Raises the errors of Client."""
    with Client(url) as client:
        job = client.post("/v1/jobs", REQUEST)
        report.event("question", f"> {QUESTION}", job=job["id"], text=QUESTION)
        for event in client.events(job["id"]):
            kind = EventType(event["type"])
            if kind is EventType.TOKEN:
                report.text(event["text"])
            elif kind is EventType.RESET:
                report.event("reset", "\n(the worker was lost; the answer starts again)")
            elif kind.terminal:
                report.text("\n")
                return _ended(event, report)
    return False


def _ended(event: dict[str, object], report: Report) -> bool:
    status, usage, timings = event.get("status"), event.get("usage"), event.get("timings")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    total = timings.get("total_ms") if isinstance(timings, dict) else None
    spent = f" in {total / 1000:.2f} s" if isinstance(total, int | float) else ""
    done = status == "succeeded"
    line = f"({tokens} tokens{spent})" if done else f"(the job ended as {status})"
    report.event("answered" if done else "failed", line, status=status, usage=usage, timings=timings)
    return done
