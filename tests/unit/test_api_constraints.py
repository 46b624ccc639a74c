"""What holds the output to a form: every spelling of it, exactly one, compiled before there is a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from promptmill.core.jobs import Grammar
from tests.support.api import Twins, make_twins, refused, stored

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": ["z"]}
OPENAI = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True, "description": "a thing"}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def check(grammar: Grammar) -> str | None:
    """An engine that knows all but the regular expression ``(``."""
    return "missing )" if grammar.text == "(" else None


@pytest.fixture
def api(tmp_path: Path) -> Twins:
    return make_twins(tmp_path, grammars=check)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": OPENAI}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_json": json.dumps(SCHEMA, indent=2)}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["yes", "no", "yes"]}, Grammar("choice", '["yes","no"]')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": False}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["é"]}}, Grammar("choice", '["é"]')),
        ({"structured_outputs": {"grammar": "start: A"}}, Grammar("ebnf", "start: A")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, Grammar("regex", "a+")),
    ],
)
def test_every_spelling_of_a_constraint(api: Twins, fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert stored(api, {"prompt": "hi", **fields}).spec.sampling.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ({"guided_json": []}, "guided_json"),
        ({"guided_json": "not JSON"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": '{"a":' * 200}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a" * 65_537}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["yes", ""]}, "guided_choice[1]"),
        ({"guided_choice": ["x"] * 1025}, "guided_choice"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": "regex"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_a05_a_malformed_constraint_is_refused_by_its_path(api: Twins, fields: dict[str, Any], param: str) -> None:
    refused(api, {"prompt": "hi", **fields}, param)


def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(api: Twins) -> None:
    error = refused(api, {"prompt": "hi", "guided_regex": "("}, "guided_regex", "invalid_request")
    assert "missing )" in error["message"]


def test_without_grammars_on_this_server_they_are_refused(tmp_path: Path) -> None:
    refused(make_twins(tmp_path), {"prompt": "hi", "guided_regex": "a"}, "guided_regex", "unsupported_parameter")


def test_the_order_of_a_schema_s_properties_counts(api: Twins) -> None:
    """It is the order of the output, so the result cache must not take one for the other."""
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    one, other = (stored(api, {"prompt": "hi", "temperature": 0, "guided_json": schema}).spec for schema in (SCHEMA, turned))
    assert one.cache_key("r") != other.cache_key("r")
