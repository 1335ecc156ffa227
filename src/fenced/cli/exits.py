"""What an exit status means: one table for every command, after BSD's sysexits where they fit.

`fenced run` otherwise returns the status of its child, which may use any of these numbers for its own.
"""

from __future__ import annotations

from typing import NamedTuple

from fenced import errors

OK = 0
FOUND_WRONG = 1
USAGE = 64
UNAVAILABLE = 69
INTERNAL = 70
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


# The first row that fits counts, so StaleToken (a refusal, and an overtaking) is `refused`.
TABLE = (
    ExitRow(OK, "ok", "done, or done before", (errors.AlreadyApplied,)),
    ExitRow(USAGE, "usage", "the call itself is wrong: a bad option, name or number", (errors.Misuse,)),
    ExitRow(
        UNAVAILABLE,
        "unavailable",
        "the store could not be used, or what became of the request is unknown",
        (errors.Unavailable, errors.Indeterminate),
    ),
    ExitRow(
        INTERNAL,
        "internal",
        "something that cannot happen did; please report it",
        (errors.InvariantBroken,),
    ),
    ExitRow(
        NOT_GRANTED,
        "not granted",
        "somebody else has the name, or is busy at the same place; nothing happened, try later",
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
    ("126", "fenced run: the command cannot be executed (the lease was given back)"),
    ("127", "fenced run: the command was not found (the lease was given back)"),
    ("128+n", "ended by signal n: 130 is Ctrl-C, 141 a closed pipe"),
    ("other", "fenced run: the command's own status"),
    ("1", "fenced guard status --check: something is wrong with a guard"),
    ("1 2", "fenced drill has its own: 1 something stale was admitted or an update lost, 2 it could not run"),
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
