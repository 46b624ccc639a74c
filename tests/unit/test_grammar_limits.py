"""Grammars that are refused, and those that only just are not."""

import json
import random
import re
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from batching.grammar import GrammarCompiler, GrammarError
from promptmill.core.jobs import Grammar
from promptmill.core.limits import MAX_GRAMMAR_CHARS
from promptmill.core.models import DEFAULT_MODEL
from tests.support.engine import EOS, tiny_tokenizer
from tests.support.grammars import PATIENCE, VOCAB, allowed, walk


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, (EOS,))
    yield compiler
    compiler.close()


def chain(rules: int, group: str = "") -> str:
    opening, closing = "(" * len(group), "".join(")" + char for char in group)
    lines = [f'a{i}: {opening}"y" a{i + 1} | "z"{closing}' for i in range(rules)]
    return "\n".join(["start: a0", *lines, f'a{rules}: "x"'])


def references(count: int) -> str:
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}})


REFUSED = [
    ("json_schema", "{bad", "not valid JSON"),
    ("json_schema", '{"minimum": NaN}', "NaN is no JSON"),
    ("json_schema", "[" * 50_000, "nested too deeply"),
    ("json_schema", "[1]", "a schema is a JSON object"),
    ("json_schema", "false", "nothing matches"),
    ("json_schema", '{"type": "str"}', "Invalid type: str"),
    ("json_schema", '{"$ref": "#/nope"}', "Pointer '/nope' does not exist"),
    ("json_schema", '{"$ref": "https://example.com/schema"}', "not present"),
    ("json_schema", '{"$ref": "#"}', "nothing can match"),
    ("json_schema", '{"type": "object", "not": {}}', 'unsupported keywords: ["not"]'),
    ("json_schema", '{"items": {"if": {}}}', 'unsupported keywords: ["if"]'),
    ("json_schema", '{"type": "string", "format": "nope"}', "Unknown format: nope"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ("json_schema", '{"minimum": 5, "maximum": 3, "type": "integer"}', "Unsatisfiable"),
    ("json_schema", '{"enum": []}', "Unsatisfiable"),
    ("json_schema", references(1_200), "too large"),
    ("json_schema", json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (1009, 1013)]}), "multipleOf"),
    ("json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f"^(.{{{n}}})*$"} for n in (1009, 1013)]}), "several patterns"),
    ("regex", "(", "unclosed group"),
    ("regex", "a**[", "unclosed"),
    ("regex", r"\bword", "lookarounds not supported"),
    ("regex", r"[^\s\S]", "nothing can match"),
    ("choice", "[]", "empty"),
    ("choice", '["a", 1]', "a JSON list of strings"),
    ("choice", '{"a": 1}', "a JSON list of strings"),
    ("choice", "a, b", "not valid JSON"),
    ("regex", "a\ud800", "not valid Unicode"),
    ("choice", '["\\udfff"]', "not valid Unicode"),
    ("ebnf", 'start: "\udbff"', "not valid Unicode"),
    ("ebnf", "", "no start rule"),
    ("ebnf", 'foo: "a"', "no start rule"),
    ("ebnf", 'start: "a" b', 'unknown name: "b"'),
    ("ebnf", "start: (", "Expected token"),
    ("ebnf", 'start: start "a"', "nothing can match"),
    ("ebnf", "start: A\nA: /(.{1009})*/ & /(.{1013})*/", "& is not supported"),
    ("ebnf", 'start: %json {"multipleOf": 1009}', "%json is not supported"),
    ("ebnf", '%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance is not supported"),
    ("ebnf", 'start: "a" <|start|>', "< is not supported"),
    ("ebnf", chain(2_000), "too large"),
    ("ebnf", chain(250, "?" * 25), "too large"),
    ("ebnf", "root ::= foo", "not valid GBNF"),
    ("ebnf", 'root ::= "a\\', "not valid GBNF"),
    ("regex", "a" * (MAX_GRAMMAR_CHARS + 1), "at most"),
    ("yaml", "a: b", "unknown kind"),
]


@pytest.mark.parametrize(("kind", "text", "message"), REFUSED, ids=[f"{kind}-{index}" for index, (kind, _, _) in enumerate(REFUSED)])
def test_what_cannot_be_used_is_refused_with_the_reason(compiler, kind, text, message) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.check(Grammar(kind, text))
    assert message in caught.value.message
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("kind", "text"),
    [("ebnf", chain(320)), ("ebnf", chain(30, "?" * 24)), ("json_schema", references(150)), ("regex", "(a{1000}){1000}")],
    ids=["rules", "groups", "references", "repetition"],
)
def test_what_is_just_small_enough_compiles_on_a_thread(compiler, kind, text) -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            compiler.check(Grammar(kind, text))
        except GrammarError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive() and not errors


