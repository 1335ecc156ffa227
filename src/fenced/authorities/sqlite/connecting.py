"""Transactions on the authority's file, the connections under them, and what SQLite's errors mean."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from fenced import timing
from fenced.authorities.sqlite.filesystem import FileId
from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.runtime import clocks, forking

if TYPE_CHECKING:
    from fenced.authorities.sqlite.store import Store

T = TypeVar("T")
Log = tuple[FileId, FileId]
"""The files of a write-ahead log and of its index."""
PAUSE_FIRST = 0.0001
PAUSE_MAX = 0.005


class Deadline:
    """How long a call waits for the file's lock: until `until`, or until its caller is cancelled."""

    __slots__ = ("begun", "caller_gone", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.begun = False
        """A transaction was started: its outcome may be unknown."""
        self.caller_gone = False

    @classmethod
    def of(cls, seconds: float = timing.CALL_SECONDS) -> Deadline:
        return cls(clocks.now() + seconds)


def retry_while_locked(work: Callable[[], T], deadline: Deadline) -> T:
    """Run `work`; while the file is locked, pause and retry.

    Instead of SQLite's busy_timeout: its first pauses are longer than a hand-over takes, and it limits one statement
    only.
    """
    pause = PAUSE_FIRST
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            left = deadline.until - clocks.now()
            if not _is_busy(error) or left <= 0 or deadline.caller_gone:
                raise
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, PAUSE_MAX)


def _is_busy(error: sqlite3.Error) -> bool:
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


class StoreTransaction:
    """One transaction on an idle connection of the store, or on a new one."""

    __slots__ = ("_begin", "_connection", "_deadline", "_durable", "_store")

    def __init__(self, store: Store, durable: bool, deadline: Deadline | None, begin: str) -> None:
        self._store = store
        self._durable = durable
        self._deadline = Deadline.of() if deadline is None else deadline
        self._begin = begin
        self._connection: StoreConnection | None = None

    def __enter__(self) -> sqlite3.Connection:
        store = self._store
        store.refuse_if_lost()
        self._deadline.begun = True
        forking.enter()
        try:
            connection = retry_while_locked(self._start, self._deadline)
            store.check_files(connection)
        except BaseException as error:
            if self._connection is not None:
                store.discard(self._connection)
            forking.leave()
            if isinstance(error, sqlite3.Error):
                raise translate(error, store.path) from error
            raise
        return connection.db

    def _start(self) -> StoreConnection:
        connection = self._connection
        if connection is None:
            try:
                connection = self._store.idle.pop()
            except IndexError:
                connection = self._store.connect()
            self._connection = connection
        connection.prepare(self._durable)
        connection.db.execute(self._begin)
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, store = self._connection, self._store
        assert connection is not None
        try:
            if exc is None:
                connection.db.execute("COMMIT")
                store.put_back(connection)
                return
        except BaseException as error:
            store.discard(connection)
            if isinstance(error, sqlite3.Error):
                raise translate(error, store.path) from error
            raise
        finally:
            forking.leave()
        # Closing rolls back, and no later call uses a connection in an unclear state.
        store.discard(connection)
        if isinstance(exc, sqlite3.Error):
            raise translate(exc, store.path) from exc


class StoreConnection:
    """A connection and its `synchronous` setting. Grants and releases share one: a second one's cache is cold."""

    __slots__ = ("_durable", "db", "log")

    def __init__(self, db: sqlite3.Connection, log: Log) -> None:
        self.db = db
        self.log = log
        """The write-ahead log and its index that this connection has open."""
        self._durable: bool | None = None

    def prepare(self, durable: bool) -> None:
        """Sync commits to the disk, or leave that to the next grant."""
        if durable is not self._durable:
            self.db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable


def switch_to_wal(db: sqlite3.Connection) -> None:
    """Write ahead from now on."""
    if db.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        db.execute("PRAGMA journal_mode = WAL")


def translate(error: sqlite3.Error, path: Path) -> FencedError:
    """What an SQLite error means for the caller."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(
            f"{path} stayed locked by another process: {error}. A process that is stopped inside its "
            "transaction blocks the others until it continues or ends"
        )
    if code == sqlite3.SQLITE_FULL:
        return Unavailable(f"the disk under {path} is full; free some space and try again")
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHORT_READ:
        return Misconfigured(
            f"{path}: its write-ahead log is shorter than the processes that use it expect: perhaps {path.name}-wal "
            "was removed while they ran. Stop all processes that use the file, then start them again"
        )
    if code == sqlite3.SQLITE_IOERR:
        return Indeterminate(f"the disk under {path} failed: {error}")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN):
        return Misconfigured(
            f"{path} cannot be opened for writing ({error}); the file, its folder and the files "
            "beside it must be writable, and the file system not mounted read-only"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Misconfigured(
            f"{path} is damaged or not a database ({error}); restore it from a backup, then run "
            "`fenced authority raise`"
        )
    if code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_SCHEMA):
        return Misconfigured(f"{path} is not as fenced made it: {error}")
    return Unavailable(f"{path}: {error}")


_never_closed: list[StoreConnection] = []
"""Connections to a log that was removed and replaced. Closing one could write its log over newer data of others."""


def never_close(connection: StoreConnection) -> None:
    """Keep it open until the process ends: an extra reference keeps the interpreter from closing it at exit."""
    import ctypes  # not otherwise needed

    with contextlib.suppress(sqlite3.Error):
        connection.db.rollback()  # other processes may wait for the lock that it holds
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection.db))
    _never_closed.append(connection)
