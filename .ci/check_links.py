"""Every relative link and anchor of every Markdown file leads somewhere. Links to other hosts are not followed.

Run it from anywhere; prints each dead link and exits 1 if there is one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {".venv", ".git", "var", "build", "dist", "node_modules"}
FENCE = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
EXPLICIT = re.compile(r"<a\s+(?:name|id)=\"([^\"]+)\"")


def documents(root: Path = ROOT) -> list[Path]:
    return sorted(p for p in root.rglob("*.md") if not SKIPPED.intersection(p.relative_to(root).parts))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page: headings in lower case, spaces as hyphens, punctuation gone, repeats numbered."""
    found: set[str] = set(EXPLICIT.findall(text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        name, number = slug, 0
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found


def dead_links(page: Path, root: Path = ROOT) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (root / path.lstrip("/") if path.startswith("/") else page.parent / path) if path else page
        if not file.resolve().is_relative_to(root):
            yield f"{target} leaves the repository"
        elif not file.exists():
            yield f"{target} does not exist"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{target}: no such heading"


def main() -> int:
    dead = [f"{page.relative_to(ROOT)}: {link}" for page in documents() for link in dead_links(page)]
    sys.stdout.writelines(f"{line}\n" for line in dead)
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