def test_comments_and_literals_are_no_rules_of_an_ebnf_grammar(compiler) -> None:
    text = 'start: "a&b" /[~<:]/ // & and ~ and %json\n'
    for ids in (walk(compiler.matcher(Grammar("ebnf", text)), random.Random(seed)) for seed in range(5)):
        assert re.fullmatch("a&b[~<:]", tiny_tokenizer().decode(ids))


@pytest.mark.parametrize(
    "rules",
    [
        'start: A\nA: /\n"/ | /(a{1009}|b)+/ & /(a{1013}|b)+/ "x"',  # a line end inside /…/ hides what follows from the filter
        'start: "a\n" & /b/ "c"',
        "start: /a",
        'start: "a',
    ],
)
def test_a_literal_that_does_not_end_in_its_line_is_refused(compiler, rules: str) -> None:
    with pytest.raises(GrammarError, match="does not end in its line"):
        compiler.check(Grammar("ebnf", rules))


@pytest.mark.parametrize("hidden", ["A & B", "~A", '%json {"type": "string"}', "%regex {}", "%lark { }", "<s>"])
@pytest.mark.parametrize(
    "before", ['/\n"/ | ', "/\n#/ | ", "/\n\\//./ | ", '"/" | ', '"\\"/" | ', "/#/ | ", '/"/ | ', '"//" | ', "/x\\/#/ | ", "// /\n| "]
)
@pytest.mark.parametrize("after", ["", ' "x"', " /x/", " // x", ' # "'])
def test_no_literal_or_comment_hides_an_operator(compiler, hidden: str, before: str, after: str) -> None:
    rules = f'start: A\nB: "b"\nA: {before}{hidden}{after}'
    with pytest.raises(GrammarError, match=r"is not supported in a grammar|does not end in its line"):
        compiler.check(Grammar("ebnf", rules))


def test_a_token_that_does_not_fit_is_named_in_the_reason(compiler) -> None:
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        compiler.matcher(Grammar("regex", "ab"), tiny_tokenizer().encode("b").ids)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(
            "json_schema",
            json.dumps({"anyOf": [{"type": "object", "properties": {f"k{n}": {}}, "required": [f"k{n}"]} for n in range(150)]}),
        ),
        Grammar("json_schema", json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(400)}})),
        Grammar("ebnf", "start: " + " | ".join(f'"w{n}"' for n in range(900))),
    ],
    ids=["alternatives", "properties", "words"],
)
def test_large_grammars_go_on_behind_their_first_token(compiler, grammar: Grammar) -> None:
    compiler.check(grammar)
    assert walk(compiler.matcher(grammar), random.Random(3))


@pytest.mark.model
def test_a_grammar_whose_masks_would_keep_others_waiting_is_too_complex() -> None:
    folder = Path(__file__).parents[2] / "var" / "models" / DEFAULT_MODEL
    real = GrammarCompiler(Tokenizer.from_file(str(folder / "tokenizer.json")), 49_152, (2,))
    alternatives = " | ".join(f"/[a-z]{{{n + 1},}}/ x" for n in range(299))
    with pytest.raises(GrammarError, match="too complex"):
        real.check(Grammar("ebnf", f'start: (x|y)*\nx: {alternatives} | "q"\ny: "."'))
    real.close()


@pytest.mark.model
def test_an_ordinary_schema_of_many_fields_is_not_too_complex_for_the_real_vocabulary() -> None:
    path = Path(__file__).parents[2] / "var" / "models" / DEFAULT_MODEL / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    compiler = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), (2,))
    item = {"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}, "price": {"type": "number"}}, "required": ["id"]}
    kinds = [
        {"type": "string", "maxLength": 100},
        {"enum": [f"e{n}" for n in range(40)]},
        {"type": "array", "items": item},
        {"type": "integer"},
    ]
    fields = {f"field_{n}": kinds[n % len(kinds)] for n in range(100)}
    for required in ([], list(fields)):
        schema = {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
        grammar = Grammar("json_schema", json.dumps(schema))
        compiler.check(grammar)
        for seed in range(3):
            rng, matcher = random.Random(seed), compiler.matcher(grammar)
            for _ in range(PATIENCE):
                matcher.advance(rng.choice(allowed(matcher.mask(), tokenizer.get_vocab_size())))
                if matcher.stopped:
                    break
    compiler.close()
