"""Turn errors of MariaDB and MySQL, of all drivers, into typed errors.

Refusals have error numbers from 901 on, which the servers do not use and no driver takes for a lost connection, and a
message that begins with `fenced:`. The details are in a variable of the session (`@fenced_refused`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
from fenced.net.pool import ConnectionBroken
from fenced.stores.mariadb.wire.failures import CONFLICTS, LOCK_TIMEOUT, ServerRefusal, connection_lost
from fenced.values.decision import Mark, Verdict

VERDICTS: dict[int, Verdict] = {
    901: Verdict.STALE,
    902: Verdict.DUPLICATE,
    903: Verdict.OUT_OF_ORDER,
    904: Verdict.REUSED,
    905: Verdict.UNCOVERED,
    906: Verdict.FOREIGN,
    907: Verdict.MISSING,
    908: Verdict.INVALID,
    909: Verdict.FORGED,
    910: Verdict.APPLIED,
}
CONTENDED, NO_GUARD, OTHER_RULE, ENDED, SWALLOWED, OPEN, IDLE, NOT_HELD, NO_AUTHORITY, NO_CLAIMS = range(
    911, 921
)
_OURS = range(901, 930)
_TELLS = "fenced: "
NO_ROUTINE = frozenset({1305, 1049, 1370, 1044})
"""The guards' database, or the right to call its routines, is missing."""
_LATER_SNAPSHOT = 1020
INSTALL = "no guard is installed on this server (fenced guard install)"

_MEANING: dict[int, tuple[type[FencedError], str]] = {
    CONTENDED: (Contended, ""),
    NO_GUARD: (Misconfigured, ": fenced guard install"),
    ENDED: (Misuse, "; nothing of it was committed. Let the guarded block commit or roll back"),
    SWALLOWED: (Misuse, "; nothing was committed"),
    OPEN: (Misuse, ": commit it first, or use announce_within"),
    IDLE: (Misuse, ", or use transaction()"),
    NOT_HELD: (LeaseLost, ""),
    NO_AUTHORITY: (Misconfigured, ""),
    NO_CLAIMS: (Misconfigured, "; run install() of its Claims"),
    1054: (Misconfigured, ""),
    1064: (Misconfigured, ""),
    1213: (Contended, ""),
    LOCK_TIMEOUT: (Contended, ""),
    _LATER_SNAPSHOT: (Conflict, ""),
    1305: (Misconfigured, f"; {INSTALL}"),
    1049: (Misconfigured, f"; {INSTALL}"),
    1146: (Misconfigured, f"; {INSTALL}"),
    1044: (Misconfigured, "; see 'Who may do what' in the guard's documentation"),
    1142: (Misconfigured, "; see 'Who may do what' in the guard's documentation"),
    1227: (Misconfigured, "; see 'Who may do what' in the guard's documentation"),
    1370: (Misconfigured, "; GRANT EXECUTE ON fenced_guard.* TO this user, if a guard is installed here"),
    1419: (
        Misconfigured,
        "; SET GLOBAL log_bin_trust_function_creators = ON, or install as an administrator",
    ),
    1290: (Misconfigured, "; a guarded write needs a server that takes writes"),
    1901: (Misconfigured, ""),
    3102: (Misconfigured, ""),
    1792: (Misconfigured, "; a guarded write needs a read-write transaction"),
}
_SAID = re.compile(
    r"(?P<name>.+): (?P<says>(?:token|this|a later|not covered|not a stamp|the stamp|the write) .*)"
)
"""What a message says, of a statement whose session cannot be asked for the details."""
_DETAIL = re.compile(
    r"(?P<verdict>\w+),(?P<scope>[0-9A-F]*),(?P<table>[0-9A-F]*),(?P<name>[0-9A-F]*),(?P<stamp>[0-9A-F]*),"
    r"(?P<token>\d+),(?P<grant>\w*),(?P<seq>-?\d+),(?P<realm>\w*),(?P<mode>.+)"
)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and the errors inside it: SQLAlchemy sets `orig`, Django `__cause__`."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            left += [found.__cause__, getattr(found, "orig", None)]


