"""Renders chat templates as transformers does, without loading it.

The sandbox is set up like ``transformers.utils.chat_template_utils`` (trim_blocks, lstrip_blocks,
loop controls, raise_exception, tojson, strftime_now); tests compare the resulting ids.

Nobody may forge a special token from inside a message. Control tokens in the client's texts are
wrapped in two private-use characters before rendering; the encoder then takes what is wrapped as
plain text. A text without control tokens renders to the very string that transformers renders.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from promptmill.core.clock import SYSTEM_CLOCK, Clock
from promptmill.core.errors import BadRequest

OPEN, CLOSE = "\ue0f0", "\ue0f1"  # private use: no meaning of their own, dropped from the client's texts
MAX_RENDERED = 64 * 1024 * 1024  # characters; a template that repeats its input must not fill the memory


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the rendered chat; ``plain`` = a control token that the client wrote, only text."""

    text: str
    plain: bool


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it only has to parse."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class ChatTemplate:
    """``variables``: what the template sees beside the messages, such as ``bos_token``.
    ``added_tokens``: content -> whether it is special."""

    def __init__(self, source: str, *, variables: dict[str, str], added_tokens: dict[str, bool], clock: Clock = SYSTEM_CLOCK):
        self._template = _environment(clock).from_string(source)
        self._variables = variables
        control = control_tokens(source, added_tokens)
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")
        self._marks = re.compile(f"{OPEN}({self._control.pattern}){CLOSE}|[{OPEN}{CLOSE}]")

    def render(self, messages: Sequence[tuple[str, str]]) -> list[Piece]:
        """(role, content) messages and the generation prompt, in pieces. Raises BadRequest with the
        template's own words when it refuses the messages."""
        chat = [{"role": role, "content": self._mark(content)} for role, content in messages]
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(messages=chat, tools=None, documents=None, add_generation_prompt=True, **self._variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED:
                    raise BadRequest("the rendered chat is too large", param="messages")
        except _Refused as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error.message}", param="messages") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
            raise BadRequest("the model's chat template cannot render these messages", param="messages") from None
        return list(self._split("".join(parts)))

    def _mark(self, text: str) -> str:
        return self._control.sub(f"{OPEN}\\g<0>{CLOSE}", text.replace(OPEN, "").replace(CLOSE, ""))

    def _split(self, rendered: str) -> Iterable[Piece]:
        """Marks that the template tore apart are dropped, but still part the text around them."""
        at = 0
        for match in self._marks.finditer(rendered):
            yield Piece(rendered[at : match.start()], plain=False)
            if match[1] is not None:
                yield Piece(match[1], plain=True)
            at = match.end()
        yield Piece(rendered[at:], plain=False)


def control_tokens(source: str, added_tokens: dict[str, bool]) -> list[str]:
    """Tokens that only the template may write: the special ones, and those its text holds.
    White space is text everywhere, even where a tokenizer lists it as an added token."""
    return [content for content, special in added_tokens.items() if special or (content in source and not content.isspace())]


class _Refused(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _refuse(message: object) -> None:
    raise _Refused(str(message)[:500])


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Not Jinja's own filter: that one escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda text: datetime.fromtimestamp(clock.time()).strftime(text)
    return environment
