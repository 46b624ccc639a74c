"""The job object of every answer (docs/api.md), made from a stored job."""

from dataclasses import asdict
from typing import Any

from promptmill.core.events import usage_json
from promptmill.core.jobs import Choice, Job

Json = dict[str, Any]


def job_json(job: Job) -> Json:
    path = f"/v1/jobs/{job.id}"
    return {
        "id": job.id,
        "object": "job",
        "status": str(job.status),
        "model": job.model,
        "model_revision": job.model_revision,
        "priority": str(job.priority),
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "attempt": job.attempt,
        "cache": job.cache,
        "cancel_requested": job.cancel_requested,
        "request": job.request,
        "result": answer_json(job),
        "error": asdict(job.error) if job.error else None,
        "timings": asdict(job.timings),
        "estimate": None,
        "metadata": job.metadata,
        "batch_id": job.batch_id,
        "links": {"self": path, "events": f"{path}/events", "ws": f"{path}/ws", "cancel": f"{path}/cancel"},
    }


def answer_json(job: Job) -> Json | None:
    """What the job generated, shaped as OpenAI's answer to a request of the same shape."""
    if job.outcome is None:
        return None
    chat = job.spec.shape == "messages"
    suffix = job.id.partition("_")[2]
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{suffix}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(job.created_at),
        "model": job.model,
        "choices": [_choice(choice, chat) for choice in job.outcome.choices],
        "usage": usage_json(job.outcome.usage),
    }


def _choice(choice: Choice, chat: bool) -> Json:
    text: Json = {"message": {"role": "assistant", "content": choice.text}} if chat else {"text": choice.text}
    return {"index": choice.index, **text, "finish_reason": choice.finish_reason, "logprobs": None}


def list_json(data: list[Json], *, has_more: bool) -> Json:
    return {
        "object": "list",
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
