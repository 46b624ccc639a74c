"""The table of docs/configuration.md, made from the fields of Settings and the comments behind them.

``--write`` puts it into the page, ``--check`` exits 1 when the page does not hold it.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from promptmill.core import settings

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
BEGIN = "<!-- made by .ci/config_table.py from promptmill/core/settings.py: begin -->\n"
END = "<!-- end -->\n"
VALUES = {
    "Positive": "integer > 0",
    "Count": "integer >= 0",
    "Seconds": "seconds > 0",
    "Millis": "milliseconds >= 0",
    "Port": "port, 0 = any free one",
    "Annotated[int, Field(ge=80)]": "integer >= 80",
    "Path": "path",
    "Path | None": "path",
    "bool": "`true`, `false`",
    "str": "text",
    "tuple[str, ...]": "JSON list of texts",
}


def rows() -> Iterator[str]:
    source = Path(settings.__file__).read_text(encoding="utf-8")
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    owner = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Settings")
    for field in owner.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name = field.target.id
            default = settings.Settings.model_fields[name].default
            meaning = comments.get(field.lineno, "")
            yield f"| `{settings.PREFIX}{name.upper()}` | {shown(default)} | {values(ast.unparse(field.annotation))} | {cell(meaning)} |"


def values(annotation: str) -> str:
    """A type as an operator reads it. Raises KeyError for a type that has no words here yet."""
    if annotation.startswith("Literal["):
        return ", ".join(f"`{word}`" for word in ast.literal_eval(annotation.removeprefix("Literal").replace("'", '"')))
    return VALUES[annotation]


def shown(default: Any) -> str:
    if default in ("", None, ()):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    number = int(default) if isinstance(default, float) and default.is_integer() else default
    return f"`{number}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table() -> str:
    head = "| variable | default | values | meaning |\n|---|---|---|---|\n"
    return head + "\n".join(rows()) + "\n"


def page_with_table(text: str) -> str:
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    return before + BEGIN + "\n" + table() + "\n" + END + after


def main(arguments: list[str]) -> int:
    text = PAGE.read_text(encoding="utf-8")
    wanted = page_with_table(text)
    if arguments == ["--write"]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if arguments != ["--check"]:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    if text != wanted:
        sys.stderr.write(f"{PAGE.relative_to(ROOT)} does not follow the settings; run: python .ci/config_table.py --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
