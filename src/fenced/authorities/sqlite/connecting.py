"""Transactions on the authority's file, the connections under them, and what SQLite's errors mean."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.runtime import forking

if TYPE_CHECKING:
    from fenced.authorities.sqlite.store import Store

BUSY_SECONDS = 5.0
PAUSE_FIRST = 0.0001
PAUSE_MAX = 0.005


class Transaction:
    """One transaction on an idle connection of the store, or on a new one."""

    __slots__ = ("_begin", "_checked", "_connection", "_durable", "_store", "_timeout")

    def __init__(self, store: Store, durable: bool, timeout: float | None, begin: str, checked: bool) -> None:
        self._store = store
        self._checked = checked
        self._durable = durable
        self._timeout = BUSY_SECONDS if timeout is None else timeout
        self._begin = begin

    def __enter__(self) -> sqlite3.Connection:
        store = self._store
        forking.enter()
        connection = None
        try:
            try:
                connection = store._idle.pop()
            except IndexError:
                connection = store._connect()
            connection.prepare(self._durable)
            _begin(connection.db, self._begin, self._timeout)
            if self._checked:
                store._check_same_file()
        except BaseException as error:
            if connection is not None:
                connection.db.close()
            forking.leave()
            if isinstance(error, sqlite3.Error):
                raise translate(error, store.path) from error
            raise
        self._connection = connection
        return connection.db

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, store = self._connection, self._store
        try:
            if exc is None:
                connection.db.execute("COMMIT")
                store._idle.append(connection)
                return
        except BaseException as error:
            connection.db.close()
            if isinstance(error, sqlite3.Error):
                raise translate(error, store.path) from error
            raise
        finally:
            forking.leave()
        connection.db.close()  # rolls back; a fresh connection costs less than doubts about this one
        if isinstance(exc, sqlite3.Error):
            raise translate(exc, store.path) from exc


class Connection:
    """A connection, and what it is set to. One serves grants and releases: a second one's cache is cold."""

    __slots__ = ("_durable", "db")

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self._durable: bool | None = None

    def prepare(self, durable: bool) -> None:
        """Sync commits to the disk, or leave that to the next grant."""
        if durable is not self._durable:
            self.db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable


def _begin(db: sqlite3.Connection, begin: str, timeout: float) -> None:
    """Begin, waiting for the lock in small steps: SQLite's own first ones take longer than a hand-over does."""
    pause, give_up = PAUSE_FIRST, 0.0
    while True:
        try:
            db.execute(begin)
            return
        except sqlite3.OperationalError as error:
            now = time.monotonic()
            give_up = give_up or now + timeout
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or now >= give_up:
                raise
        time.sleep(pause)
        pause = min(pause * 1.5, PAUSE_MAX)


def switch_to_wal(db: sqlite3.Connection) -> None:
    """Write ahead from now on. SQLite does not wait for its lock here, so we do."""
    give_up = time.monotonic() + BUSY_SECONDS
    while db.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() >= give_up:
                raise
            time.sleep(0.005)


def translate(error: sqlite3.Error, path: Path) -> FencedError:
    """What an SQLite error means for the caller."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(
            f"{path} stayed locked by another process: {error}. A process that is stopped inside its "
            "transaction blocks the others until it goes on or ends"
        )
    if code == sqlite3.SQLITE_FULL:
        return Unavailable(f"the disk under {path} is full; free some space and try again")
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
