"""Turn PostgreSQL errors of all drivers into typed errors.

Refusals have SQLSTATEs of class `ZF`, which no driver retries. Their DETAIL is a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fenced.errors import (
    Conflict,
    Contended,
    FencedError,
    Indeterminate,
    LeaseLost,
    Misconfigured,
    Misuse,
    Unavailable,
)
from fenced.guards.answers import error_for, stamp_in
from fenced.values.decision import Mark, Verdict

SQLSTATES: dict[str, Verdict] = {
    "ZF001": Verdict.STALE,
    "ZF002": Verdict.DUPLICATE,
    "ZF003": Verdict.OUT_OF_ORDER,
    "ZF004": Verdict.REUSED,
    "ZF005": Verdict.UNCOVERED,
    "ZF006": Verdict.FOREIGN,
    "ZF007": Verdict.MISSING,
    "ZF008": Verdict.INVALID,
    "ZF009": Verdict.FORGED,
    "ZF010": Verdict.APPLIED,
}
IN_THE_LOG = "SQLSTATE ZF001 to ZF009 in the server's log: grep -A1 ' fenced: ' LOGFILE"
"""Where a refusal is that no wrapper has recorded. Its transaction was rolled back, and no table can have it."""
CONTENDED = "ZF011"
ANNOUNCE_FIRST = "ZF012"
NOT_HELD = "ZF013"
ENDED = "ZF014"
SERIALIZATION = "40001"
DEADLOCK = "40P01"
FAILED = "25P02"
NO_COLUMN = "42703"
IDLED = "25P03"
LOCK_TIMEOUT = "55P03"

_MEANING: dict[str, tuple[type[FencedError], str]] = {
    CONTENDED: (Contended, ""),
    ANNOUNCE_FIRST: (Conflict, "; announce() does that"),
    ENDED: (Misuse, "; nothing of it was committed. Let the guarded block commit or roll back"),
    SERIALIZATION: (Conflict, ""),
    DEADLOCK: (Contended, ""),
    LOCK_TIMEOUT: (Contended, ""),
    FAILED: (Misuse, "; roll back first"),
    "25P01": (
        Misuse,
        "; this connection commits every statement (AUTOCOMMIT): use one that begins transactions",
    ),
    "25006": (Misconfigured, "; a guarded write needs a primary and a read-write transaction"),
    IDLED: (
        Unavailable,
        ": the transaction was idle for longer than max_hold or the program's own limit; nothing was committed",
    ),
    "42501": (
        Misconfigured,
        "; see 'Who may do what' in the guard's documentation. To read only: `fenced guard grant-monitor ROLE`",
    ),
    "42704": (Misconfigured, ""),
    "55000": (Misconfigured, ""),
    "55006": (Misuse, "; run SET CONSTRAINTS ALL IMMEDIATE first, or do this in a separate transaction"),
    "ZFA01": (Misconfigured, ""),
    "ZFA02": (Misconfigured, ""),
    "3F000": (Misconfigured, "; no guard is installed in this database: fenced guard install"),
    "42883": (
        Misconfigured,
        "; no guard is installed in this database (fenced guard install), or by an older fenced (fenced guard upgrade)",
    ),
    "42P01": (Misconfigured, "; no guard is installed in this database: fenced guard install"),
}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and the errors inside it: SQLAlchemy sets `orig`; Django and asyncpg's adapters set `__cause__`."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            left += [found.__cause__, getattr(found, "orig", None)]


@dataclass(frozen=True, slots=True)
class ServerError:
    """A driver's error, read once: drivers and frameworks keep its parts in different places."""

    state: str | None
    says: str
    """The server's sentence, or the driver's if the server said nothing."""
    detail: dict[str, Any]
    """The JSON detail of a refusal; empty for other errors."""
    broken: bool
    """Whether the connection is broken."""
    in_trigger: bool = False
    """Whether a trigger of the guard has failed, and not the program's own statement."""

    def refusal(self) -> FencedError | None:
        """The typed error for a SQLSTATE of class `ZF`, or for a guard that does not fit its table; None for others."""
        if self.state == NO_COLUMN and self.in_trigger:
            return Misconfigured(
                f"the guard makes names from a column that its table no longer has ({self.says}). "
                "After a renaming, install it again with the new name: "
                "fenced guard install URL --table TABLE --name TEMPLATE --replace"
            )
        if self.state is None or not self.state.startswith("ZF"):
            return None
        if self.state not in SQLSTATES:
            return self.typed()
        detail = self.detail
        name, table, mark = detail.get("name"), detail.get("guard"), detail.get("mark")
        where = name or f"a row of {table}"
        return error_for(
            SQLSTATES[self.state],
            name=name,
            stamp=stamp_in(detail.get("stamp")),
            mark=Mark(mark, detail.get("holder") or "", detail.get("seq") or 0) if mark is not None else None,
            table=table,
            says=self.says.removeprefix(f"{where}: "),
        )

    def typed(self, *, committing: bool = False) -> FencedError:
        """The typed error for an error of one of our own statements."""
        state, says = self.state, self.says
        if state in SQLSTATES:
            refused = self.refusal()
            assert refused is not None
            return refused
        if state == NOT_HELD:
            return LeaseLost(says, reason="expired")
        if state == "08P01" and "statement pooling" in says:
            return Misconfigured(
                f"a pooler in statement mode is in between, so no transaction works ({says}); "
                "pgbouncer.ini: pool_mode = transaction"
            )
        if state is not None and state in _MEANING:
            kind, more = _MEANING[state]
            return kind(f"{says}{more}")
        if state is None or state[:2] in ("08", "57", "58", "XX"):
            # The connection is broken. Before COMMIT was sent the server rolls back; after that the outcome is unknown.
            if committing:
                return Indeterminate(f"the connection was lost while it committed: {says}")
            return Unavailable(f"the guarded database cannot be reached: {says}")
        return Unavailable(f"the guarded database answered: {says}")