class Detail(NamedTuple):
    """What was refused."""

    table: str
    name: str
    stamp: str
    mark: Mark | None
    verdict: Verdict
    realm: str | None
    """The one that the guard trusts, if that is why."""

    @classmethod
    def read(cls, text: object) -> Detail | None:
        """From `@fenced_refused`."""
        told = text.decode() if isinstance(text, bytes) else text
        found = _DETAIL.fullmatch(told) if isinstance(told, str) else None
        if found is None or found["verdict"] not in set(Verdict):
            return None
        table, name, stamp = (
            bytes.fromhex(found[part]).decode(errors="replace") for part in ("table", "name", "stamp")
        )
        token = int(found["token"])
        mark = Mark(token, found["grant"], int(found["seq"])) if token else None
        return cls(table, name, stamp, mark, Verdict(found["verdict"]), found["realm"] or None)


@dataclass(frozen=True, slots=True)
class MariadbError:
    """A driver's error, read once: drivers and frameworks keep its parts in different places."""

    code: int
    says: str
    broken: bool
    """Whether the connection is broken."""

    @property
    def refuses(self) -> bool:
        return self.code in VERDICTS

    def refusal(self, detail: Detail | None = None) -> FencedError | None:
        """The typed error for one of our own error numbers; None for others."""
        if self.code not in VERDICTS:
            return self.typed() if self.code in _OURS else None
        if detail is not None:
            return error_for(
                detail.verdict,
                name=detail.name,
                stamp=stamp_in(detail.stamp),
                mark=detail.mark,
                table=detail.table,
                realm=detail.realm,
            )
        found = _SAID.fullmatch(self.says)
        name, says = (found["name"], found["says"]) if found else (None, self.says)
        return error_for(VERDICTS[self.code], name=name, says=says)

    def typed(self, *, committing: bool = False) -> FencedError:
        """The typed error for an error of one of our own statements."""
        if self.code in VERDICTS:
            refused = self.refusal()
            assert refused is not None
            return refused
        if self.code == NOT_HELD:
            return LeaseLost(self.says, reason="expired")
        if self.code in _MEANING:
            kind, more = _MEANING[self.code]
            return kind(f"{self.says}{more}")
        if self.broken:
            if committing:
                return Indeterminate(f"the connection was lost while it committed: {self.says}")
            return Unavailable(f"the guarded database cannot be reached: {self.says}")
        return Unavailable(f"the guarded database answered: {self.says} ({self.code})")


def read(error: BaseException) -> MariadbError:
    """Find the server's answer in an error of any driver, also inside a framework's error."""
    kinds: set[str] = set()
    for found in _causes(error):
        kinds |= {kind.__name__ for kind in type(found).__mro__}
        if isinstance(found, ServerRefusal):
            return _answer(found.code, str(found))
        if isinstance(found, ConnectionBroken):
            return MariadbError(0, str(found), True)
        own = {kind.__name__ for kind in type(found).__mro__}
        if "MySQLError" in own and len(found.args) >= 2 and type(found.args[0]) is int:
            return _answer(found.args[0], str(found.args[1]))
    broken = not kinds.isdisjoint({"OperationalError", "InterfaceError", "OSError"})
    return MariadbError(0, str(error).partition("\n")[0], broken)


def _answer(code: int, says: str) -> MariadbError:
    if code in _OURS and not says.startswith(_TELLS):
        code = -code  # somebody else's error with this number
    return MariadbError(
        code, says.partition("\n")[0].removeprefix(_TELLS).removesuffix(f" ({code})"), connection_lost(code)
    )


def interferes(answer: MariadbError) -> bool:
    """Whether a newer commit, or a deadlock, has rolled back the transaction: the same announcement may succeed now."""
    return answer.code in CONFLICTS


def refusal_in(error: BaseException) -> FencedError | None:
    """The typed error for a refusal; None for other errors."""
    return read(error).refusal()


def wrapped(error: Exception, answer: MariadbError | None = None) -> FencedError:
    """The typed error for an error of one of our own statements."""
    if isinstance(error, FencedError):
        return error
    if isinstance(error, (TypeError, AttributeError, NameError)):
        raise error  # a bug in this program, not an answer of the database
    return (answer or read(error)).typed()
