"""What SQLite's errors mean, and connections that must not be closed: for authorities whose store is an SQLite file."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable

_never_closed: list[sqlite3.Connection] = []


def never_close(db: sqlite3.Connection) -> None:
    """Keep it open until the process ends: an extra reference keeps the interpreter from closing it at exit.

    Closing the connection could write a log that was removed and replaced, or that belongs to the parent process,
    over newer data.
    """
    import ctypes  # not otherwise needed

    with contextlib.suppress(sqlite3.Error):
        db.rollback()  # other processes may wait for the lock that it holds
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))
    _never_closed.append(db)


def is_full(error: sqlite3.Error) -> bool:
    """Whether there was no room for the index of the write-ahead log. SQLite calls that an I/O error."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHMSIZE


def translate(error: sqlite3.Error, path: Path) -> FencedError:
    """What an SQLite error means for the caller."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(
            f"{path} stayed locked by another process: {error}. A process that is stopped inside its "
            "transaction blocks the others until it continues or ends"
        )
    if code == sqlite3.SQLITE_FULL or is_full(error):
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
