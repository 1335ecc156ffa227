"""The exit statuses: one table for every command, with the numbers of BSD's sysexits where they fit.

`fenced run` otherwise returns the status of its command, which may use the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from fenced import errors

OK = 0
FOUND_WRONG = 1
USAGE = 64
UNAVAILABLE = 69
INTERNAL = 70
STORE_FAILED = 74
NOT_GRANTED = 75
LOST = 76
REFUSED = 77
MISCONFIGURED = 78
NOT_EXECUTABLE = 126
NOT_FOUND = 127
SIGNALLED = 128
INTERRUPTED = 130
BROKEN_PIPE = 141


class ExitRow(NamedTuple):
    """A status, when it is used, and the errors that lead to it."""

    code: int
    word: str
    meaning: str
    errors: tuple[type[errors.FencedError], ...]


# The first row that matches counts, so StaleToken (both Refused and Overtaken) is `refused`.
TABLE = (
    ExitRow(OK, "ok", "done, or done before", (errors.AlreadyApplied,)),
    ExitRow(USAGE, "usage", "the call itself is wrong: a bad option, name or number", (errors.Misuse,)),
    ExitRow(
        UNAVAILABLE,
        "unavailable",
        "the store could not be used, or the outcome of the request is unknown",
        (errors.Unavailable, errors.Indeterminate),
    ),
    ExitRow(
        INTERNAL,
        "internal",
        "an internal invariant is broken; please report it",
        (errors.InvariantBroken,),
    ),
    ExitRow(
        NOT_GRANTED,
        "not granted",
        "somebody else holds the name, or a concurrent operation conflicts; nothing happened, try later",
        (errors.NotGranted, errors.NotEnoughTime, errors.Contended, errors.Conflict),
    ),
    ExitRow(REFUSED, "refused", "a guard refused the stamp; nothing was applied", (errors.Refused,)),
    ExitRow(LOST, "lost", "the lease was lost; `fenced run` has stopped its command", (errors.Overtaken,)),
    ExitRow(
        MISCONFIGURED,
        "misconfigured",
        "a store, file or setting that cannot be used; the message says what to change",
        (errors.Misconfigured, errors.Unsupported),
    ),
)

_NOTES = (
    ("74", "fenced serve: its store has failed for good (a full disk, an I/O error); start it again"),
    ("126", "fenced run: the command cannot be executed (the lease was released)"),
    ("127", "fenced run: the command was not found (the lease was released)"),
    ("128+n", "ended by signal n: 130 is Ctrl-C, 141 a closed pipe"),
    ("other", "fenced run: the command's own status"),
    ("1", "fenced guard status --check: something is wrong with a guard"),
    ("1", "fenced doctor: something is weaker than it could be"),
    ("2", "fenced doctor: something is broken"),
    ("3", "fenced doctor: something that matters could not be looked at"),
    ("1", "fenced drill: broken: a stale operation was admitted, or an acknowledged update was lost"),
    ("2", "fenced drill: inconclusive: nobody was overtaken; or the drill could not run"),
)


def code_of(error: errors.FencedError) -> int:
    """The exit status for an error."""
    for row in TABLE:
        if isinstance(error, row.errors):
            return row.code
    return INTERNAL


def text() -> str:
    """The table, for people."""
    lines = [f"{row.code:>5}  {row.word}: {row.meaning}" for row in sorted(TABLE)]
    lines += [f"{code:>5}  {meaning}" for code, meaning in _NOTES]
    return "\n".join(("Exit status of every command:", "", *lines))
