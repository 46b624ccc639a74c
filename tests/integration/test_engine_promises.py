"""What the engine promises, on real tensors: a request's answer does not depend on its company, on how
its prompt was cut, on pauses, or on which process goes on with it; and no request harms another.

The model is small and random, so that thousands of steps take seconds; bench/equality.py does the first
part on the default model.
"""

import json
import random
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from batching.engine import BatchingEngine
from batching.runner import BLOCK_TOKENS
from promptmill.core.engine import EngineEvent, Failed, Finished, GenRequest, Started
from promptmill.core.errors import Rejected
from promptmill.core.jobs import Beam, Grammar, Outcome
from tests.support.engine import ends, finished, make_request, run_to_end
from tests.support.torch_engine import CONTEXT, NAN_TOKEN, ragged, random_llama, run_all, torch_engine

pytestmark = [pytest.mark.xdist_group("torch_engine"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"))


def outcomes(events: Sequence[EngineEvent]) -> dict[str, Outcome]:
    """Of each request, without what was found in the prefix cache."""
    found = {}
    for name, end in ends(events).items():
        assert isinstance(end, Finished), end
        found[name] = replace(end.outcome, usage=replace(end.outcome.usage, cached_tokens=0))
    return found


def alone(engine: BatchingEngine, requests: Sequence[GenRequest]) -> dict[str, Outcome]:
    """Each request in an engine that has nothing else to do."""
    found: dict[str, Outcome] = {}
    for request in requests:
        found |= outcomes(run_all(engine, [request]))
    return found


# -- 1: greedy, bit for bit the same tokens


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def greedy_alone(folder: Path, dtype: str) -> dict[str, Outcome]:
    engine = torch_engine(folder, dtype=dtype, rows=1, prefix_cache=False)
    assert engine.caps.batch_invariant
    return alone(engine, ragged(64, logprobs=2))


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 8},
        {"rows": 32, "prefill_tokens": 37},
        {"rows": 32, "prefill_tokens": 64, "prefix_cache": False},
        {"rows": 64, "prefill_tokens": 256, "threads": 1},
    ],
    ids=str,
)
def test_each_of_64_ragged_requests_has_the_tokens_and_logprobs_of_its_lone_run(folder, dtype, greedy_alone, options) -> None:
    engine = torch_engine(folder, dtype=dtype, **options)
    assert outcomes(run_all(engine, ragged(64, logprobs=2))) == greedy_alone


def test_recomputed_requests_have_the_tokens_and_logprobs_of_an_unbroken_run(folder, dtype, greedy_alone) -> None:
    engine, rng = torch_engine(folder, dtype=dtype, rows=32, prefix_cache=False), random.Random(5)
    requests = ragged(64, logprobs=2)
    for request in requests:
        engine.submit(request)
    events: list[EngineEvent] = []
    pauses = 0
    while engine.stats().waiting or sum(engine.stats().running.values()):
        events += engine.step()
        if rng.random() < 0.8:
            name = f"r{rng.randrange(64)}"
            pauses += name not in ends(events) and any(isinstance(event, Started) and event.id == name for event in events)
            engine.pause(name, "recompute")
            events += engine.step()
            engine.resume(name)
    assert pauses >= 10
    assert outcomes(events) == greedy_alone


def test_without_native_kernels_the_engine_does_not_promise_equal_bits_and_still_answers(folder) -> None:
    engine = torch_engine(folder, kernels="torch")
    assert not engine.caps.batch_invariant
    assert all(outcome.choices[0].finish_reason == "length" for outcome in outcomes(run_all(engine, ragged(8))).values())


# -- 2: seeded sampling

SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}


