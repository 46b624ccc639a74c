"""The OpenAPI document tells of every route, and the pages need no other host."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.openapi import REF, document
from tests.support.api import Twins, make_twins


@pytest.fixture
def api(tmp_path: Path) -> Twins:
    return make_twins(tmp_path)


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from nodes(item)


def test_every_route_is_described_and_nothing_else(api: Twins):
    described = {(path, method.upper()) for path, operations in document()["paths"].items() for method in operations}
    hidden = ("later.", "pages.static_file", "pages.swagger")
    routed = {
        (re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule), method)
        for rule in api.app.url_map.iter_rules()
        if not rule.endpoint.startswith(hidden)
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert described == routed


def test_every_reference_resolves():
    text = json.dumps(document())
    schemas = document()["components"]["schemas"]
    references = set(re.findall(rf'"{REF}(\w+)"', text))
    assert references
    assert references <= schemas.keys()


def test_the_schemas_speak_openapi_3_0():
    """Swagger UI 4 shows nothing of later dialects."""
    assert document()["openapi"].startswith("3.0")
    for node in nodes(document()["components"]["schemas"]):
        assert node.get("type") != "null"
        assert not isinstance(node.get("type"), list)
        assert "const" not in node
        assert isinstance(node.get("exclusiveMinimum", True), bool)
        assert "$defs" not in node


def test_every_operation_names_the_common_error_shape():
    for operations in document()["paths"].values():
        for operation in operations.values():
            assert operation["responses"]["500"]["content"]["application/json"]["schema"]["$ref"] == f"{REF}ErrorBody"


def test_the_document_and_the_pages_are_served_here(api: Twins):
    assert api.client.get("/openapi.json").json == json.loads(json.dumps(document()))
    for page in ("/", "/docs"):
        answer = api.client.get(page)
        assert answer.content_type.startswith("text/html")
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert not re.search(r"(src|href)=\"(https?:)?//", answer.text)
        for link in re.findall(r"(?:src|href)=\"([^\"]+)\"", answer.text):
            assert api.client.get(link).status_code == 200, link
