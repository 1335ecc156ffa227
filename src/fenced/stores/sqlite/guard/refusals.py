"""Turn sqlite3's errors into typed errors.

A trigger's refusal has the message `fenced:VERDICT:TABLE`, or a sentence that ends with `'fenced:VERDICT:TABLE:NAME'`.
"""

from __future__ import annotations

import re
import sqlite3

from fenced.errors import Contended, FencedError, Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.guards.answers import error_for
from fenced.stores.sqlite.failures import Failure, failure_of
from fenced.values.decision import Verdict


def refusal_in(error: BaseException) -> FencedError | None:
    """The typed refusal behind an error of one of our triggers; None for other errors."""
    raised = verdict_in(error)
    return None if raised is None else error_for(raised[0], name=raised[2], table=raised[1])


_REFUSED = re.compile(r"(?:.*')?fenced:(\w+):([^:']+)(?::(.*)')?", re.DOTALL)


def verdict_in(error: BaseException) -> tuple[Verdict, str, str | None] | None:
    """The verdict that one of our triggers raised, its table, and the row's name if it told that; else None.

    The name is empty if a column of it is NULL.
    """
    found = _REFUSED.fullmatch(str(error)) if isinstance(error, sqlite3.DatabaseError) else None
    if found is None or found[1] not in set(Verdict):
        return None
    return Verdict(found[1]), found[2], found[3] and found[3].replace("''", "'")


def translate(error: sqlite3.Error) -> FencedError:
    """The typed error for an error of one of our own statements."""
    if isinstance(error, sqlite3.ProgrammingError):
        if "closed database" in str(error):
            return Misuse("this connection is closed")
        return Misuse(f"this connection cannot be used here: {error}")
    if "statements in progress" in str(error):
        return Misuse(f"{error}: fetch all rows of every statement (RETURNING, SELECT) before the block ends")
    if "no such table: fenced_" in str(error):
        return Misconfigured("no guard is installed in this database; run its install()")
    match failure_of(error):
        case Failure.LOCKED:
            return Contended(f"the guarded database is locked by another writer: {error}")
        case Failure.FULL:
            return Unavailable("the disk under the guarded database is full; free some space")
        case Failure.DISK | Failure.SHORT_LOG:
            return Indeterminate(f"the disk under the guarded database failed: {error}")
        case Failure.READ_ONLY:
            return Misconfigured(f"the guarded database cannot be written: {error}")
        case Failure.DAMAGED:
            return Misconfigured(f"the guarded database is damaged: {error}")
    return Unavailable(f"the guarded database answered: {error}")
