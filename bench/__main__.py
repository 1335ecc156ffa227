"""Run every figure, or those named, and print them beside their targets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import fenced
from bench import guards, handover, leases, renewal, startup
from bench.figures import Figure, table

GROUPS = {
    "leases": leases.run,
    "handover": handover.run,
    "renewal": renewal.run,
    "guards": guards.run,
    "startup": startup.run,
}


def conditions() -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fenced": fenced.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


def measure(chosen: list[str], folder: Path) -> list[Figure]:
    figures: list[Figure] = []
    for name in chosen:
        sys.stderr.write(f"measuring {name} ...\n")
        part = folder / name
        part.mkdir()
        figures += GROUPS[name](part)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("group", nargs="*", metavar="GROUP", help=f"one of {', '.join(GROUPS)}; all if none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--folder", type=Path, default=Path(), help="whose disk is measured (default: here)")
    options = parser.parse_args()
    if unknown := set(options.group) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder.resolve()) as folder:
        figures = measure(options.group or list(GROUPS), Path(folder))
    found = conditions()
    print(f"Python {found['python']}, SQLite {found['sqlite']}, {found['system']}, {found['cores']} cores\n")
    print(table(figures))
    if options.json is not None:
        report = {**found, "figures": [figure.as_dict() for figure in figures]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
