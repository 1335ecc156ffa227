"""Sessions of MariaDB and MySQL. The server says at once who waits for a row lock, but not for whom.

`INFORMATION_SCHEMA.INNODB_LOCK_WAITS` would say both, but MariaDB answers from a copy that it renews only after nobody
has asked for 100 ms. `SHOW ENGINE INNODB STATUS` reads the locks as they are, under the latch of the lock system.
InnoDB looks for a deadlock when a session begins to wait, so sessions that wait never wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pymysql
from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS

from fenced_testkit.interleaving.scripts import AnyScript, ScriptOutcome, ScriptStep

_WAITING = """
SELECT t.PROCESSLIST_ID FROM performance_schema.data_lock_waits w
JOIN performance_schema.threads t ON t.THREAD_ID = w.REQUESTING_THREAD_ID"""
_THREAD = re.compile(r"^(?:MariaDB|MySQL) thread id (\d+)", re.MULTILINE)


class MariadbSession:
    def __init__(self, connection: Any) -> None:  # of PyMySQL, whose types lack what is used here
        self._connection = connection
        self.pid: int = self._connection.thread_id()

    def take(self, script: AnyScript) -> None:
        self._connection.autocommit(script.autocommit)
        with self._connection.cursor() as cursor:
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {script.isolation.value}")

    def execute(self, step: ScriptStep) -> ScriptOutcome:
        rows: list[tuple[Any, ...]] = []
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(step.statement, step.parameters or None)
                rows += cursor.fetchall()
                while cursor.nextset():  # a procedure has an outcome after its rows, and it may be an error
                    rows += cursor.fetchall()
                changed = cursor.rowcount
        except pymysql.Error as error:
            if len(error.args) < 2 or not self._connection.open:
                raise  # the connection is lost, or the script is wrong
            return ScriptOutcome(code=str(error.args[0]), message=str(error.args[1]))
        word = step.statement.split()[0].upper()
        return ScriptOutcome(tuple(rows), word if word in ("COMMIT", "ROLLBACK") else f"{word} {changed}")

    def in_transaction(self) -> bool:
        self._connection.ping(reconnect=False)  # an error does not say what became of the transaction
        return bool(self._connection.server_status & SERVER_STATUS_IN_TRANS)

    def close(self) -> None:
        self._connection.close()


class MariadbEngine:
    """`connect` opens a connection of somebody who may see all sessions (PROCESS) and end their statements."""

    def __init__(self, connect: Callable[[], pymysql.Connection[Any]]) -> None:
        self._connect = connect
        self._pids: set[int] = set()
        self._watch: Any = connect()

    def connect(self) -> MariadbSession:
        session = MariadbSession(self._connect())
        self._pids.add(session.pid)
        return session

    def blockers(self, pids: Sequence[int]) -> Mapping[int, frozenset[int]]:
        """Who waits, and in place of those that it waits for: all that have a transaction, and do not wait."""
        with self._watch.cursor() as cursor:
            cursor.execute("SHOW ENGINE INNODB STATUS")
            ((_, _, status),) = cursor.fetchall()
        waiting: set[int] = set()
        others: set[int] = set()
        for transaction in status.split("\n---TRANSACTION ")[1:]:
            _, _, told = transaction.partition(", ")
            if told.startswith("ACTIVE") and (thread := _THREAD.search(told)):
                (waiting if "\nLOCK WAIT " in told else others).add(int(thread[1]))
        # MySQL does not list transactions that have written nothing. So some who wait are in its performance schema
        # alone, and a blocker may be anybody who does not wait.
        waiting |= self._waiting_on_mysql()
        blockers = others & self._pids or self._pids - waiting
        return {pid: frozenset(blockers if pid in waiting else ()) for pid in pids}

    def _waiting_on_mysql(self) -> set[int]:
        if "mariadb" in self._watch.get_server_info().lower():
            return set()
        with self._watch.cursor() as cursor:
            cursor.execute(_WAITING)
            return {pid for (pid,) in cursor.fetchall()}

    def cancel(self, pid: int) -> None:
        with self._watch.cursor() as cursor:
            cursor.execute("KILL QUERY %s", (pid,))

    def close(self) -> None:
        self._watch.close()
