import json
import random
import re
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from batching.grammar import GrammarCompiler, GrammarError, Matcher
from batching.grammar_source import MAX_CHARS
from batching.runner import Words
from promptmill.core.jobs import Grammar
from promptmill.core.models import DEFAULT_MODEL
from tests.support.engine import EOS, START, tiny_tokenizer

VOCAB = 410  # more than the tokenizer knows, as models have it
PATIENCE = 60  # tokens until a walk looks for the end
CLOSERS = ('"', "}", "]", "0", "e", ": ", ":", ", ", ",", " ", "a")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "日本", 3, None]}, "minItems": 1, "maxItems": 3},
        "boss": {"$ref": "#/$defs/boss"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"boss": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"id": {"type": "string", "format": "date"}}}]}},
}
EXPRESSION = "start: term ((" + '"+"|"-"' + ') term)*\nterm: /[0-9]{1,3}/ | "(" start ")"\n'
GBNF = 'root ::= greeting ", " name "!"\ngreeting ::= "hello" | "привет"\nname ::= [a-z]{1,8}\n'


def is_json_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_expression(text: str) -> bool:
    if not re.fullmatch(r"[0-9+\-()]+", text):
        return False
    return isinstance(eval(re.sub(r"\d+", "1", text)), int)


def matches(expression: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(expression, text, re.DOTALL) is not None


CHOICES = ["yes", "no", "日本", 'a "quoted" \\ one', "two\nlines", "😀/", ""]
KINDS: list[tuple[Grammar, Callable[[str], bool]]] = [
    (Grammar("json_object"), is_json_object),
    (Grammar("json_schema", json.dumps(PERSON)), is_person),
    (Grammar("json_schema", "true"), lambda text: json.loads(text) is not ...),
    (Grammar("regex", r"(the|quick|日本)[0-9]{2,4}(/\n\"😀)?"), matches(r"(the|quick|日本)[0-9]{2,4}(/\n\"😀)?")),
    (Grammar("regex", r".{0,10}"), matches(r"[^\n]{0,10}")),
    (Grammar("choice", json.dumps(CHOICES)), CHOICES.__contains__),
    (Grammar("ebnf", EXPRESSION), is_expression),
    (Grammar("ebnf", "%llguidance {}\n" + EXPRESSION), is_expression),
    (Grammar("ebnf", GBNF), matches(r"(hello|привет), [a-z]{1,8}!")),
]
IDS = [f"{grammar.kind}-{index}" for index, (grammar, _) in enumerate(KINDS)]
kinds = pytest.mark.parametrize(("grammar", "fits"), KINDS, ids=IDS)


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, (EOS,))
    yield compiler
    compiler.close()


def allowed(words: Words, vocab: int = VOCAB) -> list[int]:
    return np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab])[0].tolist()


def step(ids: list[int], tokens: int, rng: random.Random, tokenizer: Tokenizer, eos: int = EOS) -> int:
    """Any of ``ids``; after a while one that leads to the end."""
    if tokens < PATIENCE:
        return rng.choice(ids)
    if eos in ids:
        return eos
    texts = {tokenizer.decode([token]): token for token in ids}
    return next((texts[closer] for closer in CLOSERS if closer in texts), rng.choice(ids))


def walk(matcher: Matcher, rng: random.Random, tokens: int = 0) -> list[int]:
    """Ids of a random way through the grammar to its end."""
    ids: list[int] = []
    while tokens + len(ids) < 10 * PATIENCE:
        token = step(allowed(matcher.mask()), tokens + len(ids), rng, tiny_tokenizer())
        if token == EOS:
            return ids
        matcher.advance(token)
        ids.append(token)
        if matcher.stopped:
            assert allowed(matcher.mask()) == [EOS]
            return ids
    raise AssertionError(f"no end: {tiny_tokenizer().decode(ids)}")


@kinds
def test_whatever_the_mask_allows_matches_the_grammar(compiler, grammar, fits) -> None:
    texts = set()
    for seed in range(25):
        text = tiny_tokenizer().decode(walk(compiler.matcher(grammar), random.Random(seed)))
        assert fits(text), text
        texts.add(text)
    assert len(texts) > 3


@kinds
def test_the_end_is_allowed_exactly_where_the_text_is_complete(compiler, grammar, fits) -> None:
    for seed in range(10):
        ids = walk(compiler.matcher(grammar), random.Random(seed))
        matcher = compiler.matcher(grammar)
        for count in range(len(ids) + 1):
            try:
                text = tiny_tokenizer().decode(ids[:count])
                complete = "\ufffd" not in text and fits(text)
            except (ValueError, SyntaxError, jsonschema.ValidationError):
                complete = False
            assert (EOS in allowed(matcher.mask())) == complete, text
            if count < len(ids):
                matcher.advance(ids[count])


@kinds
def test_a_matcher_rebuilt_from_ids_goes_on_where_the_first_one_was(compiler, grammar, fits) -> None:
    rng = random.Random(7)
    ids = walk(compiler.matcher(grammar), rng)
    whole = compiler.matcher(grammar)
    for count in range(len(ids) + 1):
        rebuilt = compiler.matcher(grammar, ids[:count])
        assert allowed(rebuilt.mask()) == allowed(whole.mask())
        assert rebuilt.stopped == whole.stopped
        if count < len(ids):
            whole.advance(ids[count])


