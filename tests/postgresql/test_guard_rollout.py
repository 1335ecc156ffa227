"""The five stages of the rollout, walked on a table while it is written to: no honest write fails at any of them."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg
import pytest

import fenced
from fenced.sql import Guard, refusal
from fenced.testing.kit import stamp
from fenced_testkit.servers import Pgbouncer, PostgresqlServer

ROWS = 4
WRITERS = 4
ENOUGH = 5
"""How many more writes each writer makes at each stage before the walk goes on."""
PATIENCE_SECONDS = 60.0
ORDERS = Guard(table="orders", name="orders/{id}")


@dataclass
class Writer:
    """Adds one to a row, again and again: without a stamp until it is told to take leases."""

    row: int
    stamped: bool = False
    written: int = 0
    failed: list[BaseException] = field(default_factory=list)

    def write(self, connection: psycopg.Connection, client: fenced.Client) -> None:
        statement = "UPDATE orders SET qty = qty + 1 WHERE id = %s"
        if not self.stamped:
            connection.execute(statement, [self.row])
        else:
            with (
                client.hold(ORDERS.name_for(id=self.row), ttl=10) as lease,
                ORDERS.transaction(connection, lease) as tx,
            ):
                tx.execute(statement, [self.row])
        self.written += 1

    def run(self, url: str, authority: str, stop: threading.Event) -> None:
        try:
            with (
                fenced.Client(authority) as client,
                psycopg.connect(
                    url, autocommit=True, prepare_threshold=None, application_name=f"writer {self.row}"
                ) as connection,
            ):
                while not stop.is_set():
                    self.write(connection, client)
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failed.append(error)


@contextmanager
def load(url: str, authority: str) -> Iterator[list[Writer]]:
    stop = threading.Event()
    writers = [Writer(1 + number % ROWS) for number in range(WRITERS)]
    threads = [threading.Thread(target=each.run, args=(url, authority, stop)) for each in writers]
    for thread in threads:
        thread.start()
    try:
        yield writers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def go_on(writers: list[Writer]) -> None:
    """Wait until everybody has written some more, and nobody has failed."""
    before = [each.written for each in writers]
    until = time.monotonic() + PATIENCE_SECONDS
    while any(each.written < seen + ENOUGH for each, seen in zip(writers, before, strict=True)):
        assert [each.failed for each in writers] == [[] for _ in writers]
        assert time.monotonic() < until, "somebody does not get on"
        time.sleep(0.005)


def zombie(connection: psycopg.Connection, realm: str) -> str:
    """What becomes of a late write, with a token that was overtaken long ago."""
    try:
        with ORDERS.transaction(connection, stamp(1, 1, "orders/1", realm=realm)) as tx:
            tx.execute("UPDATE orders SET note = 'late' WHERE id = 1")
    except fenced.StaleToken:
        return "refused"
    return "let through"


def psql(url: str) -> str:
    """Somebody types a statement."""
    command = [
        "psql",
        url,
        "-qAt",
        "-v",
        "ON_ERROR_STOP=1",
        "-c",
        "UPDATE orders SET note = 'psql' WHERE id = 2",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "pgbouncer"])
def test_five_stages_under_load(
    pooled: bool, postgresql_server: PostgresqlServer, pgbouncer: Pgbouncer, postgresql_url: str
) -> None:
    database = postgresql_server.create_database()
    direct = postgresql_server.url(database)
    url = pgbouncer.url(database) if pooled else direct
    with psycopg.connect(direct, autocommit=True) as operator:
        operator.execute("CREATE TABLE orders (id integer PRIMARY KEY, qty integer NOT NULL, note text)")
        operator.execute("INSERT INTO orders SELECT id, 0 FROM generate_series(1, %s) AS id", [ROWS])
        with load(url, postgresql_url) as writers:
            go_on(writers)
            ORDERS.install(operator)  # observe: the table exists, and nobody has heard of leases
            go_on(writers)
            for each in writers[: WRITERS // 2]:
                each.stamped = True
            go_on(writers)
            realm = operator.execute("SELECT realm FROM fenced_guard.trust").fetchone()
            assert realm is not None
            late = psycopg.connect(url, autocommit=True, prepare_threshold=None, application_name="late")
            assert zombie(late, realm[0]) == "let through"
            ORDERS.set_mode(operator, "shadow")
            go_on(writers)
            assert zombie(late, realm[0]) == "let through"
            recorded = operator.execute(
                "SELECT verdict, application FROM fenced_guard.record WHERE ruling = 'record' GROUP BY 1, 2"
            ).fetchall()
            assert ("stale", "late") in recorded
            unstamped = {f"writer {each.row}" for each in writers if not each.stamped}
            assert {application for verdict, application in recorded if verdict == "missing"} == unstamped
            for each in writers:
                each.stamped = True
            go_on(writers)
            ORDERS.set_mode(operator, "canary(50%)")
            go_on(writers)
            ORDERS.set_mode(operator, "enforce")
            go_on(writers)
            assert zombie(late, realm[0]) == "refused"
            assert psql(url) == ""
            ORDERS.set_mode(operator, "require")
            go_on(writers)
            assert zombie(late, realm[0]) == "refused"
            assert "carries no stamp" in psql(url)
            late.close()
        assert [each.failed for each in writers] == [[] for _ in writers]
        total = operator.execute("SELECT sum(qty) FROM orders").fetchone()
        assert total == (sum(each.written for each in writers),)
        with pytest.raises(psycopg.DatabaseError) as caught:
            operator.execute("UPDATE orders SET qty = 0")
        assert isinstance(refusal(caught.value), fenced.MissingStamp)
