"""Contested writes to one row of a table of MariaDB or MySQL: is a stale one admitted, is an acknowledged one lost?

Each holder takes the next token, announces it, reads the row, adds one in the program, and writes the sum back. While
it waits, others take higher tokens, so many come too late. The control does the same in plain transactions.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from typing import Any

import pymysql

from evidence import mysql
from fenced.errors import Conflict, Contended, StaleToken
from fenced.sql import Guard
from fenced.testing.kit import stamp
from fenced_testkit.servers import MariadbServer
from fenced_testkit.servers.mysql import MysqlServer

ATTEMPTS = 5_000
HOLDERS = 8
LEVELS = ("READ COMMITTED", "REPEATABLE READ")
PAUSE_SECONDS = 0.002
"""The longest pause of a holder between its token and its announcement."""
NAME = "accounts/1"
ACCOUNTS = Guard(table="accounts", name="accounts/{id}")
READ, WRITE = "SELECT n FROM accounts WHERE id = 1", "UPDATE accounts SET n = {} WHERE id = 1"
LOG = "INSERT INTO admitted (token) VALUES ({})"


def run() -> dict[str, Any]:
    """On MariaDB, and on MySQL if it can be had."""
    with MariadbServer() as server:
        found: dict[str, Any] = {"mariadb": on(server, ATTEMPTS)}
    try:
        root = mysql.unpack()
    except mysql.NotToBeHad as why:
        return {**found, "mysql": {"not_run": str(why)}}
    with MysqlServer(root) as server:
        return {**found, "mysql": on(server, ATTEMPTS)}


def on(server: MariadbServer, attempts: int) -> dict[str, Any]:
    """Each isolation level with the guard and without."""
    return {
        level: {
            "guarded": contend(server, level, attempts, guarded=True),
            "control": contend(server, level, attempts // 5, guarded=False),
        }
        for level in LEVELS
    }


def contend(server: MariadbServer, level: str, attempts: int, *, guarded: bool) -> dict[str, Any]:
    """Holders on one row until there were so many attempts."""
    database = server.create_database()

    def connect() -> Any:
        where: dict[str, Any] = {
            "host": server.host,
            "port": server.port,
            "user": "root",
            "database": database,
        }
        made = pymysql.connect(**where, autocommit=True)
        made.query(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        return made

    with connect() as db:
        db.query("CREATE TABLE accounts (id int PRIMARY KEY, n int NOT NULL) ENGINE = InnoDB")
        db.query("INSERT INTO accounts VALUES (1, 0)")
        db.query("CREATE TABLE admitted (id int AUTO_INCREMENT PRIMARY KEY, token int) ENGINE = InnoDB")
        if guarded:
            ACCOUNTS.install(db, mode="require")
        tokens, outcomes = itertools.count(1), Counter[str]()
        crew = [
            threading.Thread(target=_hold, args=(connect, tokens, attempts, outcomes, guarded))
            for _ in range(HOLDERS)
        ]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        (((last,),), log) = (_rows(db, sql) for sql in (READ, "SELECT token FROM admitted ORDER BY id"))
    order = [token for (token,) in log]
    return {
        "attempts": sum(outcomes.values()),
        **outcomes,
        "lost": outcomes["acknowledged"] - last,
        "admitted_after_a_newer_one": sum(later < earlier for earlier, later in itertools.pairwise(order)),
    }


def _rows(db: Any, sql: str) -> list[tuple[Any, ...]]:
    with db.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


def _hold(
    connect: Any, tokens: itertools.count[int], attempts: int, outcomes: Counter[str], guarded: bool
) -> None:
    with connect() as db:
        while (token := next(tokens)) <= attempts:
            time.sleep(random.random() * PAUSE_SECONDS)
            try:
                _attempt(db, token, guarded)
            except StaleToken:
                outcomes["refused_as_stale"] += 1
            except (
                Conflict,
                Contended,
                pymysql.OperationalError,
            ) as error:  # the control's own deadlocks, too
                outcomes[type(error).__name__] += 1
            else:
                outcomes["acknowledged"] += 1


def _attempt(db: Any, token: int, guarded: bool) -> None:
    if guarded:
        with ACCOUNTS.transaction(db, stamp(token, 1, NAME)):
            _add(db, token)
        return
    try:
        db.query("START TRANSACTION")
        _add(db, token)
        db.query("COMMIT")
    except pymysql.Error:
        db.query("ROLLBACK")
        raise


def _add(db: Any, token: int) -> None:
    ((n,),) = _rows(db, READ)
    db.query(WRITE.format(n + 1))
    db.query(LOG.format(token))
