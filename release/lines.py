"""Counts lines of Python, with and without those that are comments alone: `python -m release.lines`."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTED = ("src/fenced", "testkit/src", "tests")


def lines_of(source: Path) -> Counter[str]:
    """Lines of one file: `all`, `comments` (lines with nothing else), `docstrings`, `blank`."""
    text = source.read_text()
    found = Counter({"all": 0})
    for line in text.splitlines():
        found["all"] += 1
        found["comments"] += line.lstrip().startswith("#")
        found["blank"] += not line.strip()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found["docstrings"] += (node.end_lineno or node.lineno) - node.lineno + 1
    return found


def main() -> None:
    for folder in COUNTED:
        rooms: dict[str, Counter[str]] = {}
        for source in sorted((ROOT / folder).rglob("*.py")):
            parts = source.relative_to(ROOT / folder).parts
            depth = 2 if parts[0] == "stores" else 1
            room = "/".join(parts[:depth]) if len(parts) > depth else "/".join(parts[: depth - 1]) or "."
            rooms.setdefault(room, Counter()).update(lines_of(source))
        total = sum(rooms.values(), Counter())
        print(
            f"{folder}: {total['all'] - total['comments']} lines without comments, {total['all']} with them"
        )
        for room, found in sorted(rooms.items(), key=lambda each: -each[1]["all"]):
            print(f"  {room:<20} {found['all'] - found['comments']:>7}  comments {found['comments']:>5}")


if __name__ == "__main__":
    main()
