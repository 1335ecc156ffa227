"""One connection to PostgreSQL, spoken to through libpq without ever blocking: the runtime does the waiting.

One statement is one transaction and one round trip. Whatever the server says meanwhile besides its answer is
kept: a warning during the commit of a grant makes that grant unknown.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import DiagnosticField, PollingStatus
from psycopg.pq.abc import PGconn, PGresult

from fenced.contracts import Runtime
from fenced.errors import Misconfigured, Unavailable
from fenced.runtime.pool import Broken

Row = tuple[bytes | None, ...]

# Beginnings of error codes, as in PostgreSQL's own table.
_CONNECTION_LOST = ("08", "57P01", "57P02", "57P03", "57P05")
_STANDBY = ("25006",)
_FORBIDDEN = ("42501", "28", "3D000")
_NO_SCHEMA = ("3F000", "42883", "42P01")
_PREPARED_ELSEWHERE = ("26000", "42P05")


class _PreparedElsewhere(Exception):
    """Another server process than the one that has our prepared statements: nothing was done."""


class Session:
    """A connection. Its statements are prepared where the server on the other side stays the same."""

    def __init__(self, connection: PGconn, runtime: Runtime, where: str) -> None:
        self._connection = connection
        self._runtime = runtime
        self._where = where
        self._prepared: set[bytes] = set()
        self.pooled = False
        """A pooler answers, and every transaction may meet another server process."""
        self.warnings: list[str] = []
        connection.notice_handler = self._noticed

    @classmethod
    async def connect(cls, conninfo: str, runtime: Runtime, where: str, until: float) -> Session:
        """Connect; Unavailable when that fails or takes too long, Misconfigured when it cannot succeed.

        Of several hosts each gets its share of the time: one that is silent must not use up all of it.
        """
        try:
            text = make_conninfo(conninfo, client_encoding="UTF8", fallback_application_name="fenced")
            hosts = _one_by_one(conninfo_to_dict(text))
        except (psycopg.Error, ValueError):
            # Without the cause: it quotes the address.
            raise Misconfigured(f"{where}: libpq does not understand this address") from None
        while True:
            host = hosts.pop(0)
            share = (until - runtime.now()) / (len(hosts) + 1)
            share = min(share, float(host.get("connect_timeout") or share) or share)
            try:
                return await cls._connect(make_conninfo("", **host), runtime, where, runtime.now() + share)
            except (Unavailable, Misconfigured):
                if not hosts:
                    raise

    @classmethod
    async def _connect(cls, conninfo: str, runtime: Runtime, where: str, until: float) -> Session:
        # In a worker where that matters: it looks names up, which may take a while.
        connection = await runtime.call(pq.PGconn.connect_start, conninfo.encode())
        session = cls(connection, runtime, where)
        try:
            await session._finish_connecting(until)
            connection.nonblocking = 1
            await session._tell_pooler(until)
        except Broken as error:
            session.close()
            raise Unavailable(str(error)) from error  # nothing was asked for yet
        except BaseException:
            session.close()
            raise
        return session

    async def _finish_connecting(self, until: float) -> None:
        while True:
            status = self._connection.connect_poll()
            if status == PollingStatus.OK:
                return
            if status == PollingStatus.FAILED:
                message = _text(self._connection.error_message)
                forbidden = any(sign in message for sign in ("authentication failed", "no pg_hba.conf entry"))
                kind = Misconfigured if forbidden or "does not exist" in message else Unavailable
                raise kind(f"{self._where}: {message}")
            waiting = self._runtime.writable if status == PollingStatus.WRITING else self._runtime.readable
            if not await waiting(self, until):
                raise Unavailable(f"{self._where}: no connection in time")

    async def _tell_pooler(self, until: float) -> None:
        """The process that answers is not the one we were connected to: there is a pooler between."""
        ((pid,),) = await self.run(b"", b"SELECT pg_backend_pid()", (), until)
        self.pooled = int(pid or 0) != self._connection.backend_pid

    def fileno(self) -> int:
        return self._connection.socket

    def _noticed(self, result: PGresult) -> None:
        if result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED) == b"WARNING":
            self.warnings.append(_text(result.error_field(DiagnosticField.MESSAGE_PRIMARY)))

    async def run(
        self, name: bytes, statement: bytes, parameters: Sequence[bytes | None], until: float
    ) -> list[Row]:
        """The rows of one statement. `Broken` when the connection broke or the answer did not come in time."""
        self.warnings.clear()
        try:
            if name and not self.pooled:
                try:
                    return await self._run_prepared(name, statement, parameters, until)
                except _PreparedElsewhere:
                    self.pooled = True
            self._connection.send_query_params(statement, parameters)
            return await self._results(until)
        except (psycopg.Error, OSError) as error:
            raise Broken(f"{self._where}: {error}") from error

    async def _run_prepared(
        self, name: bytes, statement: bytes, parameters: Sequence[bytes | None], until: float
    ) -> list[Row]:
        if name not in self._prepared:
            self._connection.send_prepare(name, statement)
            await self._results(until)
            self._prepared.add(name)
        self._connection.send_query_prepared(name, parameters)
        return await self._results(until)

    async def script(self, statements: bytes, until: float) -> None:
        """Several statements in one transaction."""
        try:
            self._connection.send_query(statements)
            await self._results(until)
        except (psycopg.Error, OSError) as error:
            raise Broken(f"{self._where}: {error}") from error

    async def _results(self, until: float) -> list[Row]:
        connection, runtime = self._connection, self._runtime
        while connection.flush():
            if not await runtime.writable(self, until):
                raise Broken(f"{self._where}: the request could not be sent in time")
        rows: list[Row] = []
        failure: Exception | None = None
        while True:
            while connection.is_busy():
                if not await runtime.readable(self, until):
                    raise Broken(f"{self._where}: no answer in time")
                connection.consume_input()
            result = connection.get_result()
            if result is None:
                break
            if result.error_message:
                failure = failure or self._failure(result)
            for row in range(result.ntuples):
                rows.append(tuple(result.get_value(row, column) for column in range(result.nfields)))
        if failure is not None:
            raise failure
        return rows

    def _failure(self, result: PGresult) -> Exception:
        """What an error of the server means. Its transaction was rolled back, unless the server went away."""
        code = _text(result.error_field(DiagnosticField.SQLSTATE))
        message = f"{self._where}: {_text(result.error_field(DiagnosticField.MESSAGE_PRIMARY))} ({code})"
        severity = result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED)
        if not code or severity in (b"FATAL", b"PANIC") or code.startswith(_CONNECTION_LOST):
            return Broken(message)
        if code in _PREPARED_ELSEWHERE:
            return _PreparedElsewhere()
        if code == "ZFA01":
            return Misconfigured(
                f"{message}. A standby was promoted, or this was restored from a backup, and tokens may be missing "
                "here that guards have seen: run `fenced authority raise --above N` first"
            )
        if code == "ZFA02":
            return Misconfigured(f"{message}; start a new namespace")
        if code == "ZFA03":
            return Misconfigured(
                f"{message}: ALTER ROLE ... SET default_transaction_isolation = 'read committed'"
            )
        if code.startswith(_STANDBY):
            return Unavailable(f"{message}: this is a standby, or set to read only")
        if code.startswith(_FORBIDDEN):
            return Misconfigured(
                f"{message}: a holder needs USAGE on schema fenced; an operator also EXECUTE on force_release and "
                "raise_floor"
            )
        if code.startswith(_NO_SCHEMA):
            return Misconfigured(f"{message}: the schema fenced is missing or not ours")
        return Unavailable(message)  # locked too long, cancelled, out of disk or connections ...

    async def listen(self, channel: str, until: float) -> None:
        await self.run(b"", f'LISTEN "{channel}"'.encode(), (), until)

    async def notified(self, until: float) -> list[str]:
        """Wait for notifications; the payloads of those that came."""
        heard = self._notifications()
        while not heard and await self._runtime.readable(self, until):
            try:
                self._connection.consume_input()
            except psycopg.Error as error:
                raise Unavailable(f"{self._where}: {error}") from error
            heard = self._notifications()
        return heard

    def _notifications(self) -> list[str]:
        heard = []
        while (notification := self._connection.notifies()) is not None:
            heard.append(notification.extra.decode())
        return heard

    def hang_up(self) -> None:
        """End the connection from another thread: who reads from it wakes up."""
        with (
            contextlib.suppress(OSError, psycopg.Error),  # closed already
            socket.socket(fileno=os.dup(self.fileno())) as other,
        ):
            other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.finish()


def _one_by_one(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The same address for each of its hosts."""
    lists = {key: str(options[key]).split(",") for key in ("host", "hostaddr", "port") if options.get(key)}
    count = max((len(values) for values in lists.values()), default=1)
    columns = {key: values * count if len(values) == 1 else values for key, values in lists.items()}
    return [
        {**options, **{key: values[number] for key, values in columns.items()}} for number in range(count)
    ]


def _text(message: bytes | str | None) -> str:
    text = message.decode(errors="replace") if isinstance(message, bytes) else message or ""
    return " ".join(text.split())
