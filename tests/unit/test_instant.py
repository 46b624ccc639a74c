import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from batching.engine import BatchingEngine
from batching.engines import create_engine
from batching.engines.instant import InstantRunner, word_ids
from batching.options import EngineOptions
from batching.request import ServedModel
from batching.runner import Draw, RowError, RowOutput, RowWork
from promptmill.core.engine import GenRequest, Paused
from promptmill.core.errors import ConfigError, Rejected
from promptmill.core.jobs import Beam, Grammar, Priority, SamplingParams
from tests.support.engine import finished, make_request, run_to_end, save_tiny_model, tiny_card, tiny_model


def make_instant(tmp_path: Path, *names: str, **options: object) -> BatchingEngine:
    folders = tuple(save_tiny_model(tmp_path, name, context_length=512) for name in names or ("tiny",))
    engine = create_engine(EngineOptions("instant", folders, idle_window_s=0.0, **options))  # type: ignore[arg-type]
    engine.prepare()
    return engine


def run(engine: BatchingEngine, *requests: GenRequest) -> list[tuple[int, ...]]:
    for request in requests:
        engine.submit(request)
    events = run_to_end(engine)
    return [finished(events, request.id).outcome.choices[0].token_ids for request in requests]


def test_it_gives_exactly_max_tokens_of_readable_text(tmp_path: Path) -> None:
    engine = make_instant(tmp_path)
    engine.submit(make_request("a", max_tokens=200))
    end = finished(run_to_end(engine), "a")
    [choice] = end.outcome.choices
    assert (len(choice.token_ids), end.reason) == (200, "length")
    assert choice.text.isascii()
    assert all(word.isalpha() for word in choice.text.split())
    assert len(choice.text.split()) == 200


def test_a_stop_string_ends_it(tmp_path: Path) -> None:
    engine = make_instant(tmp_path)
    engine.submit(make_request("a", max_tokens=200, stop=(" the",)))
    end = finished(run_to_end(engine), "a")
    assert end.reason == "stop"
    assert " the" not in end.outcome.choices[0].text


def test_its_output_depends_on_prompt_seed_and_position_alone(tmp_path: Path) -> None:
    engine = make_instant(tmp_path, prefill_tokens=7)
    prompt = tuple(range(20, 60))
    sampled = make_request("a", prompt, temperature=1.0, seed=5)
    [alone] = run(engine, sampled)
    crowd = [make_request(f"n{n}", (30 + n,) * 20, Priority.INTERACTIVE, max_tokens=30) for n in range(8)]
    assert run(engine, *crowd, replace(sampled, id="b"))[-1] == alone
    assert run(make_instant(tmp_path / "other", prefill_tokens=64), replace(sampled, id="c")) == [alone]
    assert run(engine, make_request("d", prompt, temperature=1.0, seed=6)) != [alone]
    assert run(engine, make_request("e", (*prompt[:-1], 99), temperature=1.0, seed=5)) != [alone]


def test_greedy_and_unseeded_requests_draw_as_seed_zero(tmp_path: Path) -> None:
    engine = make_instant(tmp_path)
    greedy, unseeded, zero = run(
        engine, make_request("a", seed=9), make_request("b", temperature=1.0, seed=None), make_request("c", temperature=1.0, seed=0)
    )
    assert greedy == unseeded == zero


def test_choices_differ_unless_greedy_and_each_is_the_same_beside_fewer(tmp_path: Path) -> None:
    engine = make_instant(tmp_path)
    for name, fields in (("a", {"n": 4}), ("b", {"n": 2}), ("g", {"n": 3, "temperature": 0.0})):
        engine.submit(make_request(name, (20,) * 100, **{"temperature": 1.0, "seed": 3, **fields}))
    events = run_to_end(engine)
    four, two, greedy = ([choice.token_ids for choice in finished(events, name).outcome.choices] for name in "abg")
    assert len(set(four)) == 4
    assert two == four[:2]
    assert len(set(greedy)) == 1


