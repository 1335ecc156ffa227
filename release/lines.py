"""Counts lines of Python without those that are comments alone: `python -m release.lines`.

What a script wrote (`python -m release.twins`) is counted apart, and so are the capabilities that are younger than the
floor plan, with their tests (record 0089 compares the size of what there was then).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from release.twins import END, GENERATED

ROOT = Path(__file__).parents[1]
COUNTED = ("src/fenced", "testkit/src", "tests")
YOUNGER: dict[str, dict[str, tuple[str, ...]]] = {
    "claims on rows, and jobs on them": {
        "src/fenced": (
            *("work", "celery.py", "fastapi.py", "cli/work.py", "guards/claims.py"),
            *(
                f"stores/{store}/guard/{file}.py"
                for store in ("sqlite", "postgresql")
                for file in ("claims", "claiming")
            ),
        ),
        "tests": (
            *("work", "doors", "examples", "docs/test_reviewer.py", "http/test_fastapi.py"),
            "walk/extras/with_celery.py",
        ),
    },
    "once": {"src/fenced": ("client/once.py", "cli/once.py", "values/ticks.py"), "tests": ("once",)},
    "renewals off the loop": {
        "src/fenced": (
            *("core/renewing.py", "core/watching.py", "runtime/pulse.py", "testing/loops.py"),
            "stores/zookeeper/wire/sides.py",
        ),
        "tests": (
            *("facades/test_blocked_loop.py", "conformance/test_blocked_loops.py"),
            "planted/test_loops_catch.py",
        ),
    },
    "gate of an app, watchdog": {
        "src/fenced": ("http/serving.py", "runtime/supervised.py"),
        "tests": ("cli/test_watchdog.py", "http/test_serving.py"),
    },
    "proofs and traces": {
        "src/fenced": ("testing/trace.py", "testing/tracing.py", "testing/lives.py"),
        "tests": ("proofs", "testing/test_trace.py", "simulation/test_traces.py"),
    },
    "metrics, spans, alerts, remembered decisions": {
        "src/fenced": (
            *("metrics", "monitoring", "core/asked.py", "client/operated.py", "cli/alerts.py"),
            *("cli/exporter.py", "guards/remembered.py", "service/minutes.py"),
        ),
        "tests": (
            *("metrics", "unit/test_remembered.py", "unit/test_keeper_events.py", "service/test_hot.py"),
            *("evidence/test_capacity.py", "files/test_decisions.py"),
            "walk/extras/with_opentelemetry.py",
        ),
    },
    "diagnosis": {
        "src/fenced": (
            *("diagnosis", "pauses.py", "client/reaching.py", "leases/past.py", "values/past.py"),
            *("cli/doctor.py", "cli/tune.py", "cli/audit.py", "cli/explain.py"),
            "stores/redis/guard/strays.py",
        ),
        "tests": ("diagnosis",),
    },
    "recipes, and tokens of other locks": {
        "src/fenced": ("recipes", "client/looking.py", "values/foreign.py", "cli/stamp.py"),
        "tests": (
            "recipes",
            "evidence/test_elections.py",
            "evidence/test_election_worlds.py",
            *("evidence/test_replicas.py", "evidence/test_permits.py", "evidence/test_capacity.py"),
            *("cli/test_stamp.py", "unit/test_looking.py"),
            "sqlite/test_guard_hold.py",
        ),
    },
    "a drill for every failure": {
        "src/fenced": (
            *(
                f"drills/{file}.py"
                for file in "bound catalog declared every garbage java network outside own".split()
            ),
            *(f"drills/{file}.py" for file in "pauses play programs runner summary tokens".split()),
            *("testing/late.py", "testing/plugin.py"),
        ),
        "tests": ("drills/test_outside.py", "drills/test_stories.py"),
    },
    "MariaDB and MySQL": {
        "src/fenced": ("stores/mariadb",),
        "tests": ("mariadb", "conformance/authorities/test_mariadb.py", "conformance/guards/test_mariadb.py"),
    },
}
"""Capabilities that came after the floor plan was drawn, and the files and folders that they consist of."""


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


def younger(folder: str, path: Path) -> str | None:
    """The younger capability that this file belongs to; None: it belongs to none."""
    names = {path.as_posix(), *(parent.as_posix() for parent in path.parents)}
    return next((what for what, where in YOUNGER.items() if names & set(where.get(folder, ()))), None)


def counted(folder: str) -> Iterator[tuple[Path, str | None, Counter[str]]]:
    """Each file below a folder, the younger capability that it belongs to, and its lines."""
    for source in sorted((ROOT / folder).rglob("*.py")):
        path = source.relative_to(ROOT / folder)
        yield path, younger(folder, path), lines_of(source)


def main() -> None:
    for folder in COUNTED:
        rooms: dict[str, Counter[str]] = {}
        apart: dict[str, Counter[str]] = {}
        for path, what, counts in counted(folder):
            room = "/".join(path.parts[:-1][: 2 if path.parts[0] == "stores" else 1]) or "."
            (rooms.setdefault(room, Counter()) if what is None else apart.setdefault(what, Counter())).update(
                counts
            )
        total = sum(rooms.values(), Counter())
        print(
            f"{folder}: {total['counted']} lines, of which {total['docstrings']} are docstrings and {total['blank']} "
            f"are blank; left out: {total['comments']} of comments, {total['generated']} that a script wrote"
        )
        for room, found in sorted(rooms.items(), key=lambda each: -each[1]["counted"]):
            print(f"  {room:<44} {found['counted']:>7}  generated {found['generated']:>5}")
        if apart:
            younger_lines = sum(found["counted"] for found in apart.values())
            print(f"  younger than the floor plan, counted apart   {younger_lines:>7}")
        for what, found in apart.items():
            print(f"    {what:<44} {found['counted']:>7}")


if __name__ == "__main__":
    main()
