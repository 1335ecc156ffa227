"""What SQLite's errors mean, for the authority and the guard, and connections that must not be closed."""

from __future__ import annotations

import contextlib
import sqlite3
from enum import Enum
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


class Failure(Enum):
    """What has failed, by the code of an error."""

    LOCKED = "another writer has the lock"
    FULL = "no room on the disk"
    SHORT_LOG = "the write-ahead log is shorter than it was"
    DISK = "the disk failed"
    READ_ONLY = "it cannot be opened for writing"
    DAMAGED = "it is no database, or damaged"
    SHAPE = "tables are not as they were made"
    OTHER = "something else"


_BY_CODE = {
    # No room for the index of the write-ahead log: SQLite calls that an I/O error.
    sqlite3.SQLITE_IOERR_SHMSIZE: Failure.FULL,
    sqlite3.SQLITE_IOERR_SHORT_READ: Failure.SHORT_LOG,
    sqlite3.SQLITE_BUSY: Failure.LOCKED,
    sqlite3.SQLITE_LOCKED: Failure.LOCKED,
    sqlite3.SQLITE_FULL: Failure.FULL,
    sqlite3.SQLITE_IOERR: Failure.DISK,
    sqlite3.SQLITE_READONLY: Failure.READ_ONLY,
    sqlite3.SQLITE_PERM: Failure.READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: Failure.READ_ONLY,
    sqlite3.SQLITE_CORRUPT: Failure.DAMAGED,
    sqlite3.SQLITE_NOTADB: Failure.DAMAGED,
    sqlite3.SQLITE_ERROR: Failure.SHAPE,
    sqlite3.SQLITE_CONSTRAINT: Failure.SHAPE,
    sqlite3.SQLITE_SCHEMA: Failure.SHAPE,
}


def failure_of(error: sqlite3.Error) -> Failure:
    """By the whole code if that is known, otherwise by its first byte, which is the kind."""
    code = getattr(error, "sqlite_errorcode", 0)
    return _BY_CODE.get(code) or _BY_CODE.get(code & 0xFF, Failure.OTHER)


def translate(error: sqlite3.Error, path: Path) -> FencedError:
    """What an SQLite error means for the caller of an authority."""
    match failure_of(error):
        case Failure.LOCKED:
            return Unavailable(
                f"{path} stayed locked by another process: {error}. A process that is stopped inside its "
                "transaction blocks the others until it continues or ends"
            )
        case Failure.FULL:
            return Unavailable(f"the disk under {path} is full; free some space and try again")
        case Failure.SHORT_LOG:
            return Misconfigured(
                f"{path}: its write-ahead log is shorter than the processes that use it expect: perhaps "
                f"{path.name}-wal was removed while they ran. Stop all processes that use the file, then start them "
                "again"
            )
        case Failure.DISK:
            return Indeterminate(f"the disk under {path} failed: {error}")
        case Failure.READ_ONLY:
            return Misconfigured(
                f"{path} cannot be opened for writing ({error}); the file, its folder and the files "
                "beside it must be writable, and the file system not mounted read-only"
            )
        case Failure.DAMAGED:
            return Misconfigured(
                f"{path} is damaged or not a database ({error}); restore it from a backup, then run "
                "`fenced authority raise`"
            )
        case Failure.SHAPE:
            return Misconfigured(f"{path} is not as fenced made it: {error}")
    return Unavailable(f"{path}: {error}")
