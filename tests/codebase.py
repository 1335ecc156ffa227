"""The code as it stands: what a run of the tests draws from it, so that each change of the code draws anew."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import fenced
import fenced_testkit

ROOT = Path(__file__).parents[1]


@cache
def digest() -> bytes:
    """Of package, laboratory and bench. Two runs of the same code draw the same, so a failure is there again."""
    found = hashlib.sha256()
    rooms = [*(Path(package.__path__[0]) for package in (fenced, fenced_testkit)), ROOT / "bench"]
    for file in sorted(file for room in rooms for file in room.rglob("*.*")):
        if file.suffix in (".py", ".sql", ".lua"):
            found.update(file.read_bytes())
    return found.digest()
