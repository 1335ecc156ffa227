"""The authority's file: connections, transactions, whether it is still the same file, and what SQLite's errors mean."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from fenced.errors import Misconfigured
from fenced.net.filesystem import NO_FILE, FileId, file_id
from fenced.runtime import clocks, forking
from fenced.stores.sqlite.failures import never_close, translate
from fenced.values import timing

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


class LeaseFile:
    """The database file, and the connections to it. Safe to use from many threads: each transaction has its own.

    `idle` is a list whose `append` and `pop` are atomic, so no lock is needed: a connection is either in the list, or
    used by the one thread that popped it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.idle: list[StoreConnection] = []
        self._paths = (str(path), f"{path}-wal", f"{path}-shm")
        self._id = NO_FILE
        self._lost = ""
        self._abandoned = False

    def opened(self) -> None:
        """Remember which file the path leads to. Every transaction checks that it is still the same file."""
        self._abandoned = False
        if self._id == NO_FILE:
            self._id = file_id(self._paths[0])

    def transaction(
        self, deadline: Deadline | None = None, *, durable: bool, begin: str = "BEGIN IMMEDIATE"
    ) -> StoreTransaction:
        """With BEGIN IMMEDIATE the file's write lock is taken first: read the clock afterwards."""
        return StoreTransaction(self, durable, Deadline.of() if deadline is None else deadline, begin)

    def take(self) -> StoreConnection:
        """An idle connection, or a new one."""
        # No lock: `pop` is one step, so no two threads get the same connection.
        try:
            return self.idle.pop()
        except IndexError:
            return self._connect()

    def _connect(self) -> StoreConnection:
        # `mode=rw`: SQLite must not create an empty file in place of one that was moved away.
        address = self.path.as_uri() + "?mode=rw"
        # timeout=0: SQLite itself does not wait for a lock; `retry_while_locked` does, until the call's deadline.
        db = sqlite3.connect(address, timeout=0, isolation_level=None, check_same_thread=False, uri=True)
        try:
            mode = db.execute("PRAGMA journal_mode").fetchone()[0]  # this also opens the log
            if mode != "wal":
                raise Misconfigured(f"{self.path} has journal_mode {mode}; tokens need wal")
        except BaseException:
            db.close()
            raise
        return StoreConnection(db, self._log())

    def put_back(self, connection: StoreConnection) -> None:
        """Appended before the flags are read: either `close` finds the connection in the list, or we see its flag."""
        self.idle.append(connection)
        if self._lost or self._abandoned:
            self.close_idle()

    def discard(self, connection: StoreConnection) -> None:
        pairs = zip(self._log(), connection.log, strict=True)
        if any(now not in (NO_FILE, before) for now, before in pairs):
            never_close(connection.db)
        else:
            connection.db.close()

    def close_idle(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                self.discard(self.idle.pop())

    def close(self) -> None:
        """Close the idle connections; one that is in use is closed by `put_back`. Never waits, may be repeated."""
        self._abandoned = True
        self.close_idle()

    # Whether the files are still the same.

    def check_files(self, connection: StoreConnection) -> None:
        """The path must still lead to the file that was opened, and to the log that this connection writes.

        Checked inside the transaction, before its first read. Other processes do not see the contents of a log that
        was removed, and writes to it are lost.
        """
        if self._id == NO_FILE:
            return  # not yet opened
        if file_id(self._paths[0]) != self._id:
            raise Misconfigured(
                f"{self.path} was removed or replaced while this process had it open; restart the "
                "process, and after a restore from backup run `fenced authority raise` first"
            )
        if self._log() != connection.log:
            self._log_was_lost()
            self.refuse_if_lost()

    def _log(self) -> Log:
        _, wal, shm = self._paths
        return file_id(wal), file_id(shm)

    def _log_was_lost(self) -> None:
        """The log was removed or replaced. Open no new connection: it could combine one log's index with another log.

        If no process has made a new log, the last connection to close writes the old log into the database, which
        saves its contents. If there is a new log, the old one must not be written over it: its connections are never
        closed.
        """
        self._lost = (
            f"{self.path.name}-wal or -shm was removed or replaced while this process had {self.path} open; tokens "
            "that were handed out may be lost with it. Stop all processes that use the file and start them again. If "
            "tokens are missing, grants then fail and say so: run `fenced authority raise`"
        )
        self.close_idle()

    def refuse_if_lost(self) -> None:
        if self._lost:
            raise Misconfigured(self._lost)


class StoreTransaction:
    """One transaction on a connection that no other thread has.

    `forking.enter` delays a fork until `forking.leave`: a child must not inherit a connection in a transaction.
    """

    __slots__ = ("_begin", "_connection", "_deadline", "_durable", "_file")

    def __init__(self, file: LeaseFile, durable: bool, deadline: Deadline, begin: str) -> None:
        self._file = file
        self._durable = durable
        self._deadline = deadline
        self._begin = begin
        self._connection: StoreConnection | None = None

    def __enter__(self) -> sqlite3.Connection:
        file = self._file
        file.refuse_if_lost()
        self._deadline.begun = True
        forking.enter()
        try:
            connection = retry_while_locked(self._start, self._deadline)
            file.check_files(connection)
        except BaseException as error:
            if self._connection is not None:
                file.discard(self._connection)
            forking.leave()
            if isinstance(error, sqlite3.Error):
                raise translate(error, file.path) from error
            raise
        return connection.db

    def _start(self) -> StoreConnection:
        """Begin; retried on the same connection while the file is locked, since nothing was written yet."""
        connection = self._connection
        if connection is None:
            connection = self._connection = self._file.take()
        connection.prepare(self._durable)
        connection.db.execute(self._begin)
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, file = self._connection, self._file
        assert connection is not None
        try:
            if exc is None:
                connection.db.execute("COMMIT")
                file.put_back(connection)
                return
        except BaseException as error:
            file.discard(connection)
            if isinstance(error, sqlite3.Error):
                raise translate(error, file.path) from error
            raise
        finally:
            forking.leave()
        # Closing rolls back, and no later call gets a connection in an unknown state.
        file.discard(connection)
        if isinstance(exc, sqlite3.Error):
            raise translate(exc, file.path) from exc


def switch_to_wal(db: sqlite3.Connection) -> None:
    """Use a write-ahead log from now on."""
    if db.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        db.execute("PRAGMA journal_mode = WAL")
