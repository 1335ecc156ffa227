"""A guarded write against the same write without a guard, each on a file of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import WARM_UP, Action, Effort, connect, make_table, medians
from fenced import sql

ONE = "UPDATE orders SET qty = qty + 1 WHERE id = 42"
ALL = "UPDATE orders SET qty = qty + 1"
ROWS = 10_000
ROUNDS = 3000
BULK_ROUNDS = 25


def plain(connection: sqlite3.Connection, statement: str) -> Action:
    def write() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(statement)
        connection.execute("COMMIT")

    return write


def guarded(guard: sql.Guard, connection: sqlite3.Connection, lease: fenced.Lease, statement: str) -> Action:
    def write() -> None:
        with guard.transaction(connection, lease) as tx:
            tx.execute(statement)

    return write


def by_clause(guard: sql.Guard, connection: sqlite3.Connection, lease: fenced.Lease) -> Action:
    def write() -> None:
        clause = guard.clause(connection, lease)
        connection.execute("BEGIN IMMEDIATE")
        done = connection.execute(
            f"UPDATE orders SET qty = qty + 1, {clause.assign} WHERE id = 42 AND {clause.where}"
        )
        clause.admitted(done.rowcount, "id = ?", (42,))
        connection.execute("COMMIT")

    return write


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    with fenced.Client(f"sqlite:///{folder}/guard-leases.db") as client:
        yield from _one_row(folder, client, effort)
        yield from _many_rows(folder, client, effort)


def _one_row(folder: Path, client: fenced.Client, effort: Effort) -> Iterator[Figure]:
    files = [connect(folder / f"one-{kind}.db") for kind in ("plain", "guarded", "clause")]
    for each in files:
        make_table(each, 100)
    guard = sql.Guard(table="orders", name="orders/{id}")
    guard.install(files[1], mode="enforce")
    with client.hold("orders/42") as lease:
        theirs, ours, clause = medians(
            plain(files[0], ONE),
            guarded(guard, files[1], lease, ONE),
            by_clause(guard, files[2], lease),
            rounds=effort.of(ROUNDS),
            warm_up=effort.size(WARM_UP),
        )
    yield ratio("guard", "guarded UPDATE of one row", ours, theirs, target=1.25, against="without a guard")
    yield ratio("clause", "the same by clause()", clause, theirs, against="without a guard")
    for each in files:
        each.close()


def _many_rows(folder: Path, client: fenced.Client, effort: Effort) -> Iterator[Figure]:
    rows = effort.size(ROWS)
    files = [connect(folder / f"many-{kind}.db") for kind in ("plain", "constant", "template")]
    for each in files:
        make_table(each, rows)
    constant = sql.Guard(table="orders", name="orders")
    template = sql.Guard(table="orders", name="shops/{shop}")
    constant.install(files[1], mode="enforce")
    template.install(files[2], mode="enforce")
    with client.hold("orders") as orders, client.hold("shops/7") as shop:
        theirs, one, other = medians(
            plain(files[0], ALL),
            guarded(constant, files[1], orders, ALL),
            guarded(template, files[2], shop, ALL),
            rounds=effort.of(BULK_ROUNDS),
            warm_up=effort.size(15),
        )
    against = f"{rows:,} rows without a guard"
    yield ratio(
        "bulk_constant", f"{rows:,} rows under one constant name", one, theirs, target=7, against=against
    )
    yield ratio("bulk_template", f"{rows:,} rows, name by template", other, theirs, target=7, against=against)
    for each in files:
        each.close()
