"""Turn PostgreSQL errors of all drivers into typed errors.

Refusals have SQLSTATEs of class `ZF`, which no driver retries. Their DETAIL is a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fenced.decision import Mark, Verdict
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
from fenced.guards.shared.answers import error_for, stamp_in

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
CONTENDED = "ZF011"
ANNOUNCE_FIRST = "ZF012"
NOT_HELD = "ZF013"
ENDED = "ZF014"
SERIALIZATION = "40001"
DEADLOCK = "40P01"
FAILED = "25P02"
LOCK_TIMEOUT = "55P03"

_MEANING: dict[str, tuple[type[FencedError], str]] = {
    CONTENDED: (Contended, ""),
    ANNOUNCE_FIRST: (Conflict, "; announce() does that"),
    ENDED: (Misuse, "; nothing of it was committed. Let the guarded block commit or roll back"),
    SERIALIZATION: (Conflict, ""),
    DEADLOCK: (Contended, ""),
    LOCK_TIMEOUT: (Contended, ""),
    FAILED: (Misuse, "; roll back first"),
    "25006": (Misconfigured, "; a guarded write needs a primary and a read-write transaction"),
    "25P03": (
        Unavailable,
        ": the transaction was idle for longer than max_hold or the program's own limit; nothing was committed",
    ),
    "42501": (Misconfigured, "; see the roles and their rights in the guard's documentation"),
    "42704": (Misconfigured, ""),
    "55000": (Misconfigured, ""),
    "3F000": (Misconfigured, "; no guard is installed in this database: fenced guard install"),
    "42883": (Misconfigured, "; no guard is installed in this database: fenced guard install"),
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


def sqlstate_of(error: BaseException) -> str | None:
    for found in _causes(error):
        state = getattr(found, "sqlstate", None) or getattr(found, "pgcode", None)
        if isinstance(state, str):
            return state
    return None


def broken(error: BaseException) -> bool:
    """Whether the connection is broken. Drivers report some broken connections without a SQLSTATE, by these classes."""
    state = sqlstate_of(error)
    if state is not None:
        return state[:2] in ("08", "57") or state == "25P03"
    kinds = {kind.__name__ for found in _causes(error) for kind in type(found).__mro__}
    return not kinds.isdisjoint({"OperationalError", "InterfaceError", "OSError"})


def detail_of(error: BaseException) -> dict[str, Any]:
    """The JSON detail of a refusal; empty for other errors."""
    for found in _causes(error):
        diagnosis = getattr(found, "diag", None)
        text = getattr(diagnosis, "message_detail", None) or getattr(found, "detail", None)
        if isinstance(text, str) and (sqlstate_of(found) or "").startswith("ZF"):
            try:
                detail = json.loads(text)
            except ValueError:
                return {}
            return detail if isinstance(detail, dict) else {}
    return {}


def message_of(error: BaseException) -> str:
    for found in _causes(error):
        diagnosis = getattr(found, "diag", None)
        text = getattr(diagnosis, "message_primary", None)
        if isinstance(text, str):
            return text.removeprefix("fenced: ")
    first = str(error).partition("\n")[0]
    return first.removeprefix("fenced: ")


def refusal_in(error: BaseException) -> FencedError | None:
    """The typed error for a SQLSTATE of class `ZF`; None for other errors."""
    state = sqlstate_of(error)
    if state is None or not state.startswith("ZF"):
        return None
    if state not in SQLSTATES:
        return typed(error)
    detail = detail_of(error)
    mark = detail.get("mark")
    return error_for(
        SQLSTATES[state],
        name=detail.get("name"),
        stamp=stamp_in(detail.get("stamp")),
        mark=Mark(mark, detail.get("holder") or "", detail.get("seq") or 0) if mark is not None else None,
        table=detail.get("guard"),
        says=detail.get("says"),
    )


def typed(error: BaseException, *, committing: bool = False) -> FencedError:
    """The typed error for an error of one of our own statements."""
    state = sqlstate_of(error)
    if state in SQLSTATES:
        refused = refusal_in(error)
        assert refused is not None
        return refused
    says = message_of(error)
    if state == NOT_HELD:
        return LeaseLost(says, reason="expired")
    if state is not None and state in _MEANING:
        kind, more = _MEANING[state]
        return kind(f"{says}{more}")
    if state is None or state[:2] in ("08", "57", "58", "XX"):
        # The connection is broken. Before COMMIT was sent the server rolls back; after that the outcome is unknown.
        if committing:
            return Indeterminate(f"the connection was lost while it committed: {says}")
        return Unavailable(f"the guarded database cannot be reached: {says}")
    return Unavailable(f"the guarded database answered: {says}")
