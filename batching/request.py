"""One request at the engine: the model that serves it, the checks at its door, the state of its row."""

import math
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from batching.sampling import seed_of
from batching.text import RowText
from promptmill.core.errors import Rejected
from promptmill.core.jobs import Choice, FinishReason, Outcome, Usage
from promptmill.core.models import ModelCard
from promptmill.core.ports import GenRequest

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the loop needs of a model: the card and the tokenizer; weights are the runner's."""

    card: ModelCard
    tokenizer: Tokenizer


def check_request(request: GenRequest, card: ModelCard) -> None:
    """Raises Rejected for what no step could run."""
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        raise Rejected("the prompt is empty", param="prompt")
    if not all(0 <= token < card.vocab_size for token in prompt):
        raise Rejected(f"the prompt holds token ids outside 0..{card.vocab_size - 1}", param="prompt")
    if sampling.max_tokens < 1:
        raise Rejected("max_tokens must be at least 1", param="max_tokens")
    if len(prompt) + sampling.max_tokens > card.context_length:
        message = f"{len(prompt)} prompt tokens and {sampling.max_tokens} new ones exceed the context of {card.context_length}"
        raise Rejected(message, param="max_tokens", code="context_length_exceeded")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise Rejected("temperature must be a finite number >= 0", param="temperature")
    if not 0 < sampling.top_p <= 1:
        raise Rejected("top_p must be in (0, 1]", param="top_p")
    if sampling.top_k < 0:
        raise Rejected("top_k must be >= 0", param="top_k")
    if "" in sampling.stop:
        raise Rejected("a stop string is empty", param="stop")


@dataclass(slots=True, eq=False)
class Row:
    """All the state of one request. The scheduler owns slot, past and output; the loop text and times."""

    request: GenRequest
    served: ServedModel
    seed: int = field(init=False)
    text: RowText = field(init=False)
    output: list[int] = field(default_factory=list)
    slot: int = NO_SLOT  # set at admission
    past: int = 0  # tokens of the row in the KV cache
    admitted: int = 0  # number of the admission, orders rows by age
    admitted_at: float | None = None
    token_at: float | None = None  # the last token's time
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.seed = seed_of(self.request.id) if sampling.seed is None else sampling.seed
        self.text = RowText(self.served.tokenizer, self.request.prompt_ids, sampling.stop)

    @property
    def room(self) -> int:
        """Tokens that the row may grow to."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    @property
    def prefilling(self) -> bool:
        return self.past < len(self.request.prompt_ids)

    def show(self, token: int) -> tuple[str, FinishReason | None]:
        """What the token just drawn lets be shown, and whether it ends the row. An end token has no text."""
        if token in self.served.card.eos_token_ids:
            return self.text.finish(), "stop"
        text = self.text.push(token)
        if not self.text.stopped and len(self.output) < self.request.sampling.max_tokens:
            return text, None
        text += self.text.finish()
        return text, "stop" if self.text.stopped else "length"

    def outcome(self, reason: FinishReason) -> Outcome:
        """What the row has produced; the text is exactly what its events have shown."""
        choice = Choice(0, self.text.shown, tuple(self.output), reason)
        return Outcome((choice,), Usage(len(self.request.prompt_ids), len(self.output)))
