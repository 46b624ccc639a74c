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

from batching.grammar import GrammarCompiler, GrammarError
from promptmill.core.jobs import Grammar
from promptmill.core.models import DEFAULT_MODEL
from tests.support.engine import EOS, START, tiny_tokenizer
from tests.support.grammars import VOCAB, allowed, step, walk

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


def test_a_walk_that_breaks_the_grammar_is_seen_at_once(compiler) -> None:
    good = tiny_tokenizer().encode('{"a": 1}').ids
    for position, (_, token) in enumerate(pairwise(good), start=1):
        matcher = compiler.matcher(Grammar("json_object"), good[:position])
        assert token in allowed(matcher.mask())
    with pytest.raises(GrammarError):
        compiler.matcher(Grammar("json_object"), tiny_tokenizer().encode("{a").ids)


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