def test_a_pause_that_keeps_or_loses_the_cache_changes_nothing(tmp_path: Path) -> None:
    engine = make_instant(tmp_path)
    [alone] = run(engine, make_request("a", (20,) * 100, temperature=1.0, seed=3, max_tokens=100))
    for mode in ("keep", "recompute"):
        engine.submit(make_request(mode, (20,) * 100, temperature=1.0, seed=3, max_tokens=100))
        events = [event for _ in range(20) for event in engine.step()]
        engine.pause(mode, mode)
        events += engine.step()
        assert Paused(mode, mode == "keep", asked=True) in events
        engine.submit(make_request("other", (40,) * 300, max_tokens=50))
        events += run_to_end(engine)
        engine.resume(mode)
        events += run_to_end(engine)
        assert finished(events, mode).outcome.choices[0].token_ids == alone


def test_a_run_that_goes_on_from_its_tokens_gives_the_same_rest(tmp_path: Path) -> None:
    engine = make_instant(tmp_path)
    request = make_request("a", (20,) * 100, temperature=1.0, seed=3, max_tokens=40)
    [alone] = run(engine, request)
    assert run(make_instant(tmp_path / "other"), replace(request, generated=(alone[:20],))) == [alone]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("logprobs", {"logprobs": 0}),
        ("prompt_logprobs", {"prompt_logprobs": 0}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("presence_penalty", {"presence_penalty": 1.0}),
        ("frequency_penalty", {"frequency_penalty": 1.0}),
        ("logit_bias", {"logit_bias": ((20, 1.0),)}),
        ("min_p", {"min_p": 0.1}),
        ("structured_outputs", {"grammar": Grammar("regex", "a+")}),
        ("use_beam_search", {"beam": Beam(2)}),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path, param: str, fields: dict[str, object]) -> None:
    engine = make_instant(tmp_path)
    with pytest.raises(Rejected) as caught:
        engine.submit(make_request("a", **fields))
    assert (caught.value.param, caught.value.code) == (param, "not_supported_by_engine")


# -- the cache


@pytest.fixture
def runner() -> InstantRunner:
    return InstantRunner({"tiny": tiny_model()}, EngineOptions("instant", (), rows=4))


def step(runner: InstantRunner, table: Sequence[int], past: int, ids: Sequence[int], position: int = 0) -> list[int]:
    """What eight choices draw: there are few words, two texts may well have one in common."""
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    draws = tuple(Draw(sampling, 3, position, choice) for choice in range(8))
    [result] = runner.step([RowWork(table, past, ids, draws, model="tiny")])
    assert isinstance(result, RowOutput)
    return [drawn.token for drawn in result.drawn]


LONG = tuple(20 + n % 50 for n in range(100))  # one whole block, and a part of another


def test_a_row_reads_its_past_through_its_table(runner: InstantRunner) -> None:
    alone = step(runner, (0, 1), 0, LONG)
    runner.step([RowWork((5, 3), 0, LONG[:37], model="tiny")])
    assert step(runner, (5, 3), 37, LONG[37:]) == alone
    second = step(runner, (5, 3), 100, alone[:1], 1)
    assert step(runner, (6, 7), 0, (*LONG, alone[0]), 1) == second
    runner.copy(1, 2)
    assert step(runner, (0, 2), 100, alone[:1], 1) == second


def test_a_wrong_block_gives_a_wrong_text(runner: InstantRunner) -> None:
    right = step(runner, (0, 1), 0, LONG)
    step(runner, (2, 3), 0, (99, *LONG[1:]))
    assert step(runner, (2, 1), 64, LONG[64:]) != right
    assert step(runner, (0, 1), 64, LONG[64:]) == right
    runner.wipe([0])
    assert step(runner, (0, 1), 64, LONG[64:]) != right


