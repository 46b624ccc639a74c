"""From a request's text to token ids: the tokenizer of a served model, without torch or transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from api.chat_template import ChatTemplate
from api.token_texts import TokenTexts
from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import BadRequest, ConfigError, ContextLengthExceeded, Unsupported
from promptmill.core.jobs import Grammar
from promptmill.core.models import ModelCard

GrammarCheck = Callable[[Grammar], str | None]  # why an engine cannot hold the output to it, or None
MakeGrammarCheck = Callable[[Tokenizer, ModelCard], GrammarCheck]
PROBLEM_LENGTH = 300


class ServedModel:
    """A model as the API knows it: its card, tokenizer and chat template. Thread-safe."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate | None, grammars: GrammarCheck | None = None):
        self.card = card
        self.texts = TokenTexts(tokenizer)
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._template = template
        self._special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self._forged: dict[str, list[int]] = {}  # by control token
        self._newline = self._encode("\n")
        self._longest = max((len(tokenizer.id_to_token(i) or "") for i in range(tokenizer.get_vocab_size())), default=1)

    @classmethod
    def load(cls, folder: Path, clock: Clock = SYSTEM_CLOCK, make_grammar_check: MakeGrammarCheck | None = None) -> "ServedModel":
        """``make_grammar_check``: None = grammars are refused. Raises ConfigError when the folder holds no prepared model."""
        card = ModelCard.load(folder)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"cannot read the tokenizer of {folder} ({error}); pull the model again") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        grammars = make_grammar_check(tokenizer, card) if make_grammar_check else None
        source = folder / "chat_template.jinja"
        if not source.is_file():
            return cls(card, tokenizer, None, grammars)
        tokens = {"bos_token": card.bos_token, "eos_token": card.eos_token}
        added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
        variables = {name: token for name, token in tokens.items() if token is not None}
        template = ChatTemplate(source.read_text(encoding="utf-8"), variables=variables, added_tokens=added, clock=clock)
        return cls(card, tokenizer, template, grammars)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Ids of a raw prompt; special tokens in it count as such, as everywhere with raw prompts.
        An empty prompt is the one token that begins a text, else one that ends it."""
        self._check_size(len(text), param="prompt")
        ids = self._tokenizer.encode(text).ids if text else []
        if ids:
            return tuple(ids)
        if self.card.bos_token_id is not None:
            return (self.card.bos_token_id,)
        if self.card.eos_token_ids:
            return (self.card.eos_token_ids[0],)
        raise BadRequest("the prompt has no tokens, and this model has none that begins a text", param="prompt")

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Ids of (role, content) messages followed by the start of the answer."""
        if self._template is None:
            raise BadRequest(f"the model {self.card.name} has no chat template; send a prompt", param="messages")
        self._check_size(max(sum(len(content) for _, content in messages), len(messages) * self._longest), param="messages")
        pieces = self._template.render(messages)
        ids = self._encode(pieces[0].text)
        for piece in pieces[1:]:
            if len(ids) > self.card.context_length:
                raise too_long(self.card.context_length, f"at least {len(ids)}", "messages")
            if piece.text:
                ids += self._forge(piece.text) if piece.plain else self._encode_inside(piece.text)
        if not ids:
            raise BadRequest("the model's chat template renders these messages to nothing", param="messages")
        return tuple(ids)

    def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Raises BadRequest for one that does not compile, Unsupported where there are none."""
        if self._grammars is None:
            raise Unsupported("structured output is not supported by this server", param=param)
        problem = self._grammars(grammar)
        if problem is not None:
            raise BadRequest(f"the output cannot be held to this: {problem[:PROBLEM_LENGTH]}", param=param)

    def _check_size(self, characters: int, *, param: str) -> None:
        """Refuse before any work what can never fit: no token stands for more than ``longest``
        characters. A chat has at least one token per message."""
        limit = self.card.context_length
        least = -(-characters // max(1, self._longest))
        if least > limit:
            raise too_long(limit, f"at least {least}", param)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of a text that does not begin the chat: after a newline, which is then taken away, so
        that tokenizers of the SentencePiece kind put no space before it."""
        ids = self._encode("\n" + text)
        return ids[len(self._newline) :] if ids[: len(self._newline)] == self._newline else self._encode(text)

    def _forge(self, control: str) -> list[int]:
        """Ids of a control token's letters as text: in two parts, so that it is not recognised."""
        if control not in self._forged:
            cuts = ((control[:at], control[at:]) for at in range(1, len(control)))
            clean = ((a, b) for a, b in cuts if not any(special in part for special in self._special for part in (a, b)))
            token = self._tokenizer.token_to_id(control)
            spelled = (self._encode_inside(a) + self._encode_inside(b) for a, b in clean)
            ids = next((ids for ids in spelled if token not in ids), None)
            if ids is None:
                raise BadRequest(f"a message holds the control token {control!r}, which cannot be told as text", param="messages")
            self._forged[control] = ids
        return self._forged[control]


def too_long(limit: int, actual: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the context of this model is {limit} tokens; the prompt has {actual}, and at least one must be left for the answer", param=param
    )
