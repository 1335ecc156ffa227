"""A guarded write in MariaDB or MySQL against the same write without a guard, each on a table of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncmy
import pymysql

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import Action, Effort, async_medians, medians
from fenced import sql
from fenced.values.model import Stamp
from fenced_testkit.servers import MariadbServer, MysqlServer, mariadb_or_mysql

SETTINGS = {"innodb_buffer_pool_size": "128M", "innodb_log_file_size": "96M"}
"""The servers of the tests have less."""
ROWS = 10_000
ROUNDS = 800
WARM_UP = 100
BULK_ROUNDS = 15
BULK_WARM_UP = 4
TABLES = ("plain", "guarded", "observed", "constant", "template", "idle")
AGAINST = "START TRANSACTION, UPDATE, COMMIT without a guard"
ONE_BAR, MANY_BAR, UNSTAMPED_BAR = 1.8, 3.2, 1.6
MYSQL_BARS = 1.6, 2.0, 1.6


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with mariadb_or_mysql(SETTINGS) as server, tempfile.TemporaryDirectory() as folder:
        database = server.create_database("guarded")
        place: dict[str, Any] = {"host": None, "unix_socket": str(server.socket), "user": "root"}
        with (
            fenced.Client(f"sqlite:///{folder}/leases.db") as client,
            contextlib.closing(pymysql.connect(**place, database=database, autocommit=True)) as connection,
        ):
            for table in TABLES:
                _make(connection, table, effort.size(ROWS))
            bars = MYSQL_BARS if isinstance(server, MysqlServer) else (ONE_BAR, MANY_BAR, UNSTAMPED_BAR)
            yield from _one_row(connection, client, bars, effort)
            yield asyncio.run(_one_row_asyncmy(server, database, client, bars[0], effort))
            yield from _many_rows(connection, client, bars[1], effort)


def _make(connection: Any, table: str, rows: int) -> None:
    made = f"CREATE TABLE {table} (id int PRIMARY KEY, shop int, qty int) ENGINE = InnoDB"
    values = ", ".join(f"({row}, 7, 0)" for row in range(1, max(rows, 42) + 1))
    _run(connection, made, f"INSERT INTO {table} VALUES {values}")


def _run(connection: Any, *statements: str) -> None:
    for statement in statements:
        connection.query(statement)


def _plain(connection: Any, statement: str) -> Action:
    return lambda: _run(connection, "START TRANSACTION", statement, "COMMIT")


def _guarded(guard: sql.Guard, connection: Any, fence: fenced.Lease | Stamp, statement: str) -> Action:
    def write() -> None:
        with guard.transaction(connection, fence) as tx:
            tx.query(statement)

    return write


def _one(table: str) -> str:
    return f"UPDATE {table} SET qty = qty + 1 WHERE id = 42"


def _one_row(
    connection: Any, client: fenced.Client, bars: tuple[float, float, float], effort: Effort
) -> Iterator[Figure]:
    guard = sql.Guard(table="guarded", name="orders/{id}")
    guard.install(connection, mode="enforce")
    sql.Guard(table="observed", name="other/{id}").install(connection, mode="enforce")
    news = sql.Guard(table="idle", name="news/{id}")
    news.install(connection, mode="enforce")
    with client.hold("orders/42") as lease:
        tokens = itertools.count(1000)

        def raised() -> None:
            token = next(tokens)
            stamp = Stamp(lease.realm, ("news/42",), token, 1, f"{token:032x}")
            with news.transaction(connection, stamp) as tx:
                tx.query(_one("idle"))

        theirs, ours, first, unstamped = medians(
            _plain(connection, _one("plain")),
            _guarded(guard, connection, lease, _one("guarded")),
            raised,
            _plain(connection, _one("observed")),
            rounds=effort.of(ROUNDS),
            warm_up=effort.size(WARM_UP),
        )
    one, _, without = bars
    yield ratio("one", "UPDATE of one row", ours, theirs, target=one, against=AGAINST)
    yield ratio("new", "the same, with a new token each time", first, theirs, against=AGAINST)
    what = "UPDATE of one row without a stamp, enforce"
    yield ratio("unstamped", what, unstamped, theirs, target=without, against=AGAINST)


async def _one_row_asyncmy(
    server: MariadbServer, database: str, client: fenced.Client, bar: float, effort: Effort
) -> Figure:
    place: dict[str, Any] = {"unix_socket": str(server.socket), "user": "root", "db": database}
    connection: Any = await asyncmy.connect(**place, autocommit=True)
    guard = sql.AsyncGuard(table="guarded", name="orders/{id}")
    with client.hold("orders/42") as lease:

        async def unguarded() -> None:
            for statement in ("START TRANSACTION", _one("plain"), "COMMIT"):
                await connection.query(statement)

        async def announced() -> None:
            async with guard.transaction(connection, lease) as tx:
                await tx.query(_one("guarded"))

        theirs, ours = await async_medians(
            unguarded, announced, rounds=effort.of(ROUNDS), warm_up=effort.size(WARM_UP)
        )
    connection.close()
    return ratio("one_asyncmy", "UPDATE of one row, asyncmy", ours, theirs, target=bar, against=AGAINST)


def _many_rows(connection: Any, client: fenced.Client, bar: float, effort: Effort) -> Iterator[Figure]:
    rows = effort.size(ROWS)
    constant = sql.Guard(table="constant", name="constant")
    constant.install(connection, mode="enforce")
    template = sql.Guard(table="template", name="shops/{shop}")
    template.install(connection, mode="enforce")
    with client.hold_all(["constant", "shops/7"]) as lease:
        theirs, one_name, by_template = medians(
            _plain(connection, "UPDATE plain SET qty = qty + 1"),
            _guarded(constant, connection, lease, "UPDATE constant SET qty = qty + 1"),
            _guarded(template, connection, lease, "UPDATE template SET qty = qty + 1"),
            rounds=effort.of(BULK_ROUNDS),
            warm_up=effort.size(BULK_WARM_UP),
        )
    against = f"{rows:,} rows without a guard"
    yield ratio(
        "many_constant", f"{rows:,} rows, a constant name", one_name, theirs, target=bar, against=against
    )
    what = f"{rows:,} rows of one name by a template"
    yield ratio("many_template", what, by_template, theirs, target=bar, against=against)