@kinds
def test_forks_go_their_own_ways(compiler, grammar, fits) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        matcher = compiler.matcher(grammar)
        start: list[int] = []
        for _ in range(rng.randrange(4)):
            token = rng.choice(allowed(matcher.mask()))
            if token == EOS:
                break
            matcher.advance(token)
            start.append(token)
        before = allowed(matcher.mask())
        fork = matcher.fork()
        one = walk(fork, rng, len(start))
        assert allowed(matcher.mask()) == before, "the fork moved the matcher it came from"
        two = walk(matcher, rng, len(start))
        assert fits(tiny_tokenizer().decode(start + one))
        assert fits(tiny_tokenizer().decode(start + two))


def test_json_is_written_as_json_dumps_writes_it(compiler) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}, "required": ["a", "b"]}
    ids = walk(compiler.matcher(Grammar("json_schema", json.dumps({**schema, "additionalProperties": False}))), random.Random(0))
    assert tiny_tokenizer().decode(ids) == '{"a": 1, "b": [1, 2]}'


def test_a_schema_cannot_loosen_the_whitespace_or_the_checks(compiler) -> None:
    loose = {"x-guidance": {"whitespace_flexible": True, "lenient": True}, "type": "object"}
    space = tiny_tokenizer().encode(" ").ids[0]
    assert space not in allowed(compiler.matcher(Grammar("json_schema", json.dumps(loose))).mask())
    with pytest.raises(GrammarError, match="not"):
        compiler.check(Grammar("json_schema", json.dumps({**loose, "not": {}})))


@pytest.mark.parametrize("vocab", [300, 364, 384, 385, VOCAB, 1000])
def test_a_mask_has_a_bit_for_each_id_of_the_model_and_none_for_unknown_ones(vocab: int) -> None:
    compiler = GrammarCompiler(tiny_tokenizer(), vocab, (EOS,))
    words = compiler.matcher(Grammar("regex", r"(.|\n)*")).mask()
    assert words.dtype == np.uint32 and len(words) == -(-vocab // 32)
    ids = allowed(words, 32 * len(words))
    assert max(ids) < min(vocab, tiny_tokenizer().get_vocab_size())
    assert EOS in ids and START not in ids
    compiler.close()


def test_every_end_token_that_the_tokenizer_knows_may_end_the_text() -> None:
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, (EOS, START, 9999))
    matcher = compiler.matcher(Grammar("regex", "a"), tiny_tokenizer().encode("a").ids)
    assert matcher.stopped
    assert allowed(matcher.mask()) == [EOS, START]
    compiler.close()


def test_a_later_mask_is_that_of_the_place_it_was_asked_for(compiler) -> None:
    ids = tiny_tokenizer().encode("abab").ids
    matcher, twin = compiler.matcher(Grammar("regex", "(ab)+")), compiler.matcher(Grammar("regex", "(ab)+"))
    for token in ids:
        later, expected = matcher.mask_later(), allowed(twin.mask())
        matcher.advance(token)  # waits for the mask
        twin.advance(token)
        assert allowed(later()) == expected
    assert EOS in allowed(matcher.mask())


def mask_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("grammar")}


def test_masks_of_many_rows_are_computed_by_one_thread_that_ends_with_the_compiler() -> None:
    others = mask_threads()
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, (EOS,))
    matchers = [compiler.matcher(Grammar("json_object")) for _ in range(16)]
    assert not mask_threads() - others, "no thread without a mask"
    masks = [matcher.mask_later() for matcher in matchers]
    assert len({tuple(allowed(mask())) for mask in masks}) == 1
    (thread,) = mask_threads() - others
    compiler.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_threads_may_share_a_compiler() -> None:
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, (EOS,))
    texts: list[str] = []

    def work(seed: int) -> None:
        ids = walk(compiler.matcher(Grammar("json_schema", json.dumps(PERSON))), random.Random(seed))
        texts.append(tiny_tokenizer().decode(ids))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(texts) == 4 and all(map(is_person, texts))
    compiler.close()


@pytest.mark.parametrize("token", [EOS, START, 364, 99_999, -1, 2**40])
def test_a_token_that_does_not_fit_is_an_error(compiler, token: int) -> None:
    matcher = compiler.matcher(Grammar("regex", "ab"))
    with pytest.raises(GrammarError):
        matcher.advance(token)


def test_a_spent_matcher_gives_errors_only(compiler) -> None:
    matcher = compiler.matcher(Grammar("regex", "ab"))
    with pytest.raises(GrammarError):
        matcher.advance(START)
    with pytest.raises(GrammarError):
        matcher.mask_later()()
    with pytest.raises(GrammarError):
        matcher.fork()
    assert not matcher.stopped


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
    ("regex", "a" * (MAX_CHARS + 1), "at most"),
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


def test_a_walk_that_breaks_the_grammar_is_seen_at_once(compiler) -> None:
    good = tiny_tokenizer().encode('{"a": 1}').ids
    for position, (_, token) in enumerate(pairwise(good), start=1):
        matcher = compiler.matcher(Grammar("json_object"), good[:position])
        assert token in allowed(matcher.mask())
    with pytest.raises(GrammarError):
        compiler.matcher(Grammar("json_object"), tiny_tokenizer().encode("{a").ids)


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


@pytest.mark.model
def test_random_walks_of_the_real_vocabulary_match_the_schema() -> None:
    path = Path(__file__).parents[2] / "var" / "models" / DEFAULT_MODEL / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    eos = tokenizer.token_to_id("<|im_end|>")
    compiler = GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), (eos,))
    for seed in range(5):
        rng, ids = random.Random(seed), []
        matcher = compiler.matcher(Grammar("json_schema", json.dumps(PERSON)))
        while not matcher.stopped:
            token = step(allowed(matcher.mask(), tokenizer.get_vocab_size()), len(ids), rng, tokenizer, eos)
            matcher.advance(token)
            ids.append(token)
        assert is_person(tokenizer.decode(ids))
    compiler.close()
