"""The cost of a guarded write in PostgreSQL, by isolation, rule, stamp, stage, name, leases and hand-over.

Each figure is the time of the guarded statement, with BEGIN, its announcement and COMMIT, divided by the time of the
same statement in a plain transaction in the same run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import Action, Effort, medians
from fenced import sql
from fenced.values.decision import Rule
from fenced.values.model import Stamp

ROWS = 10_000
ROUNDS = 250
WARM_UP = 60
BULK_ROUNDS = 9
BULK_WARM_UP = 2
SHOP = 7

Connection = psycopg.Connection[tuple[Any, ...]]
Fence = fenced.Lease | Stamp | list[fenced.Lease | Stamp]


@dataclass(frozen=True)
class Case:
    """A case, and its limits as a multiple of the plain statement: `one` for one row, `many` for 10,000."""

    what: str
    one: float
    many: float
    stamp: str = "right"
    """`right`, `none`, `another name` or `stale`; `two` for two leases, `new` for a new token every time."""
    mode: str = "enforce"
    rule: Rule = "retry"
    template: str = "shops/{shop}"
    isolation: psycopg.IsolationLevel | None = None
    elsewhere: str | None = None
    """The mode of names that no row has."""
    epoch: bool = False


LEVELS = psycopg.IsolationLevel
CASES = (
    Case("admitted", 1.4, 1.5),
    Case("admitted, REPEATABLE READ", 2.0, 1.5, isolation=LEVELS.REPEATABLE_READ),
    Case("admitted, SERIALIZABLE", 2.0, 1.5, isolation=LEVELS.SERIALIZABLE),
    Case("admitted, rule once, a new token each", 2.5, 2.0, stamp="new", rule="once"),
    Case("admitted, rule sequenced", 2.5, 2.0, rule="sequenced"),
    Case("admitted, a name with a space", 2.0, 1.5, template="shops of one/{shop}"),
    Case("admitted, two leases", 2.0, 1.5, stamp="two"),
    Case("admitted, a new token each", 2.5, 2.0, stamp="new"),
    Case("admitted, in observe", 1.6, 1.5, mode="observe"),
    Case("without a stamp, observe", 1.5, 2.0, "none", "observe", template="orders/{id}"),
    Case("without a stamp, shadow", 1.5, 2.0, "none", "shadow", template="orders/{id}"),
    Case("without a stamp, enforce", 1.5, 2.0, "none", "enforce", template="orders/{id}"),
    Case(
        "without a stamp, observe, other names in require",
        1.5,
        2.0,
        "none",
        "observe",
        template="orders/{id}",
        elsewhere="require",
    ),
    Case(
        "without a stamp, observe, epoch column",
        1.5,
        2.0,
        "none",
        "observe",
        template="orders/{id}",
        epoch=True,
    ),
    Case("stamp of another name, observe", 1.5, 2.0, "another name", "observe", template="orders/{id}"),
    Case("stamp of another name, shadow", 1.5, 2.0, "another name", "shadow", template="orders/{id}"),
    Case("stale stamp let through, observe", 1.5, 2.0, "stale", "observe"),
    Case("stale stamp let through, shadow", 1.5, 2.0, "stale", "shadow"),
    Case("stale stamp let through, shadow, epoch column", 1.5, 2.0, "stale", "shadow", epoch=True),
)


def run(url: str, client: fenced.Client, effort: Effort) -> Iterator[Figure]:
    with psycopg.connect(url, autocommit=True) as maintenance:
        _make(maintenance, "bare", effort.size(ROWS))
        for number, case in enumerate(CASES):
            with contextlib.ExitStack() as stack:
                yield from _measured(case, f"case{number}", url, client, maintenance, stack, effort)


def _measured(
    case: Case,
    table: str,
    url: str,
    client: fenced.Client,
    maintenance: Connection,
    stack: contextlib.ExitStack,
    effort: Effort,
) -> Iterator[Figure]:
    """Measure one case on one connection, alternating with the plain statement."""
    connection = stack.enter_context(psycopg.connect(url, autocommit=True))
    write = _prepared(case, table, connection, client, maintenance, stack, effort.size(ROWS))
    for rows, rounds, warm_up in (
        (1, ROUNDS, WARM_UP),
        (effort.size(ROWS), BULK_ROUNDS, BULK_WARM_UP),
    ):
        where = " WHERE id = 42" if rows == 1 else ""

        def unguarded(where: str = where) -> None:
            _plainly(connection, f"UPDATE bare SET qty = qty + 1{where}")

        def vacuum(rows: int = rows) -> None:
            if rows > 1:
                maintenance.execute(f"VACUUM bare, {table}, fenced_guard.mark".encode())

        theirs, ours = medians(
            unguarded, write(where), rounds=effort.of(rounds), warm_up=effort.size(warm_up), before=vacuum
        )
        yield ratio(
            f"{case.what}, {rows}".replace(" ", "_"),
            f"{rows:,} row{'s' * (rows > 1)}, {case.what}",
            ours,
            theirs,
            target=case.one if rows == 1 else case.many,
            against="BEGIN, UPDATE, COMMIT without a guard",
        )


def _make(connection: Connection, table: str, rows: int) -> None:
    connection.execute(
        f"CREATE TABLE {table} (id integer PRIMARY KEY, shop integer, qty integer, epoch bigint NOT NULL DEFAULT 0);"
        f"INSERT INTO {table} SELECT id, {SHOP}, 0, 0 FROM generate_series(1, {rows}) AS id; ANALYZE {table}".encode()
    )


def _plainly(connection: Connection, statement: str) -> None:
    connection.execute(b"BEGIN")
    connection.execute(statement.encode())
    connection.execute(b"COMMIT")


def _prepared(
    case: Case,
    table: str,
    connection: Connection,
    client: fenced.Client,
    maintenance: Connection,
    stack: contextlib.ExitStack,
    rows: int,
) -> Callable[[str], Action]:
    """Make the table, its guard and its lease. Returns a function from a WHERE clause to the write."""
    _make(maintenance, table, rows)
    template = f"{table}/{case.template}"
    guard = sql.Guard(table=table, name=template, rule=case.rule, epoch="epoch" if case.epoch else None)
    guard.install(maintenance, mode=case.mode)
    if case.elsewhere is not None:
        guard.set_mode(maintenance, case.elsewhere, "elsewhere/*")
    connection.isolation_level = case.isolation
    fence = _fence(case, guard, client, maintenance, stack)

    def write(where: str) -> Action:
        statement = f"UPDATE {table} SET qty = qty + 1{where}"

        def guarded() -> None:
            with guard.transaction(connection, fence()) as tx:
                tx.execute(statement.encode())

        return guarded if case.stamp != "none" else lambda: _plainly(connection, statement)

    return write


def _fence(
    case: Case, guard: sql.Guard, client: fenced.Client, connection: Connection, stack: contextlib.ExitStack
) -> Callable[[], Any]:
    own = guard.name_for(shop=SHOP) if "shop" in case.template else guard.name_for(id=0)
    if case.stamp == "none":
        return lambda: None
    lease = stack.enter_context(client.hold(own, ttl=600))
    if case.stamp == "two":
        other = stack.enter_context(client.hold(f"{own}/other", ttl=600))
        return lambda: [lease, other]
    if case.stamp == "new":
        tokens = iter(range(lease.token, 2**52))
        return lambda: Stamp(lease.realm, (own,), next(tokens), 1, f"{next(tokens):032x}")
    if case.stamp == "stale":
        newer = Stamp(lease.realm, (own,), lease.token + 1, 0, "f" * 32)
        connection.execute(f"SELECT fenced_guard.announce_alone('{newer}', 'public.{guard.table}')".encode())
    return lambda: lease
