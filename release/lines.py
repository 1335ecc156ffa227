"""Counts lines of Python without those that are comments alone: `python -m release.lines`.

What a script wrote (`python -m release.twins`) is counted apart, and so are the capabilities that are younger than the
floor plan (record 0089 and the issue behind it compare the size of what there was then).
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from release.twins import END, GENERATED

ROOT = Path(__file__).parents[1]
COUNTED = ("src/fenced", "testkit/src", "tests")
YOUNGER: dict[str, tuple[str, ...]] = {
    "claims on rows, and jobs on them": (
        "work",
        "celery.py",
        "cli/work.py",
        "guards/claims.py",
        *(
            f"stores/{store}/guard/{file}.py"
            for store in ("sqlite", "postgresql")
            for file in ("claims", "claiming")
        ),
    ),
    "once": ("client/once.py", "cli/once.py", "values/ticks.py"),
    "traces": ("testing/trace.py", "testing/tracing.py", "testing/lives.py"),
    "metrics, spans and alerts": (
        *("metrics", "monitoring", "core/asked.py", "client/operated.py", "cli/alerts.py", "cli/exporter.py"),
    ),
    "diagnosis": (
        *("diagnosis", "pauses.py", "client/reaching.py", "leases/past.py", "values/past.py"),
        *("cli/doctor.py", "cli/tune.py", "cli/audit.py", "cli/explain.py", "stores/redis/guard/strays.py"),
    ),
    "recipes, and tokens of other locks": ("recipes", "values/foreign.py"),
    "a drill for every failure": (
        *(
            f"drills/{file}.py"
            for file in "bound catalog declared every garbage java network outside own".split()
        ),
        *(f"drills/{file}.py" for file in "pauses play programs runner summary tokens".split()),
        *("testing/late.py", "testing/plugin.py"),
    ),
    "gate of an app, watchdog": ("http/serving.py", "runtime/supervised.py"),
}
"""Capabilities that came after the floor plan was drawn, and the files that they consist of, below src/fenced."""


def lines_of(source: Path) -> Counter[str]:
    """Lines of one file: `all`, `counted`, `comments` (lines with nothing else), `generated`, `docstrings`, `blank`."""
    text = source.read_text()
    found = Counter({"all": 0})
    inside = False
    for line in text.splitlines():
        inside = inside or line.startswith(GENERATED)
        kind = "comments" if line.lstrip().startswith("#") else "generated" if inside else "counted"
        found.update(("all", kind))
        found["blank"] += not line.strip()
        inside = inside and line != END
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found["docstrings"] += (node.end_lineno or node.lineno) - node.lineno + 1
    return found


def younger(path: Path) -> str | None:
    """The younger capability that this file belongs to; None: it belongs to none."""
    names = {path.as_posix(), *(parent.as_posix() for parent in path.parents)}
    return next((what for what, where in YOUNGER.items() if names & set(where)), None)


def main() -> None:
    for folder in COUNTED:
        rooms: dict[str, Counter[str]] = {}
        apart: dict[str, Counter[str]] = {}
        for source in sorted((ROOT / folder).rglob("*.py")):
            path = source.relative_to(ROOT / folder)
            what = younger(path) if folder == "src/fenced" else None
            depth = 2 if path.parts[0] == "stores" else 1
            room = "/".join(path.parts[:-1][:depth]) or "."
            counts = rooms.setdefault(room, Counter()) if what is None else apart.setdefault(what, Counter())
            counts.update(lines_of(source))
        total = sum(rooms.values(), Counter())
        print(
            f"{folder}: {total['counted']} lines without comments ({total['comments']}) "
            f"and what a script wrote ({total['generated']})"
        )
        for room, found in sorted(rooms.items(), key=lambda each: -each[1]["counted"]):
            print(f"  {room:<20} {found['counted']:>7}  generated {found['generated']:>5}")
        for what, found in apart.items():
            print(f"  apart: {what:<26} {found['counted']:>7}")


if __name__ == "__main__":
    main()
