"""From a Grammar to llguidance's language, with bounds on what may be asked of it.

A grammar is a stranger's program. Two things in llguidance 1.9 have no limit of their own and are
refused here: it recurses once per level (a chain of some 3 000 references overflows the stack), and the
intersection of two automata is built before any fuel is counted (minutes for ``multipleOf`` 1009 and 1013).
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from promptmill.core.jobs import Grammar
from promptmill.core.limits import MAX_GRAMMAR_CHARS

MAX_LEVELS = 1_000  # of a schema whose references are followed; rules and groups of an EBNF grammar
MAX_MULTIPLE = 1_000  # least common multiple of a schema's ``multipleOf``

# As json.dumps writes it and as most models have seen it. Free whitespace lets a model that has lost
# its way write blanks until max_tokens.
JSON_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Forced text is not tokenised ahead (its length knows no bound), the model chooses the tokens for it
_HEAD = '%llguidance {"no_forcing": true}\n'

_LARK_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/')
_LARK_OPTIONS = re.compile(r"%llguidance\s*\{\s*\}")
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class GrammarError(Exception):
    """A grammar that cannot be used, or a token that does not fit it. ``message`` is for the caller."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


def to_lark(grammar: Grammar) -> str:
    """The grammar in llguidance's dialect of Lark. Raises GrammarError for what is refused here; the rest
    of what is wrong with it shows when it is compiled."""
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"the grammar has {len(grammar.text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed")
    _bound_unicode(grammar.text)
    match grammar.kind:
        case "json_object":
            return _of_schema({"type": "object"})
        case "json_schema":
            return _of_schema(_schema(grammar.text))
        case "regex":
            return _HEAD + _of_regex(grammar.text)
        case "choice":
            return _HEAD + "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in _choices(grammar.text))
        case "ebnf":
            return _HEAD + _rules(grammar.text)
    raise GrammarError(f"unknown kind of grammar: {grammar.kind}")


def _of_regex(text: str) -> str:
    quoted: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    return quoted


def _of_schema(schema: dict[str, Any]) -> str:
    return f"{_HEAD}start: %json {json.dumps({**schema, 'x-guidance': JSON_FORMAT})}"


def _schema(text: str) -> dict[str, Any]:
    schema = _parse(text, "the schema")
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("the schema is false, nothing matches it")
    if not isinstance(schema, dict):
        raise GrammarError("a schema is a JSON object")
    _bound(schema)
    return schema


def _choices(text: str) -> list[str]:
    choices = _parse(text, "the list of choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choices are a JSON list of strings")
    if not choices:
        raise GrammarError("the list of choices is empty")
    _bound_unicode("".join(choices))
    return choices


def _parse(text: str, what: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise GrammarError(f"{what} is not valid JSON: {error}") from None
    except RecursionError:
        raise GrammarError(f"{what} is nested too deeply") from None


def _bound(schema: dict[str, Any]) -> None:
    references: set[str] = set()
    levels, multiple = 0, 1
    for node, level in _objects(schema):
        levels = max(levels, level)
        reference, factor = node.get("$ref"), node.get("multipleOf")
        if isinstance(reference, str):
            references.add(reference)
        if isinstance(factor, int | float) and math.isfinite(factor) and factor:
            multiple = math.lcm(multiple, int("".join(map(str, Decimal(str(factor)).as_tuple().digits))))
        both = isinstance(reference, str) and isinstance(node.get("pattern"), str)
        if both or sum(isinstance(inner.get("pattern"), str) for inner, _ in _objects(node.get("allOf", []))) > 1:
            raise GrammarError("several patterns on one string (allOf, or $ref beside pattern) are not supported")
    if levels * (1 + len(references)) > MAX_LEVELS:
        raise GrammarError("the schema is too large: too many levels and references")
    if multiple > MAX_MULTIPLE:
        raise GrammarError(f"multipleOf: the least common multiple of all must be at most {MAX_MULTIPLE}")


def _objects(root: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Every object in a JSON value, with its depth."""
    todo = [(root, 1)]
    while todo:
        node, level = todo.pop()
        if isinstance(node, dict):
            yield node, level
            todo += [(value, level + 1) for value in node.values()]
        elif isinstance(node, list):
            todo += [(value, level + 1) for value in node]


def _rules(text: str) -> str:
    _bound_rules(text.count("::=") + text.count("("))
    if _GBNF_RULE.search(text):
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # GbnfToLarkError, bare Exceptions, an IndexError at a last backslash
            raise GrammarError(f"not valid GBNF: {error}") from None
    text = _LARK_OPTIONS.sub("", text)
    bare = _LARK_LITERALS.sub("", text)
    if '"' in bare or "/" in bare:  # llguidance may see its end elsewhere, and what hides behind it
        raise GrammarError("a string or regular expression does not end in its line")
    for word in ("%json", "%llguidance", "%lark", "%regex", "&", "~", "<"):
        if word in bare:
            raise GrammarError(f"{word} is not supported in a grammar")
    _bound_rules(sum(map(bare.count, ":([")))
    return text


def _bound_unicode(text: str) -> None:
    """JSON can write half a character (``\\ud800``), which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError("the grammar is not valid Unicode: it has half of a surrogate pair") from None


def _bound_rules(count: int) -> None:
    if count > MAX_LEVELS:
        raise GrammarError(f"the grammar is too large: more than {MAX_LEVELS} rules and groups")
