"""The diffs of docs/reviewer.md: both the program before and the program after run, and the second one is guarded."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import redis
from psycopg.rows import namedtuple_row

import fenced
from fenced.work import Claims
from fenced_testkit.servers import RedisServer
from tests.conftest import NewDatabase

PAGE = Path(__file__).parents[2] / "docs" / "reviewer.md"
DIFFS = re.findall(
    r"^## (.*?)$(?:(?!^## ).)*?^```diff\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
TABLES = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, qty int NOT NULL DEFAULT 10, answer text);"
    "CREATE TABLE runs (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'pending', heartbeat timestamptz, "
    "output text); INSERT INTO orders VALUES (42); INSERT INTO runs VALUES (1), (2)"
)


def half(diff: str, without: str) -> str:
    """The program before (without "+") or after (without "-")."""
    lines = [line for line in diff.splitlines() if not line.startswith(without) and line.strip() != "..."]
    return "\n".join(line[1:] for line in lines)


@pytest.mark.parametrize(("title", "diff"), DIFFS, ids=[title for title, _ in DIFFS])
def test_a_diff_leads_from_a_program_that_runs_to_a_guarded_one(
    title: str, diff: str, new_database: NewDatabase, redis_server: RedisServer
) -> None:
    url = new_database()
    with (
        fenced.Client(url) as client,
        psycopg.connect(url, autocommit=True, row_factory=namedtuple_row) as db,
    ):
        client.acquire("first").release()
        db.execute(TABLES)
        known: dict[str, Any] = {
            "fenced": fenced,
            "Claims": Claims,
            "redis": redis,
            "client": client,
            "db": db,
            "id": 42,
            "DATABASE_URL": url,
            "REDIS_URL": redis_server.url(),
            "work": lambda _: "done",
            "call_a_service": lambda _: "done",
        }
        exec(half(diff, "+"), dict(known))
        after = compile(half(diff, "-"), title, "exec")
        fenced.sql.Guard(table="orders", name="orders/{id}").install(db, mode="require")
        if "Claims(" in diff:
            head = half(diff, "-").partition("\nwith")[0]
            exec(head, made := dict(known))
            made["runs"].install(db, mode="require")
        exec(after, dict(known))
        found = SimpleNamespace(
            orders=db.execute("SELECT qty, answer FROM orders").fetchall(),
            runs=db.execute("SELECT status, output FROM runs ORDER BY id").fetchall(),
            marks=db.execute("SELECT count(*) FROM fenced_guard.mark").fetchone(),
        )
    if "Claims(" in diff:
        assert found.runs == [("done", "done"), ("done", "done")]
    else:
        assert found.orders in ([(8, None)], [(10, "done")])
        assert found.marks == (1,)


def test_there_are_three() -> None:
    assert len(DIFFS) == 3
