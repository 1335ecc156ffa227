"""Sessions of PostgreSQL. The server says who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg
from psycopg.pq import TransactionStatus

from fenced_testkit.interleaving.scripts import AnyScript, ScriptOutcome, ScriptStep

DEADLOCK_TIMEOUT = "10ms"
"""When the server looks for a deadlock: it cannot resolve itself, and nobody should wait for it."""

_BLOCKERS = b"SELECT pid, pg_blocking_pids(pid) FROM unnest($1::integer[]) AS pid"


class PostgresqlSession:
    def __init__(self, url: str, deadlock_timeout: str) -> None:
        self._connection = psycopg.connect(url, cursor_factory=psycopg.RawCursor)
        self._connection.execute(f"SET deadlock_timeout = '{deadlock_timeout}'".encode())
        self._connection.commit()
        self.pid = self._connection.info.backend_pid

    def take(self, script: AnyScript) -> None:
        self._connection.autocommit = script.autocommit
        self._connection.isolation_level = psycopg.IsolationLevel[script.isolation.name]

    def execute(self, step: ScriptStep) -> ScriptOutcome:
        try:
            cursor = self._connection.execute(step.statement.encode(), step.parameters or None)
            rows = tuple(cursor.fetchall()) if cursor.description else ()
        except psycopg.Error as error:
            if error.sqlstate is None:
                raise  # the connection is lost, or the script is wrong
            return ScriptOutcome(code=error.sqlstate, message=error.diag.message_primary or "")
        return ScriptOutcome(rows, cursor.statusmessage or "")

    def in_transaction(self) -> bool:
        return self._connection.info.transaction_status != TransactionStatus.IDLE

    def close(self) -> None:
        self._connection.close()


class PostgresqlEngine:
    def __init__(self, url: str, deadlock_timeout: str = DEADLOCK_TIMEOUT) -> None:
        self._url = url
        self._deadlock_timeout = deadlock_timeout
        self._watch = psycopg.connect(url, autocommit=True, cursor_factory=psycopg.RawCursor)

    def connect(self) -> PostgresqlSession:
        return PostgresqlSession(self._url, self._deadlock_timeout)

    def blockers(self, pids: Sequence[int]) -> Mapping[int, frozenset[int]]:
        rows = self._watch.execute(_BLOCKERS, [list(pids)]).fetchall()
        return {pid: frozenset(blockers) for pid, blockers in rows}

    def cancel(self, pid: int) -> None:
        self._watch.execute(b"SELECT pg_cancel_backend($1)", [pid])

    def close(self) -> None:
        self._watch.close()
