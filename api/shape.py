"""The job object of every answer (docs/api.md), made from a stored job."""

from dataclasses import asdict, replace
from typing import Any

from api import logprobs
from api.logprobs import Echo
from api.token_texts import TokenTexts
from promptmill.core.events import usage_json
from promptmill.core.jobs import Choice, Job, Outcome, TokenLogprob

Json = dict[str, Any]


def job_json(job: Job, texts: TokenTexts | None) -> Json:
    """``texts``: of the job's model; None leaves logprobs out, when it is not served any more."""
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
        "result": answer_json(job, texts),
        "error": asdict(job.error) if job.error else None,
        "timings": asdict(job.timings),
        "estimate": None,
        "metadata": job.metadata,
        "batch_id": job.batch_id,
        "links": {"self": path, "events": f"{path}/events", "ws": f"{path}/ws", "cancel": f"{path}/cancel"},
    }


def answer_json(job: Job, texts: TokenTexts | None) -> Json | None:
    """What the job generated, shaped as OpenAI's answer to a request of the same shape."""
    if job.outcome is None:
        return None
    chat = job.spec.shape == "messages"
    suffix = job.id.partition("_")[2]
    scores = _prompt_logprobs(job, job.outcome, texts)
    choices = _chat_choices(job, job.outcome, texts) if chat else _text_choices(job, job.outcome, texts)
    if scores and not chat:
        choices[0].update(scores)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{suffix}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(job.created_at),
        "model": job.model,
        "choices": choices,
        "usage": usage_json(job.outcome.usage),
        **(scores if chat else {}),
    }


def _chat_choices(job: Job, outcome: Outcome, texts: TokenTexts | None) -> list[Json]:
    sampling = job.spec.sampling
    top, stops = sampling.logprobs or 0, bool(sampling.stop)
    return [
        _choice(
            choice,
            {"message": {"role": "assistant", "content": choice.text}},
            logprobs.chat_logprobs(choice, texts, top, stops=stops) if texts else None,
        )
        for choice in outcome.choices
    ]


def _text_choices(job: Job, outcome: Outcome, texts: TokenTexts | None) -> list[Json]:
    sampling = job.spec.sampling
    top, stops = sampling.logprobs or 0, bool(sampling.stop)
    echo = _echo(job, outcome, texts)
    return [
        _choice(
            choice,
            {"text": echo.text + choice.text},
            logprobs.text_logprobs(choice, texts, top, echo, stops=stops) if texts else None,
        )
        for choice in outcome.choices
    ]


def _choice(choice: Choice, content: Json, scores: Json | None) -> Json:
    return {"index": choice.index, **content, "finish_reason": choice.finish_reason, "logprobs": scores}


def _echo(job: Job, outcome: Outcome, texts: TokenTexts | None) -> Echo:
    """The prompt as it was sent; of token ids their text."""
    if not job.request.get("echo"):
        return Echo()
    sent, ids = job.request.get("prompt"), job.spec.prompt_ids
    text = sent if isinstance(sent, str) else (texts.decode(ids) if texts else "")
    scores = _whole_scores(job, outcome)
    return Echo(text, ids, scores) if scores else Echo(text)


def _prompt_logprobs(job: Job, outcome: Outcome, texts: TokenTexts | None) -> Json:
    """Only if they were asked for by name: with echo the engine gives them too, for the lists of logprobs."""
    top, scores = job.request.get("prompt_logprobs"), _whole_scores(job, outcome)
    if top is None or scores is None or texts is None:
        return {}
    return {"prompt_logprobs": logprobs.prompt_logprobs(scores, job.spec.prompt_ids, texts, top)}


def _whole_scores(job: Job, outcome: Outcome) -> tuple[TokenLogprob | None, ...] | None:
    """None also for a run that was cancelled in the middle of its prompt."""
    scores = outcome.prompt_logprobs
    return scores if scores is not None and len(scores) == len(job.spec.prompt_ids) else None


def without_logprobs(job: Job) -> Job:
    """For lists: a page of a hundred results with their logprobs may be gigabytes."""
    if job.outcome is None:
        return job
    choices = tuple(replace(choice, logprobs=None) for choice in job.outcome.choices)
    return replace(job, outcome=replace(job.outcome, choices=choices, prompt_logprobs=None))


def list_json(data: list[Json], *, has_more: bool) -> Json:
    return {
        "object": "list",
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