def read(error: BaseException) -> ServerError:
    """Find the server's answer in an error of any driver, also inside a framework's error."""
    causes = list(_causes(error))
    for found in causes:
        state = getattr(found, "sqlstate", None) or getattr(found, "pgcode", None)
        if isinstance(state, str):
            # psycopg keeps the fields of the answer in `diag`, asyncpg in the error itself.
            diagnosis = getattr(found, "diag", None)
            says = getattr(diagnosis, "message_primary", None) or getattr(found, "message", None)
            detail = getattr(diagnosis, "message_detail", None) or getattr(found, "detail", None)
            context = getattr(diagnosis, "context", None) or getattr(found, "context", None)
            return ServerError(
                state,
                _sentence(says if isinstance(says, str) else str(error)),
                _parsed(detail) if state.startswith("ZF") else {},
                state[:2] in ("08", "57") or state == IDLED,
                isinstance(context, str) and "function fenced_guard." in context,
            )
    # Drivers report some broken connections without a SQLSTATE, by these classes.
    kinds = {kind.__name__ for found in causes for kind in type(found).__mro__}
    broken = not kinds.isdisjoint({"OperationalError", "InterfaceError", "OSError"})
    return ServerError(None, _sentence(str(error)), {}, broken)


def _sentence(text: str) -> str:
    return text.partition("\n")[0].removeprefix("fenced: ")


def _parsed(text: object) -> dict[str, Any]:
    try:
        detail = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return detail if isinstance(detail, dict) else {}


def sqlstate_of(error: BaseException) -> str | None:
    return read(error).state


def refusal_in(error: BaseException) -> FencedError | None:
    """The typed error for a refusal; None for other errors."""
    return read(error).refusal()


def typed(error: BaseException) -> FencedError:
    """The typed error for an error of one of our own statements."""
    return read(error).typed()
