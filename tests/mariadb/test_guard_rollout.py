"""The five stages of the rollout, walked on a table of MariaDB while it is written to: no honest write fails.

And the commands of an operator, and a drill, on the same guard.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pymysql
import pytest

import fenced
from fenced.sql import Guard, refusal
from fenced.testing.kit import stamp
from fenced_testkit.servers import MariadbServer

ROWS = 4
WRITERS = 4
ENOUGH = 5
"""How many more writes each writer makes at each stage before the walk goes on."""
PATIENCE_SECONDS = 60.0
ORDERS = Guard(table="orders", name="orders/{id}")


def connected(server: MariadbServer, database: str) -> Any:
    return pymysql.connect(
        host=server.host, port=server.port, user="root", database=database, autocommit=True
    )


def run(db: Any, sql: str) -> list[tuple[Any, ...]]:
    with db.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


@dataclass
class Writer:
    """Adds one to a row, again and again: without a stamp until it is told to take leases."""

    row: int
    stamped: bool = False
    written: int = 0
    failed: list[BaseException] = field(default_factory=list)

    def write(self, db: Any, client: fenced.Client) -> None:
        statement = f"UPDATE orders SET qty = qty + 1 WHERE id = {self.row}"
        if not self.stamped:
            run(db, statement)
        else:
            name = ORDERS.name_for(id=self.row)
            with client.hold(name, ttl=10) as lease, ORDERS.transaction(db, lease):
                run(db, statement)
        self.written += 1

    def run(self, server: MariadbServer, database: str, authority: str, stop: threading.Event) -> None:
        try:
            with fenced.Client(authority) as client, connected(server, database) as db:
                while not stop.is_set():
                    self.write(db, client)
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failed.append(error)


@contextmanager
def load(server: MariadbServer, database: str, authority: str) -> Iterator[list[Writer]]:
    stop = threading.Event()
    writers = [Writer(1 + number % ROWS) for number in range(WRITERS)]
    threads = [
        threading.Thread(target=each.run, args=(server, database, authority, stop)) for each in writers
    ]
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


def zombie(db: Any, realm: str) -> str:
    """What becomes of a late write, with a token that was overtaken long ago."""
    try:
        with ORDERS.transaction(db, stamp(1, 1, "orders/1", realm=realm)):
            run(db, "UPDATE orders SET note = 'late' WHERE id = 1")
    except fenced.StaleToken:
        return "refused"
    return "let through"


def shell(server: MariadbServer, database: str) -> str:
    """Somebody types a statement."""
    program = shutil.which("mariadb")
    assert program is not None
    place = ["--no-defaults", "--skip-ssl", f"--host={server.host}", f"--port={server.port}", "--user=root"]
    command = [program, *place, database, "-e", "UPDATE orders SET note = 'typed' WHERE id = 2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


def verdicts(operator: Any) -> set[bytes]:
    """What was recorded under shadow."""
    own = "scope = CAST(DATABASE() AS BINARY) AND ruling = 'record'"
    return {
        found for (found,) in run(operator, f"SELECT DISTINCT verdict FROM fenced_guard.record WHERE {own}")
    }


def test_five_stages_under_load(mariadb_server: MariadbServer, postgresql_url: str) -> None:
    database = mariadb_server.create_database()
    with connected(mariadb_server, database) as operator:
        run(operator, "CREATE TABLE orders (id int PRIMARY KEY, qty int NOT NULL, note text) ENGINE = InnoDB")
        run(
            operator,
            f"INSERT INTO orders (id, qty) VALUES {', '.join(f'({n}, 0)' for n in range(1, ROWS + 1))}",
        )
        with load(mariadb_server, database, postgresql_url) as writers:
            go_on(writers)
            ORDERS.install(operator)  # observe: the table exists, and nobody has heard of leases
            go_on(writers)
            for each in writers[: WRITERS // 2]:
                each.stamped = True
            go_on(writers)
            own = "scope = CAST(DATABASE() AS BINARY)"
            ((found,),) = run(operator, f"SELECT realm FROM fenced_guard.trust WHERE {own}")
            realm = found.decode()
            late = connected(mariadb_server, database)
            assert zombie(late, realm) == "let through"
            ORDERS.set_mode(operator, "shadow")
            go_on(writers)
            until = time.monotonic() + PATIENCE_SECONDS
            # Nothing waits for a mark in this mode, so a write whose mark is locked just then is let through unjudged.
            while verdicts(operator) != {b"stale", b"missing"}:
                assert time.monotonic() < until, "no late write was recorded"
                assert zombie(late, realm) == "let through"
            for each in writers:
                each.stamped = True
            go_on(writers)
            ORDERS.set_mode(operator, "canary(50%)")
            go_on(writers)
            ORDERS.set_mode(operator, "enforce")
            go_on(writers)
            assert zombie(late, realm) == "refused"
            assert "ERROR" not in shell(mariadb_server, database)
            ORDERS.set_mode(operator, "require")
            go_on(writers)
            assert zombie(late, realm) == "refused"
            assert "carries no stamp" in shell(mariadb_server, database)
            late.close()
        assert [each.failed for each in writers] == [[] for _ in writers]
        assert run(operator, "SELECT SUM(qty) FROM orders") == [(sum(each.written for each in writers),)]
        with pytest.raises(pymysql.InternalError) as caught:
            run(operator, "UPDATE orders SET qty = 0")
        assert isinstance(refusal(caught.value), fenced.MissingStamp)


def command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fenced", *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands(mariadb_server: MariadbServer) -> None:
    database = mariadb_server.create_database()
    url = mariadb_server.url(database, scheme="mysql")
    with connected(mariadb_server, database) as db:
        run(db, "CREATE TABLE orders (id int PRIMARY KEY, qty int NOT NULL) ENGINE = InnoDB")
        run(db, "INSERT INTO orders VALUES (42, 0)")
        table = ("--table", "orders")
        assert "mode observe" in command("guard", "install", url, *table, "--name", "orders/{id}")
        run(db, "UPDATE orders SET qty = 1")
        assert "orders/{id}, rule retry" in command("guard", "status", url)
        assert "missing" in command("guard", "records", url)
        command("guard", "mode", url, *table, "shadow")
        names = ("--names", "orders/4*")
        command("guard", "override", url, *table, *names, "--for", "15m", "--why", "migration 42")
        command("guard", "override", url, *table, *names, "--end")
        assert "migration 42" in command("guard", "history", url)
        command("guard", "adopt", url, "00000000000000aa")
        command("guard", "tidy", url)
        assert "DELIMITER" in command("guard", "install", url, *table, "--name", "orders/{id}", "--print")
        command("guard", "upgrade", url)
        command("guard", "uninstall", url, *table)
        run(db, "UPDATE orders SET qty = 2")


def test_a_stopped_holder_in_a_drill(mariadb_server: MariadbServer) -> None:
    """The failure of the drill is real; the guard refuses the holder that wakes up."""
    url = mariadb_server.url(mariadb_server.create_database())
    told = json.loads(command("drill", "--guard", url, "--ttl", "0.5s", "--json"))
    assert told["verdict"] == "held", told
