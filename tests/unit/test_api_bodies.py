"""A14, A15: hostile and odd bodies. Each is a 400, 413 or 415 in the common shape, and costs nothing else."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from api.body import parse_object
from tests.support.api import Twins, make_twins

LIMIT = 1_000_000


@pytest.fixture
def api(tmp_path: Path) -> Twins:
    return make_twins(tmp_path, max_body_bytes=LIMIT)


def in_prompt(value: str) -> bytes:
    return b'{"prompt": "hi", "frobnicate": ' + value.encode() + b"}"


BODIES = [
    ("empty", b"", 400),
    ("blank", b" \n", 400),
    ("not JSON", b"prompt=hi", 400),
    ("cut off", b'{"prompt": "hi"', 400),
    ("a string without end", b'{"prompt": "hi', 400),
    ("escaped quotes without end", b'{"prompt": "' + b'\\"' * 200_000, 400),
    ("trailing text", b'{"prompt": "hi"} x', 400),
    ("a list", b'["prompt"]', 400),
    ("a text", b'"x"', 400),
    ("null", b"null", 400),
    ("a number", b"1", 400),
    ("brackets", in_prompt("[" * 100_000), 400),
    ("closed brackets", in_prompt("[" * 50_000 + "]" * 50_000), 400),
    ("objects 1000 deep in an ignored field", in_prompt('{"a":' * 1000 + "1" + "}" * 1000), 400),
    ("lists 101 deep", in_prompt("[" * 100 + "]" * 100), 400),
    ("very many lists", in_prompt("[" + "[]," * 200_000 + "[]]"), 400),
    ("NaN in an ignored field", in_prompt("NaN"), 400),
    ("Infinity", in_prompt("-Infinity"), 400),
    ("1e400 deep inside", in_prompt('{"a": [1, {"b": 1e400}]}'), 400),
    ("a 5000-digit integer", in_prompt("1" * 5000), 400),
    ("a key twice", b'{"prompt": "a", "prompt": "b"}', 400),
    ("a key twice deep inside", b'{"prompt": "a", "metadata": {"k": "1", "k": "2"}}', 400),
    ("stream twice", b'{"prompt": "a", "stream": false, "stream": true}', 400),
    ("half a surrogate pair", b'{"prompt": "\\ud800"}', 400),
    ("half a surrogate pair in a key", b'{"prompt": "a", "metadata": {"\\udfff": "1"}}', 400),
    ("latin-1", '{"prompt": "é"}'.encode("latin-1"), 400),
    ("UTF-16", '{"prompt": "hi"}'.encode("utf-16"), 400),
    ("over the limit", b'{"prompt": "' + b"a" * LIMIT + b'"}', 413),
]


def check_shape(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.content_type == "application/json"
    assert answer.headers["x-request-id"]
    error = json.loads(answer.data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(("body", "status"), [case[1:] for case in BODIES], ids=[case[0] for case in BODIES])
def test_a15_a_hostile_body_is_refused_and_the_next_request_is_fine(api: Twins, body: bytes, status: int):
    check_shape(api.post_raw(body), status)
    assert api.submit().status_code == 202


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonx"]
)
def test_a14_another_content_type_is_415(api: Twins, content_type: str):
    check_shape(api.post_raw(b'{"prompt": "hi"}', content_type), 415)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/JSON;charset=UTF-8", "application/ld+json"])
def test_a14_json_by_another_spelling_is_taken(api: Twins, content_type: str):
    assert api.post_raw(b'{"prompt": "hi"}', content_type).status_code == 202


def test_a14_another_charset_is_415(api: Twins):
    check_shape(api.post_raw(b'{"prompt": "hi"}', "application/json; charset=latin-1"), 415)


def test_a14_gzip_is_415(api: Twins):
    check_shape(api.post_raw(gzip.compress(b'{"prompt": "hi"}'), headers={"Content-Encoding": "gzip"}), 415)


def test_a14_a_byte_order_mark_is_taken(api: Twins):
    assert api.post_raw(b'\xef\xbb\xbf{"prompt": "hi"}').status_code == 202


def test_a14_a_chunked_body_is_read_and_limited(api: Twins):
    from io import BytesIO

    def post(body: bytes) -> Any:
        environ = {"wsgi.input": BytesIO(body), "wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
        return api.client.post("/v1/jobs", content_type="application/json", environ_overrides=environ)

    assert post(b'{"prompt": "hi"}').status_code == 202
    check_shape(post(b'{"prompt": "' + b"a" * LIMIT + b'"}'), 413)


def test_a15_a_hundred_levels_are_taken(api: Twins):
    assert api.post_raw(in_prompt("[" * 99 + "]" * 99)).status_code == 202


def test_a15_brackets_and_escaped_quotes_inside_texts_are_text(api: Twins):
    assert api.submit({"prompt": '[[[{{{"\\' * 5}).status_code == 202


def test_surrogate_pairs_that_are_whole_are_taken(api: Twins):
    assert api.post_raw(b'{"prompt": "\\ud83d\\ude00"}').status_code == 202


def test_the_field_of_a_number_that_is_not_finite_is_named(api: Twins):
    error = check_shape(api.post_raw(b'{"prompt": "hi", "temperature": 1e400}'), 400)
    assert error["param"] == "temperature"
    error = check_shape(api.post_raw(b'{"messages": [{"role": "user", "content": "hi", "x": NaN}]}'), 400)
    assert error["param"] == "messages[0].x"


def test_long_keys_over_long_lists_cost_no_memory_of_their_own():
    """The path of a flaw is made only when there is one: else a small body grows to key length x list length."""
    body = b'{"e": "\\ud83d\\ude00", "' + b"k" * 2000 + b'": [' + b"0," * 100_000 + b"0]}"
    tracemalloc.start()
    try:
        parse_object(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(body)


def test_what_a_client_names_comes_back_short(api: Twins):
    answer = api.submit({"prompt": "hi", "guided_" + "x" * 100_000: 1})
    assert answer.status_code == 400
    assert len(answer.data) < 1000
