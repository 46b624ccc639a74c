"""Every kind of request over HTTP on the real model, alone and all at once."""

import json
import re

import pytest

from tests.support.client import Client, Json
from tests.support.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(400)]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STORY = "Once upon a time there was a lighthouse, and"
KINDS: dict[str, Json] = {
    "plain": {"prompt": STORY, "max_tokens": 16},
    "n": {"prompt": STORY, "max_tokens": 12, "n": 4, "temperature": 0.8, "seed": 7},
    "beam": {"prompt": STORY, "max_tokens": 10, "use_beam_search": True, "beam_width": 4, "n": 2},
    "schema": {
        "messages": [{"role": "user", "content": "Invent a person. Answer as JSON."}],
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    },
    "regex": {"prompt": "A phone number: ", "max_tokens": 20, "guided_regex": "[0-9]{3}-[0-9]{4}"},
    "choice": {"prompt": "The sky is", "max_tokens": 8, "guided_choice": [" blue", " green"]},
    "echo": {"prompt": STORY, "max_tokens": 4, "echo": True, "logprobs": 2},
    "score": {"prompt": STORY, "max_tokens": 0, "echo": True, "logprobs": 0},
    "chat logprobs": {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 6, "logprobs": True, "top_logprobs": 3},
    "penalties": {"prompt": STORY, "max_tokens": 16, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "bias": {"prompt": STORY, "max_tokens": 6, "logit_bias": {"30": 100}},
    "ends": {"prompt": STORY, "max_tokens": 12, "ignore_eos": True, "min_tokens": 5, "min_p": 0.1, "temperature": 0.7, "seed": 3},
}


def submit(client: Client, kind: str) -> str:
    body = {"temperature": 0, "cache": "off", **KINDS[kind]}
    answer = client.http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, (kind, answer.text)
    return answer.json()["id"]


def result(client: Client, job: str) -> Json:
    body = client.wait(job, 240)
    assert body["status"] == "succeeded", body["error"]
    return body["result"]


@pytest.fixture(scope="module")
def lone(real: System) -> dict[str, Json]:
    return {kind: result(real.client, submit(real.client, kind)) for kind in KINDS}


def test_all_kinds_at_once_give_the_results_of_their_lone_runs(real: System, lone: dict[str, Json]) -> None:
    jobs = {kind: submit(real.client, kind) for kind in KINDS}
    for kind, job in jobs.items():
        together = result(real.client, job)
        assert together["choices"] == lone[kind]["choices"], kind


def test_choices_and_beams(lone: dict[str, Json]) -> None:
    assert [choice["index"] for choice in lone["n"]["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in lone["n"]["choices"]}) > 1
    assert lone["n"]["usage"]["completion_tokens"] == 48
    assert len({choice["text"] for choice in lone["beam"]["choices"]}) == 2


def test_structured_output_has_its_structure(lone: dict[str, Json]) -> None:
    person = json.loads(lone["schema"]["choices"][0]["message"]["content"])
    assert isinstance(person["name"], str)
    assert 0 <= person["age"] <= 120
    assert lone["schema"]["choices"][0]["finish_reason"] == "stop"
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", lone["regex"]["choices"][0]["text"])
    assert lone["choice"]["choices"][0]["text"] in (" blue", " green")


def test_scores_of_a_prompt_are_the_same_alone_and_before_an_answer(lone: dict[str, Json]) -> None:
    score, echo = lone["score"]["choices"][0], lone["echo"]["choices"][0]
    assert (score["text"], score["finish_reason"], lone["score"]["usage"]["completion_tokens"]) == (STORY, "length", 0)
    assert echo["text"].startswith(STORY)
    count = len(score["logprobs"]["tokens"])
    assert "".join(score["logprobs"]["tokens"]) == STORY
    assert score["logprobs"]["token_logprobs"][0] is None
    assert score["logprobs"]["token_logprobs"] == echo["logprobs"]["token_logprobs"][:count]
    assert len(echo["logprobs"]["tokens"]) == count + 4
    assert all(value < 0 for value in score["logprobs"]["token_logprobs"][1:])


def test_the_greedy_token_is_the_first_of_its_alternatives_by_the_same_float(lone: dict[str, Json]) -> None:
    content = lone["chat logprobs"]["choices"][0]["logprobs"]["content"]
    assert content
    for token in content:
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]
        assert token["top_logprobs"][0]["token"] == token["token"]


def test_the_stream_of_several_choices_gives_their_texts(real: System, lone: dict[str, Json]) -> None:
    texts: dict[int, str] = {}
    for event in real.client.events(submit(real.client, "n")):
        if event["type"] == "token":
            texts[event["index"]] = texts.get(event["index"], "") + event["text"]
    assert texts == {choice["index"]: choice["text"] for choice in lone["n"]["choices"]}


def test_a_job_that_breaks_off_in_the_middle_of_json_says_length(real: System) -> None:
    body = {**KINDS["schema"], "temperature": 0, "max_tokens": 4, "cache": "off"}
    answer = real.client.http.post("/v1/jobs", json=body)
    found = result(real.client, answer.json()["id"])["choices"][0]
    assert found["finish_reason"] == "length"
    assert found["message"]["content"].startswith("{")