def test_a_banned_word_is_not_drawn(runner: InstantRunner) -> None:
    words = word_ids(tiny_model())

    def draw(*banned: int) -> RowOutput | RowError:
        [result] = runner.step([RowWork((0,), 0, (20,), (Draw(SamplingParams(max_tokens=9), 3, 0, banned=banned),), model="tiny")])
        return result

    banned: list[int] = []
    for _ in words:
        result = draw(*banned)
        assert isinstance(result, RowOutput)
        banned.append(result.drawn[0].token)
    assert sorted(banned) == sorted(words)
    assert isinstance(draw(*words), RowError)


def test_the_cache_is_that_of_all_rows_twice_or_less_by_the_budget() -> None:
    def blocks(**options: object) -> int:
        runner = InstantRunner({"tiny": tiny_model()}, EngineOptions("instant", (), **options))  # type: ignore[arg-type]
        assert runner.block_bytes == 512
        return runner.blocks

    assert blocks() == 2 * 36 * 2
    assert blocks(rows=4, reserved_rows=1) == 2 * 5 * 2
    assert blocks(kv_cache_bytes=10 * 512 + 511) == 10
    assert blocks(kv_cache_bytes=10**12) == blocks()


# -- models


def test_several_models_are_served_each_with_its_own_words() -> None:
    small = ServedModel(replace(tiny_card("small"), vocab_size=300), tiny_model().tokenizer)
    models = {"tiny": tiny_model(), "small": small}
    options = EngineOptions("instant", ())
    engine = BatchingEngine(lambda: InstantRunner(models, options), models, options)
    engine.prepare()
    tiny, few = run(engine, make_request("a", max_tokens=100), make_request("b", model="small", max_tokens=100))
    assert set(few) <= set(word_ids(small))
    assert set(tiny) - set(word_ids(small))
    with pytest.raises(Rejected):
        engine.submit(make_request("c", model="third"))


def test_words_are_never_special_or_end_tokens_nor_outside_the_model() -> None:
    words = word_ids(tiny_model())
    assert not {0, 1} & set(words)
    assert max(word_ids(ServedModel(replace(tiny_card(), vocab_size=300), tiny_model().tokenizer))) < 300


def test_a_vocabulary_without_english_words_gives_its_ordinary_ids() -> None:
    tokenizer = Tokenizer(BPE(vocab={"<end>": 0, "日": 1, "本": 2}, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    card = replace(tiny_card(), vocab_size=3)
    assert word_ids(ServedModel(card, tokenizer)) == (1, 2)
    with pytest.raises(ConfigError, match="no ordinary tokens"):
        word_ids(ServedModel(replace(card, eos_token_ids=(0, 1, 2)), tokenizer))


def test_it_has_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    assert make_instant(tmp_path / "a").stats().rows == 32
    assert make_instant(tmp_path / "b", rows=5).stats().rows == 5
    assert make_instant(tmp_path / "c").caps.batch_invariant


def test_every_row_can_have_the_whole_context(tmp_path: Path) -> None:
    engine = make_instant(tmp_path, rows=3, reserved_rows=1)
    for n in range(4):
        engine.submit(make_request(f"r{n}", (10,) * 500, Priority.INTERACTIVE, max_tokens=12))
    engine.step()
    assert sum(engine.stats().running.values()) == 4


def test_a_missing_or_damaged_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model to serve"):
        create_engine(EngineOptions("instant", ()))
    with pytest.raises(ConfigError, match="no model at"):
        create_engine(EngineOptions("instant", (tmp_path / "none",)))
    folder = save_tiny_model(tmp_path)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        create_engine(EngineOptions("instant", (folder,)))


def test_the_instant_engine_loads_no_torch(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    code = (
        "import sys; from pathlib import Path; from batching.engines import create_engine; from batching.options import EngineOptions\n"
        f"create_engine(EngineOptions('instant', (Path({str(folder)!r}),))).prepare()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
