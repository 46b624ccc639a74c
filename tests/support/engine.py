"""A tiny model for the engine loop: a real byte-level tokenizer, and a runner that computes with integers."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from batching.engine import BatchingEngine
from batching.options import EngineOptions
from batching.request import ServedModel
from batching.runner import RowError, RowResult, RowWork
from batching.sampling import mix64
from promptmill.core.clock import Clock
from promptmill.core.jobs import Priority, SamplingParams
from promptmill.core.models import ModelCard
from promptmill.core.ports import EngineEvent, Failed, Finished, GenRequest, Tokens
from tests.support.clock import FakeClock

EOS, START, WHOLE_STEP_FAILS, ROW_FAILS = 0, 1, 5, 6
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


class FakeRunner:
    """Draws from a hash of all tokens of the row, the seed and the position: a pure function of the request.

    It holds the loop to the Runner's contract: slots, positions, room, rows and bytes. Prompts that
    hold WHOLE_STEP_FAILS make a step raise, those with ROW_FAILS fail their own row at the end of prefill.
    """

    batch_invariant = True

    def __init__(self, rows: int = 4, reserved: int = 2, kv_budget_bytes: int = 1_000_000, step_s: float = 0.0, clock: Clock | None = None):
        card = tiny_card()
        self.context_length = card.context_length
        self.vocab_size = card.vocab_size
        self.rows = rows
        self.kv_budget_bytes = kv_budget_bytes
        self.steps: list[list[RowWork]] = []
        self.fail_open = False
        self.fail_always = False
        self._reserved = reserved
        self._step_s = step_s
        self._clock = clock
        self._room: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}

    @property
    def open_slots(self) -> int:
        return len(self._room)

    def kv_bytes(self, tokens: int) -> int:
        return 10 * tokens

    def open(self, slot: int, tokens: int) -> None:
        if self.fail_open:
            raise MemoryError
        assert slot not in self._room, "the slot is open already"
        assert 0 <= slot < self.rows + self._reserved
        self._room[slot] = tokens
        self._tokens[slot] = []
        assert sum(map(self.kv_bytes, self._room.values())) <= self.kv_budget_bytes

    def close(self, slot: int) -> None:
        del self._room[slot], self._tokens[slot]

    def step(self, rows: Sequence[RowWork]) -> list[RowResult]:
        assert rows
        assert len({work.slot for work in rows}) == len(rows) <= self.rows + self._reserved
        if isinstance(self._clock, FakeClock):
            self._clock.advance(self._step_s)
        if self.fail_always or any(WHOLE_STEP_FAILS in work.token_ids for work in rows):
            raise RuntimeError("the forward failed")
        self.steps.append(list(rows))
        return [self._run(work) for work in rows]

    def _run(self, work: RowWork) -> RowResult:
        tokens = self._tokens[work.slot]
        assert len(tokens) == work.past, "positions must follow each other"
        tokens.extend(work.token_ids)
        assert len(tokens) < self._room[work.slot] + 1
        if work.draw is None:
            return None
        if ROW_FAILS in tokens and work.draw.position == 0:
            return RowError("not_finite", "the model gave no finite numbers for this request")
        return draw_token(tokens, work.draw.seed if not work.draw.sampling.greedy else 0, self.vocab_size)


def draw_token(tokens: Sequence[int], seed: int, vocab_size: int) -> int:
    """Any id, an end token in one draw of thirty, never one that makes the fake fail."""
    state = seed
    for token in tokens:
        state = mix64(state * 31 + token + 1)
    if state % 30 == 0:
        return EOS
    return 7 + state % (vocab_size - 7)


def make_request(
    request_id: str,
    prompt: Sequence[int] = (10, 11, 12),
    priority: Priority = Priority.STANDARD,
    *,
    max_tokens: int = 8,
    enqueued_at: float = 1_000.0,
    model: str = "tiny",
    **sampling: object,
) -> GenRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return GenRequest(request_id, model, tuple(prompt), params, priority, enqueued_at)


def make_engine(
    runner: FakeRunner | None = None,
    clock: Clock | None = None,
    *,
    idle_window_s: float = 0.0,
    prefill_tokens: int = 16,
    eos: tuple[int, ...] = (EOS,),
) -> BatchingEngine:
    """An engine over the fake, not started and not prepared."""
    options = EngineOptions(
        "instant", (), reserved_rows=2, prefill_tokens=prefill_tokens, idle_window_s=idle_window_s, clock=clock or FakeClock()
    )
    runner = runner or FakeRunner()
    return BatchingEngine(lambda: runner, {"tiny": tiny_model(eos=eos)}, options)


def run_to_end(engine: BatchingEngine, limit: int = 10_000) -> list[EngineEvent]:
    """Turn the loop by hand until nothing waits or runs."""
    events: list[EngineEvent] = []
    for _ in range(limit):
        events += engine.step_once()
        stats = engine.stats()
        if not stats.waiting and not sum(stats.running.values()):
            return events
    raise AssertionError("the engine did not come to an end")


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
    """Text and ids as a listener puts them together; the positions must follow each other."""
    text, ids = "", ()
    for event in of(events, request_id):
        if isinstance(event, Tokens):
            assert event.pos == len(ids)
            text += event.text
            ids += event.token_ids
    return text, ids
