"""What the receivers of the tests serve: counters in PostgreSQL, in both depths and under every rule.

    POST /WAY/RULE/ID    add one to a counter; answers with its value
    GET  /WAY/RULE/ID    its value

WAY is `atomic`, `before` (the middleware) or `handler` (the decorator, which also judges before the handler runs). The
lease of a counter has the name WAY-RULE/ID. With the header X-Crash the process kills itself after the mark and
before the effect.
"""

from __future__ import annotations

import os
import signal

import psycopg

from fenced import sql

RULES = ("retry", "once", "sequenced")
WAYS = ("atomic", "before", "handler")
ADD = (
    "INSERT INTO {table} VALUES ({id}, 1) ON CONFLICT (id) DO UPDATE SET qty = {table}.qty + 1 RETURNING qty"
)
LOOK = "SELECT coalesce(max(qty), 0) FROM {table} WHERE id = {id}"


def name_of(way: str, rule: str, number: int) -> str:
    return f"{way}-{rule}/{number}"


def table_of(way: str, rule: str) -> str:
    return f"{way}_{rule}"


def guard_options(rule: str) -> dict[str, str]:
    return {"table": table_of("atomic", rule), "name": f"atomic-{rule}/{{id}}", "rule": rule}


def create_tables(url: str) -> None:
    from fenced.http import replies_table

    with psycopg.connect(url, autocommit=True) as db:
        for rule in RULES:
            for way in WAYS:
                db.execute(f"CREATE TABLE {table_of(way, rule)} (id int PRIMARY KEY, qty int)")
            sql.Guard(**guard_options(rule)).install(db, mode="require")  # type: ignore[arg-type]
        db.execute(replies_table())


def crash_if(wanted: str | None) -> None:
    if wanted:
        os.kill(os.getpid(), signal.SIGKILL)
