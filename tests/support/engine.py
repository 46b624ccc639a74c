"""A tiny model for the engine loop, a real byte-level tokenizer over the fake runner, and how tests drive it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from batching.engine import BatchingEngine
from batching.options import EngineOptions
from batching.request import ServedModel
from batching.runner import Runner
from promptmill.core.clock import Clock
from promptmill.core.engine import EngineEvent, Failed, Finished, GenRequest, Tokens
from promptmill.core.jobs import Priority, SamplingParams
from promptmill.core.models import ModelCard
from tests.support.clock import FakeClock
from tests.support.fake_runner import EOS as EOS
from tests.support.fake_runner import ROW_FAILS as ROW_FAILS
from tests.support.fake_runner import START as START
from tests.support.fake_runner import WHOLE_STEP_FAILS as WHOLE_STEP_FAILS
from tests.support.fake_runner import ContractBroken as ContractBroken
from tests.support.fake_runner import FakeRunner as FakeRunner
from tests.support.fake_runner import StepLaw as StepLaw

DEADLINE_S = 30
CORPUS = "the quick brown fox jumps over the lazy dog and the cat. 日本語のテキストです 😀😃👩‍👩‍👧 héllo wörld; Привет мир\n"


@cache
def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE, a few hundred ids; 0 and 1 are special, characters are often spread over ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    return tokenizer


def tiny_card(name: str = "tiny", context_length: int = 128, eos: tuple[int, ...] = (EOS,)) -> ModelCard:
    size = tiny_tokenizer().get_vocab_size()
    return ModelCard(name, "0123456789abcdef", "test", context_length, size, eos, START, "<|start|>", "<|end|>", 0)


def tiny_model(name: str = "tiny", **card: object) -> ServedModel:
    return ServedModel(tiny_card(name, **card), tiny_tokenizer())  # type: ignore[arg-type]


def save_tiny_model(models_dir: Path, name: str = "tiny", **card: object) -> Path:
    """A prepared model's folder, without weights."""
    folder = models_dir / name
    folder.mkdir(parents=True)
    tiny_card(name, **card).save(folder)  # type: ignore[arg-type]
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def make_request(
    request_id: str,
    prompt: Sequence[int] = (10, 11, 12),
    priority: Priority = Priority.STANDARD,
    *,
    max_tokens: int = 8,
    enqueued_at: float = 1_000.0,
    model: str = "tiny",
    tenant: str = "default",
    generated: Sequence[Sequence[int]] = (),
    **sampling: object,
) -> GenRequest:
    """Greedy unless ``sampling``, fields of SamplingParams, says otherwise."""
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return GenRequest(request_id, model, tuple(prompt), params, priority, enqueued_at, tenant, tuple(map(tuple, generated)))


def make_engine(
    runner: Runner | None = None,
    clock: Clock | None = None,
    *,
    eos: tuple[int, ...] = (EOS,),
    **options: object,
) -> BatchingEngine:
    """An engine over the fake, not prepared; ``options``: fields of EngineOptions."""
    runner = runner or FakeRunner()
    defaults = {"reserved_rows": getattr(runner, "reserved", 2), "prefill_tokens": 16, "idle_window_s": 0.0, "clock": clock or FakeClock()}
    model = tiny_model(eos=eos, context_length=runner.context_length)
    return BatchingEngine(lambda: runner, {"tiny": model}, EngineOptions("instant", (), **{**defaults, **options}))  # type: ignore[arg-type]


def run_to_end(engine: BatchingEngine, limit: int = 10_000) -> list[EngineEvent]:
    """Turn the loop by hand until nothing waits or runs; what was paused by name stays so."""
    events: list[EngineEvent] = []
    for _ in range(limit):
        events += (came := engine.step())
        stats = engine.stats()
        if not stats.waiting and not sum(stats.running.values()) and not came:
            return events
    raise AssertionError("the engine did not come to an end")


@contextmanager
def serving(engine: BatchingEngine, sink: Callable[[Sequence[EngineEvent]], None]) -> Iterator[None]:
    """The engine runs on a thread of its own, is ready, and is closed in the end. Raises what ``run`` raised."""
    ready = Event()
    with ThreadPoolExecutor(1, "engine") as threads:
        end = threads.submit(engine.run, sink, ready.set)
        end.add_done_callback(lambda _: ready.set())
        try:
            assert ready.wait(DEADLINE_S), "the engine does not become ready"
            if not end.done():
                yield
        finally:
            engine.close()
            end.result(DEADLINE_S)


def of(events: Sequence[EngineEvent], request_id: str) -> list[EngineEvent]:
    return [event for event in events if event.id == request_id]


def ends(events: Sequence[EngineEvent]) -> dict[str, Finished | Failed]:
    """The one last event of each request; fails when one has two."""
    last: dict[str, Finished | Failed] = {}
    for event in events:
        assert event.id not in last, f"{event.id} went on after its end"
        if isinstance(event, Finished | Failed):
            last[event.id] = event
    return last


def finished(events: Sequence[EngineEvent], request_id: str) -> Finished:
    event = ends(events)[request_id]
    assert isinstance(event, Finished), event
    return event


def streamed(events: Sequence[EngineEvent], request_id: str) -> tuple[str, tuple[int, ...]]:
    """Text and ids of the first choice as a listener puts them together; see ``streams``."""
    return streams(events, request_id).get(0, ("", ()))


def streams(events: Sequence[EngineEvent], request_id: str, published: int = 0) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Text and ids of each choice; the positions, which count all choices, must follow each other from ``published`` on."""
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for event in of(events, request_id):
        if isinstance(event, Tokens):
            assert event.pos == published
            assert event.logprobs is None or len(event.logprobs) == len(event.token_ids)
            text, ids = found.get(event.index, ("", ()))
            found[event.index] = text + event.text, ids + event.token_ids
            published += len(event.token_ids)
    return found
