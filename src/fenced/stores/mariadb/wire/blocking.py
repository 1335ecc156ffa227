"""PyMySQL with a deadline for the whole of a call, where its own timeouts begin anew with every read."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Any

import pymysql
from pymysql.connections import Connection
from pymysql.constants import CLIENT

from fenced.net.pool import ConnectionBroken
from fenced.runtime.sockets import NOT_NOW
from fenced.stores.mariadb.address import MariadbAddress
from fenced.stores.mariadb.wire.connection import QUIT, Result
from fenced.stores.mariadb.wire.failures import NO_LOGIN, NO_TLS, ServerRefusal, connection_lost
from fenced.values.contracts import Endpoint, Runtime

_READ_BYTES = 65_536
_SLICE_SECONDS = 1.0
"""The longest single wait: the timer of a socket stands still while the machine is suspended."""


class _Deadlined(Connection):
    """Reads and writes until `until`, however the bytes arrive."""

    _sock: Any
    _secure: bool
    runtime: Runtime
    until: float
    _unread = b""

    def _waiting(self) -> None:
        left = self.until - self.runtime.now()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(min(left, _SLICE_SECONDS))

    def _read_bytes(self, num_bytes: int) -> bytes:
        unread = self._unread
        while len(unread) < num_bytes:
            late = self.runtime.now() >= self.until
            self._sock.settimeout(0.0) if late else self._waiting()
            try:
                chunk = self._sock.recv(_READ_BYTES)
            except (TimeoutError, *NOT_NOW):
                if late:  # bytes that arrived in time count, however late this thread runs
                    raise TimeoutError("no answer in time") from None
                continue
            if not chunk:
                raise ConnectionError("the server closed the connection")
            unread += chunk
        self._unread = unread[num_bytes:]
        return unread[:num_bytes]

    def _write_bytes(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._waiting()
            with contextlib.suppress(TimeoutError):
                view = view[self._sock.send(view) :]

    def drop(self, farewell: bytes) -> None:
        """Close the socket without waiting; with a farewell, which there is nearly always room for."""
        if farewell and self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.settimeout(0.0)
                self._sock.send(farewell)
        self._force_close()  # type: ignore[attr-defined]


class PymysqlDriver:
    def __init__(self, connection: _Deadlined, where: str) -> None:
        self._connection = connection
        self._where = where
        self._idle = True

    @classmethod
    async def connect(
        cls, endpoint: Endpoint, address: MariadbAddress, runtime: Runtime, until: float
    ) -> PymysqlDriver:
        where = address.named(endpoint)
        try:
            link: Any = await runtime.connect(endpoint, until)
        except OSError as error:
            raise ConnectionBroken(f"{where}: {error}") from error
        host = endpoint if isinstance(endpoint, str) else endpoint[0]
        try:
            connection = _Deadlined(
                host=host,
                user=address.user,
                password=(address.password or "").encode(),
                database=address.database,
                charset="utf8mb4",
                autocommit=True,
                client_flag=CLIENT.MULTI_STATEMENTS,
                program_name="fenced",
                read_timeout=max(until - runtime.now(), 0.001),  # for the handshake of TLS
                ssl=address.context if address.tls else None,
                ssl_disabled=not address.tls,
                defer_connect=True,
            )
            connection.runtime, connection.until = runtime, until
            connection._secure = isinstance(endpoint, str)
            connection.connect(link)
        except BaseException as error:
            link.close()
            raise _translated(error, where, 0) from error
        return cls(connection, where)

    async def run(self, script: str, until: float) -> list[Result]:
        connection = self._connection
        connection.until, self._idle = until, False
        results: list[Result] = []
        try:
            connection.query(script)
            while True:
                result: Any = connection._result  # type: ignore[attr-defined]
                results.append(Result(result.rows or (), result.insert_id or 0, result.affected_rows or 0))
                if not result.has_next:
                    break
                connection.next_result()
        except BaseException as error:
            translated = _translated(error, self._where, len(results))
            self._idle = isinstance(translated, ServerRefusal)
            raise translated from error
        self._idle = True
        return results

    def interrupt(self) -> None:
        link = self._connection._sock
        if link is not None:
            with contextlib.suppress(OSError):  # closed just now
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.drop(QUIT if self._idle else b"")


def _translated(error: BaseException, where: str, at: int) -> BaseException:
    if isinstance(error, pymysql.Error):
        if isinstance(getattr(error, "original_exception", None), ssl.SSLCertVerificationError):
            return ServerRefusal(NO_TLS, str(error.args[1]), at)
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        if code and not connection_lost(code):
            return ServerRefusal(code, str(error.args[1]), at)
    if isinstance(error, RuntimeError):  # a package is missing that the account's way to log in needs
        return ServerRefusal(NO_LOGIN, str(error), at)
    if isinstance(error, pymysql.Error | OSError | ValueError):
        return ConnectionBroken(f"{where}: {error}")
    return error
