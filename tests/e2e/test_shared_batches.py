"""Must show 2: prompts submitted together run together, and no result knows of its neighbours."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import Client, text_of
from tests.support.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(400)]

PROMPTS = 40
SUBJECTS = ("a lighthouse", "the river", "an old clock", "my first computer", "winter", "the baker", "a small robot", "Mars")


def mixed_prompts() -> list[tuple[str, int]]:
    """(prompt, max_tokens): from one sentence to a few hundred tokens, 8 to 20 tokens out."""
    made = []
    for number in range(PROMPTS):
        subject = SUBJECTS[number % len(SUBJECTS)]
        filler = f"Remember that {subject} was seen {number} times before. " * (number % 5 * 3)
        made.append((f"{filler}Story number {number}. Once upon a time there was {subject}, and", 8 + number % 4 * 4))
    return made


def greedy(client: Client, prompt: str, max_tokens: int) -> dict:
    return client.submit(prompt, max_tokens=max_tokens, temperature=0, cache="off", priority="interactive")


def test_forty_prompts_at_once_share_steps_and_equal_the_same_prompts_alone(real: System):
    client = real.client
    prompts = mixed_prompts()
    rows = "promptmill_engine_decode_rows"
    steps_before, rows_before = client.metric(f"{rows}_count"), client.metric(f"{rows}_sum")
    with ThreadPoolExecutor(PROMPTS) as pool:
        submitted = list(pool.map(lambda p: greedy(client, *p), prompts))
    together = [client.wait(job["id"], 240) for job in submitted]
    steps, decoded = client.metric(f"{rows}_count") - steps_before, client.metric(f"{rows}_sum") - rows_before
    assert decoded / steps > 8, f"{decoded} rows in {steps} steps"

    alone = [client.wait(greedy(client, *p)["id"]) for p in prompts]
    different = [
        (number, text_of(a), text_of(b))
        for number, (a, b) in enumerate(zip(together, alone, strict=True))
        if text_of(a) != text_of(b) or a["result"]["usage"]["completion_tokens"] != b["result"]["usage"]["completion_tokens"]
    ]
    assert different == []


def test_the_model_knows_the_capital_of_france(real: System):
    job = real.client.http.post(
        "/v1/jobs",
        json={"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8},
    ).json()
    answer = real.client.wait(job["id"])
    assert "Paris" in text_of(answer)
