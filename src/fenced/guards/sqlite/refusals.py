"""Turn sqlite3's errors into typed errors. A trigger's refusal has the message `fenced:VERDICT:TABLE`."""

from __future__ import annotations

import sqlite3

from fenced.decision import Verdict
from fenced.errors import Contended, FencedError, Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.guards.shared.answers import error_for


def refusal_in(error: BaseException) -> FencedError | None:
    """The typed refusal behind an error of one of our triggers; None for other errors."""
    raised = verdict_in(error)
    return None if raised is None else error_for(raised[0], name=None, table=raised[1])


def verdict_in(error: BaseException) -> tuple[Verdict, str] | None:
    """The verdict that one of our triggers raised, and its table; None for other errors."""
    if not isinstance(error, sqlite3.IntegrityError):
        return None
    head, _, rest = str(error).partition(":")
    word, _, table = rest.partition(":")
    return (Verdict(word), table) if head == "fenced" and word in set(Verdict) else None


def translate(error: sqlite3.Error) -> FencedError:
    """The typed error for an error of one of our own statements."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, sqlite3.ProgrammingError):
        return Misuse(f"this connection cannot be used here: {error}")
    if "statements in progress" in str(error):
        return Misuse(f"{error}: fetch all rows of every statement (RETURNING, SELECT) before the block ends")
    if "no such table: fenced_" in str(error):
        return Misconfigured("no guard is installed in this database; run its install()")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Contended(f"the guarded database is locked by another writer: {error}")
    if code == sqlite3.SQLITE_FULL:
        return Unavailable("the disk under the guarded database is full; free some space")
    if code == sqlite3.SQLITE_IOERR:
        return Indeterminate(f"the disk under the guarded database failed: {error}")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return Misconfigured(f"the guarded database cannot be written: {error}")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Misconfigured(f"the guarded database is damaged: {error}")
    return Unavailable(f"the guarded database answered: {error}")