def test_a_seeded_text_is_the_same_alone_in_a_batch_after_a_pause_and_in_a_new_process(folder) -> None:
    engine = torch_engine(folder)
    request = make_request("it", [40, 41, 42, 43] * 12, max_tokens=60, ignore_eos=True, **SEEDED)
    lone = alone(engine, [request])["it"].choices[0].token_ids
    assert len(set(lone)) > 10
    assert outcomes(run_all(engine, [*ragged(31, temperature=1.0), request]))["it"].choices[0].token_ids == lone
    for mode in ("keep", "recompute"):
        engine.submit(request)
        events = [event for _ in range(25) for event in engine.step()]
        engine.pause("it", mode)  # type: ignore[arg-type]
        events += engine.step()
        engine.resume("it")
        assert outcomes(events + run_to_end(engine))["it"].choices[0].token_ids == lone
    going_on = {
        "prompt": request.prompt_ids,
        "max_tokens": 60,
        "ignore_eos": True,
        "generated": [lone[:20]],
        **SEEDED,
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.torch_engine", str(folder)],
        input=json.dumps(going_on),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert tuple(json.loads(child.stdout.splitlines()[-1])) == lone


# -- 5: a hostile request beside good ones


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that makes NaN of one token."""
    return random_llama(tmp_path_factory.mktemp("poisoned"), nan_token=True)


def test_hostile_requests_beside_15_good_ones_change_no_good_answer(poisoned: Path) -> None:
    good = ragged(15, longest=200)
    expected = alone(torch_engine(poisoned, rows=1), good)
    # A cache so small that freed blocks have their next owner at once.
    engine = torch_engine(poisoned, kv_cache_bytes=torch_engine(poisoned)._runner.block_bytes * 24)
    hostile = [
        make_request("ids", [10, 10_000], max_tokens=4),
        make_request("negative", [-1], max_tokens=4),
        make_request("nan", [10, 11], max_tokens=4, temperature=float("nan")),
        make_request("grammar", [10, 11], max_tokens=4, grammar=Grammar("json_schema", '{"$ref": "#/nowhere"}')),
        make_request("never", [10, 11], max_tokens=4, grammar=Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}')),
        make_request("stops", [10, 11], max_tokens=4, stop_token_ids=tuple(range(10)) * 1000),
        make_request("long", [10] * CONTEXT, max_tokens=1),
    ]
    for request in hostile:
        with pytest.raises(Rejected):
            engine.submit(request)
    events: list[EngineEvent] = []
    for n, request in enumerate(good):
        engine.submit(make_request(f"poison-{n}", [*request.prompt_ids[:BLOCK_TOKENS], NAN_TOKEN, *request.prompt_ids[:70]], max_tokens=9))
        engine.submit(request)
        events += engine.step()
    engine.submit(make_request("full", [10] * (CONTEXT - 1), max_tokens=1))
    events += run_to_end(engine)
    last = ends(events)
    failed = {name: end for name, end in last.items() if isinstance(end, Failed)}
    assert set(failed) == {f"poison-{n}" for n in range(15)}
    assert {end.code for end in failed.values()} == {"non_finite_logits"}
    assert outcomes([event for event in events if event.id in expected]) == expected
    assert finished(events, "full").outcome.usage.completion_tokens == 1
    assert engine.stats().kv_bytes_used == 0


# -- 7: memory


def test_prompts_of_full_context_wait_for_each_other_and_none_fails(folder: Path) -> None:
    blocks = 3 * CONTEXT // BLOCK_TOKENS
    engine = torch_engine(folder, kv_cache_bytes=torch_engine(folder)._runner.block_bytes * blocks)
    rng = random.Random(1)
    for n in range(64):
        engine.submit(make_request(f"r{n}", [rng.randrange(8, 300) for _ in range(CONTEXT - 4)], max_tokens=4, ignore_eos=True))
    events: list[EngineEvent] = []
    most = 0
    while engine.stats().waiting or sum(engine.stats().running.values()):
        events += engine.step()
        stats = engine.stats()
        assert stats.kv_bytes_used <= stats.kv_bytes_total
        most = max(most, sum(stats.running.values()))
    assert most <= 3
    assert len(outcomes(events)) == 64


def test_memory_does_not_grow_over_2000_requests(folder: Path) -> None:
    engine, process = torch_engine(folder, kv_cache_bytes=8 << 20), psutil.Process()
    rng = random.Random(1)

    def serve(count: int) -> None:
        for start in range(0, count, 50):
            for n in range(50):
                prompt = [rng.randrange(8, 300) for _ in range(rng.randint(1, 90))]
                kind = rng.choice(
                    [{}, {"n": 2, **SEEDED}, {"logprobs": 3}, {"grammar": Grammar("regex", "[a-z ]{1,20}")}, {"stop": ("the",)}]
                )
                engine.submit(make_request(f"{start}-{n}", prompt, max_tokens=rng.randint(1, 6), **kind))
            run_to_end(engine)

    serve(600)
    before = process.memory_info().rss
    serve(1400)
    assert process.memory_info().rss - before < 24 << 20, resource.getrusage(resource.RUSAGE_SELF)
    assert engine.stats().kv_bytes_used == 0


# -- 8: all kinds in one batch


def test_requests_of_all_kinds_in_one_batch_each_equal_their_lone_run(folder: Path) -> None:
    engine = torch_engine(folder, rows=48)
    schema = Grammar(
        "json_schema", '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
    )
    plain = ragged(12, longest=120)
    mixed = [
        *plain,
        *(
            replace(request, id=f"n4-{request.id}", sampling=replace(request.sampling, n=4, temperature=0.8, seed=9))
            for request in plain[:3]
        ),
        *(replace(request, id=f"beam-{request.id}", sampling=replace(request.sampling, beam=Beam(4), n=2)) for request in plain[3:6]),
        *(
            replace(request, id=f"echo-{request.id}", sampling=replace(request.sampling, prompt_logprobs=3, logprobs=3))
            for request in plain[6:9]
        ),
        *(make_request(f"json-{n}", plain[n].prompt_ids, max_tokens=60, grammar=schema) for n in range(3)),
        *(replace(request, id=f"pen-{request.id}", sampling=replace(request.sampling, repetition_penalty=1.2)) for request in plain[9:12]),
    ]
    together = outcomes(run_all(engine, mixed))
    assert together == alone(torch_engine(folder, rows=8), mixed)
    for n in range(3):
        assert isinstance(json.loads(together[f"json-{n}"].choices[0].text)["a"], bool)
