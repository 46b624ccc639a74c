"""What can be checked of the documentation is checked."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from promptmill.core.jobs import TRANSITIONS, Status

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """A module of .ci, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINKS = script("check_links")


@pytest.mark.parametrize("page", LINKS.documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path):
    assert list(LINKS.dead_links(page)) == []


def test_the_link_check_finds_dead_links(tmp_path: Path):
    (tmp_path / "there.md").write_text("# One thing\n\n# One thing\n")
    page = tmp_path / "page.md"
    good = "[a](there.md) [b](there.md#one-thing-1) [c](https://example.org/x) [d](#here) `[x](gone.md)`\n# Here\n```\n[y](gone.md)\n```\n"
    page.write_text(good)
    assert list(LINKS.dead_links(page, tmp_path)) == []
    page.write_text(good + "[e](gone.md) [f](there.md#two) [g](../out.md)\n")
    assert [line.split()[0].rstrip(":") for line in LINKS.dead_links(page, tmp_path)] == ["gone.md", "there.md#two", "../out.md"]


def test_the_table_of_settings_follows_the_settings():
    assert script("config_table").main(["--check"]) == 0


def test_every_setting_says_what_it_is_for():
    assert [row for row in script("config_table").rows() if row.endswith("|  |")] == []


def test_the_table_of_states_is_that_of_the_code():
    """The arrows of the diagram in docs/states.md are TRANSITIONS, no more and no less."""
    text = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    diagram = text.split("```mermaid", 1)[1].split("```", 1)[0]
    arrows = {tuple(part.strip() for part in line.split(":")[0].split("-->")) for line in diagram.splitlines() if "-->" in line}
    states = {(a, b) for a, b in arrows if "[*]" not in (a, b)}
    assert states == {(str(a), str(b)) for a, targets in TRANSITIONS.items() for b in targets}
    assert {a for a, b in arrows if b == "[*]"} == {str(s) for s in Status if s.terminal}
