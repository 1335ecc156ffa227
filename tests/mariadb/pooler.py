"""A pooler in transaction mode, as ProxySQL and MaxScale are: each transaction gets whichever session is free."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from types import TracebackType
from typing import Any, Self

import pymysql
from pymysql.constants import CLIENT

from fenced.drills.relay.ports import HOST

_OK, _END, _REFUSED = 0x00, 0xFE, 0xFF
_IN_TRANSACTION, _MORE_RESULTS = 0x0001, 0x0008
_QUIT, _PING = b"\x01", b"\x0e"
_CAPABILITIES = 0x00_0F_A2_0F
"""Protocol 4.1, transactions, several statements and results, plugins; no TLS, and the old form of ends."""
_STATE = (
    "SELECT @@session.wait_timeout = @@global.wait_timeout, @@session.autocommit, "
    "@@session.sql_mode = @@global.sql_mode"
)


class TransactionPooler:
    """It takes every password. `sessions` are its own on the server; `transactions` counts what they were given."""

    def __init__(self, port: int, database: str, *, sessions: int = 4) -> None:
        self.host = HOST
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._server: dict[str, Any] = {"host": HOST, "port": port, "user": "root", "database": database}
        self._sessions = [self._connected() for _ in range(sessions)]
        for session in self._sessions:
            self._idle.put(session)
        self.transactions = [0] * sessions
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._links: list[socket.socket] = []
        self._numbers = itertools.count(1)
        threading.Thread(target=self._accept, daemon=True).start()

    def _connected(self) -> Any:
        return pymysql.connect(**self._server, autocommit=True, client_flag=CLIENT.MULTI_STATEMENTS)

    def reconnect(self) -> None:
        """All are free, and the server was restarted: its clients notice nothing."""
        for number, _ in enumerate(self._sessions):
            self._idle.get(timeout=20).close()
            self._sessions[number] = self._connected()
        for session in self._sessions:
            self._idle.put(session)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for session in self._sessions:
            with contextlib.suppress(pymysql.Error):
                session.close()

    def states(self) -> list[tuple[Any, ...]]:
        """What is left in each session, once all are free: the same as in a new one, if nothing was forgotten."""
        sessions = [self._idle.get(timeout=20) for _ in self._sessions]
        found = []
        for session in sessions:
            with session.cursor() as cursor:
                cursor.execute(_STATE)
                found += cursor.fetchall()
            self._idle.put(session)
        return found

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                link, _ = self._listener.accept()
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._links.append(link)
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        reader = link.makefile("rb")
        session = None
        with contextlib.suppress(OSError, EOFError, pymysql.Error), link:
            link.sendall(_packet(0, self._greeting()))
            _read(reader)
            link.sendall(_packet(2, b"\0\0\0\x02\0\0\0"))
            while (asked := _read(reader))[1][:1] != _QUIT:
                if session is None:
                    session = self._idle.get(timeout=60)
                    self.transactions[self._sessions.index(session)] += 1
                if not self._pass_on(session, asked[1], link):
                    self._idle.put(session)
                    session = None
        if session is not None:  # its client has left in the middle of a transaction
            with session.cursor() as cursor:
                cursor.execute("ROLLBACK")
                cursor.execute("SET wait_timeout = DEFAULT")
            self._idle.put(session)

    def _greeting(self) -> bytes:
        number = next(self._numbers).to_bytes(4, "little")
        low, high = _CAPABILITIES & 0xFFFF, _CAPABILITIES >> 16
        flags = low.to_bytes(2, "little") + b"\x2d\x02\0" + high.to_bytes(2, "little")
        return b"\x0a10.11.0-pooler\0%b12345678\0%b\x15%b123456789012\0mysql_native_password\0" % (
            number,
            flags,
            bytes(10),
        )

    def _pass_on(self, session: Any, command: bytes, link: socket.socket) -> bool:
        """One command and its whole reply. Returns whether the session is in a transaction after it."""
        session._sock.sendall(_packet(0, command))
        more, status = True, 0
        while more:
            first = _forwarded(session, link)
            if first[0] == _REFUSED:
                return _status_now(session)
            if first[0] == _OK:
                status = _status_of_ok(first)
            else:  # columns and rows, each with an end
                for _ in range(2):
                    while not ((row := _forwarded(session, link))[0] == _END and len(row) < 9):
                        pass
                status = int.from_bytes(row[3:5], "little")
            more = bool(status & _MORE_RESULTS)
        return bool(status & _IN_TRANSACTION)


def _packet(sequence: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "little") + bytes([sequence]) + body


def _read(reader: Any) -> tuple[int, bytes]:
    head = reader.read(4)
    if len(head) < 4:
        raise EOFError
    return head[3], reader.read(int.from_bytes(head[:3], "little"))


def _forwarded(session: Any, link: socket.socket) -> bytes:
    sequence, body = _read(session._rfile)
    link.sendall(_packet(sequence, body))
    return body


def _status_of_ok(body: bytes) -> int:
    numbers = body[1:]
    for _ in range(2):  # changed rows and the last id: a byte, or a length and the bytes
        numbers = numbers[1 + {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(numbers[0], 0) :]
    return int.from_bytes(numbers[:2], "little")


def _status_now(session: Any) -> bool:
    session._sock.sendall(_packet(0, _PING))
    return bool(_status_of_ok(_read(session._rfile)[1]) & _IN_TRANSACTION)
