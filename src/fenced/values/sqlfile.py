"""SQL lives in `.sql` files: each statement under a line `-- name: what it is for`."""

from __future__ import annotations

import re
from pathlib import Path

_HEAD = re.compile(r"^-- (\w+): .+$", re.MULTILINE)


def load(path: Path) -> dict[str, str]:
    """The statements of a file by their names, without comments."""
    parts = _HEAD.split(path.read_text())
    return {name: _bare(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def statements(script: str) -> list[str]:
    """Split an SQLite script where SQLite itself says that a statement is complete."""
    import sqlite3

    found, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            found.append(current.strip())
            current = ""
    return found


def _bare(body: str) -> str:
    lines = (line for line in body.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).strip().removesuffix(";")
