"""Must show 9: a deterministic prompt is generated once; the second answer comes from the cache and streams like the first."""

import pytest

from tests.support.client import Client, Viewer, text_of
from tests.support.system import System

pytestmark = pytest.mark.e2e

GENERATED = "promptmill_generation_tokens_total"


def ask(client: Client, prompt: str, **fields: object) -> tuple[dict, float]:
    """The finished job and the tokens generated for it. Other tests' jobs are let run out first."""
    for status in ("running", "queued"):
        for job in client.jobs(status=status):
            client.wait(job["id"])
    before = client.metric(GENERATED)
    job = client.run(prompt, max_tokens=24, **fields)
    return job, client.metric(GENERATED) - before


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
def test_the_same_deterministic_prompt_is_generated_once(client: Client, how: dict):
    first, cost = ask(client, f"cached {how}", **how)
    second, nothing = ask(client, f"cached {how}", **how)
    assert (first["cache"], cost) == ("miss", 24)
    assert (second["cache"], nothing) == ("hit", 0)
    assert second["id"] != first["id"]
    assert text_of(second) == text_of(first)
    assert second["result"]["usage"]["completion_tokens"] == 24


def test_a_hit_streams_like_a_run(client: Client):
    first = client.submit("stream me twice", max_tokens=24, temperature=0)
    run = Viewer().watch(client.events(first["id"]))
    client.wait(first["id"])
    second = client.submit("stream me twice", max_tokens=24, temperature=0)
    assert (second["status"], second["cache"]) == ("succeeded", "hit")
    for transport in (client.events, client.ws_events):
        hit = Viewer().watch(transport(second["id"]))
        assert hit.text == run.text
        assert hit.token_ids == run.token_ids
        assert hit.ended["type"] == "done"
        assert hit.ended["cache"] == "hit"


def test_cache_off_generates_again(client: Client):
    first, _ = ask(client, "off and on", temperature=0)
    again, cost = ask(client, "off and on", temperature=0, cache="off")
    assert (again["cache"], cost) == ("off", 24)
    assert text_of(again) == text_of(first)


@pytest.mark.parametrize(
    "change", [{"max_tokens": 23}, {"stop": "zzz"}, {"temperature": 0.5, "seed": 1}, {"prompt": "one word more"}], ids=str
)
def test_any_change_that_matters_is_a_miss(client: Client, change: dict):
    base = {"prompt": "one word", "max_tokens": 24, "temperature": 0}
    client.run(**base)
    assert client.run(**{**base, **change})["cache"] == "miss"


def test_a_sampled_prompt_without_a_seed_is_never_cached(client: Client):
    runs = [client.run("roll the dice", max_tokens=24, temperature=1.5) for _ in range(2)]
    assert [job["cache"] for job in runs] == ["off", "off"]


@pytest.mark.model
def test_the_real_model_answers_from_the_cache_too(real: System):
    first, cost = ask(real.client, "The three primary colours are", temperature=0)
    second, nothing = ask(real.client, "The three primary colours are", temperature=0)
    assert cost == first["result"]["usage"]["completion_tokens"]
    assert (second["cache"], nothing) == ("hit", 0)
    assert text_of(second) == text_of(first)
