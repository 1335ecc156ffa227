"""What an authority may remember of leases that have ended, for `fenced explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from fenced.values.model import Holder

State = Literal["granted", "waiting", "released", "expired", "revoked", "withdrawn"]


@dataclass(frozen=True, slots=True)
class PastLease:
    """An attempt that the authority has not forgotten yet. Times are seconds since 1970, by the store's clock."""

    names: tuple[str, ...]
    holder: Holder
    grant: str
    """The public id, which is in every stamp."""
    token: int
    """0: it was never granted."""
    state: State
    """`granted` and `waiting` as the store has them: both are over if `ended` has passed."""
    ttl: float
    confirmed: float | None
    """When it was granted or last renewed; None where the end has overwritten it."""
    ended: float | None
    """When it ended, or ends if nobody renews it; None where that is not known."""


class Remembers(Protocol):
    """What an authority may offer as well."""

    async def past(self, name: str, until: float | None = None) -> list[PastLease]:
        """The attempts at a name that are not forgotten: those that live, and those that ended lately."""
