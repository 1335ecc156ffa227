"""Every error that fenced raises, in one tree.

Each kind says what the caller should do, in `.retry`:

    no             repeating cannot help; stop, or fix what the message names
    same-attempt   the outcome is unknown; repeating the *same* attempt is safe, a new one is not
    later          nothing happened; try again later
    transaction    nothing happened; run the whole transaction again

A refusal is a correctness signal, not a failure to be retried away: somebody else holds the name now.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from fenced.values.model import HeldBy, Stamp

__all__ = [
    "REFUSALS",
    "AlreadyApplied",
    "Conflict",
    "Contended",
    "DuplicateStamp",
    "FencedError",
    "ForeignRealm",
    "ForgedStamp",
    "Indeterminate",
    "InvalidStamp",
    "InvariantBroken",
    "LeaseLost",
    "Misconfigured",
    "MissingStamp",
    "Misuse",
    "NotEnoughTime",
    "NotGranted",
    "OutOfOrder",
    "Overtaken",
    "Refused",
    "Retry",
    "ReusedToken",
    "StaleToken",
    "Unavailable",
    "Uncovered",
    "Unsupported",
]

Retry = Literal["no", "same-attempt", "later", "transaction"]

SHOWN_BYTES_MAX = 200


def shown(value: object) -> str:
    """The repr of a caller's value, shortened so that a hostile value cannot fill a log."""
    if isinstance(value, str | bytes) and len(value) > SHOWN_BYTES_MAX:
        value = value[:SHOWN_BYTES_MAX]
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_BYTES_MAX:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = ascii(value)
    except ValueError:  # an integer inside, with more digits than Python writes
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_BYTES_MAX else text[: SHOWN_BYTES_MAX - 3] + "..."


def redacted(url: object) -> object:
    """An address without its user and its passwords, for messages."""
    if not isinstance(url, str):
        return url
    without_user = re.sub(r"//[^@/\s]*@", "//***@", url)
    return re.sub(r"(password=)[^&\s]*", r"\1***", without_user)


class FencedError(Exception):
    """The base class of all errors of fenced."""

    retry: ClassVar[Retry] = "no"

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling: an error that cannot be unpickled breaks the whole process pool that it was raised in."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[FencedError], args: tuple[object, ...], state: dict[str, object]) -> FencedError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class Unavailable(FencedError):
    """The store could not be reached or used; nothing happened."""

    retry = "later"


class Indeterminate(FencedError):
    """The request may or may not have taken effect."""

    retry = "same-attempt"


class NotGranted(FencedError, TimeoutError):
    """The name was not granted within `wait`: somebody holds it, others wait ahead, or it is not free yet."""

    retry = "later"

    def __init__(self, message: str, *, why: str = "", held_by: HeldBy | None = None, ahead: int = 0) -> None:
        super().__init__(message)
        self.why = why
        self.held_by = held_by
        self.ahead = ahead


class Overtaken(FencedError):
    """Stop: somebody else has the name, or may have it. Parent of LeaseLost and StaleToken."""


class LeaseLost(Overtaken):
    """The holder's own view: this lease has ended, for the reason given."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotEnoughTime(FencedError):
    """The lease is held, but for less time than `check(need=...)` asked for."""

    retry = "later"

    def __init__(self, message: str, *, remaining: float, need: float) -> None:
        super().__init__(message)
        self.remaining = remaining
        self.need = need


class Refused(FencedError):
    """A guard refused the operation. Nothing of it was applied."""

    kind: ClassVar[str] = "refused"

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        stamp: Stamp | None = None,
        mark: int | None = None,
        holder: str | None = None,
    ) -> None:
        super().__init__(message)
        self.name = name
        self.stamp = stamp
        self.mark = mark
        self.holder = holder


class StaleToken(Refused, Overtaken):
    """A newer holder has been seen for this name."""

    kind = "stale"


class DuplicateStamp(Refused):
    """Rule `once`: this grant has already made its one operation."""

    kind = "duplicate"


class OutOfOrder(Refused):
    """Rule `sequenced`: a later operation of the same lease was applied before this one."""

    kind = "out_of_order"


class ReusedToken(Refused):
    """The same token was seen from another grant: the authority has lost its history."""

    kind = "reused"


class Uncovered(Refused):
    """The stamp's lease does not cover this name."""

    kind = "uncovered"


class ForeignRealm(Refused):
    """The stamp comes from another authority than the one this guard trusts."""

    kind = "foreign"


class MissingStamp(Refused):
    """The operation carries no stamp and the mode is `require`."""

    kind = "missing"


class InvalidStamp(Refused):
    """The operation carries no valid stamp, or one that this rule cannot use."""

    kind = "invalid"


class ForgedStamp(Refused):
    """A proof was required and did not verify."""

    kind = "forged"


class AlreadyApplied(FencedError):
    """Rule `sequenced`: this same operation was applied before. Success for the caller."""


class Contended(FencedError):
    """Another transaction is using the same rows; nothing happened."""

    retry = "transaction"


class Conflict(FencedError):
    """The value changed since it was read (`expect`); nothing happened."""

    retry = "transaction"


class Unsupported(FencedError):
    """This backend lacks the ability that was asked for; nothing happened."""


class Misconfigured(FencedError):
    """A store or a setting would break the guarantee; the message says what to change."""


class Misuse(FencedError, ValueError):
    """The call itself is wrong: a bad name, a bad number, a lease used after its release."""


class InvariantBroken(FencedError):
    """Something that cannot happen did. Please report it."""


REFUSALS: dict[str, type[Refused]] = {
    kind.kind: kind
    for kind in (
        StaleToken,
        DuplicateStamp,
        OutOfOrder,
        ReusedToken,
        Uncovered,
        ForeignRealm,
        MissingStamp,
        InvalidStamp,
        ForgedStamp,
    )
}


def __dir__() -> list[str]:
    return __all__
