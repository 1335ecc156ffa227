"""The operations of an authority that runs the lease algorithm itself: each is one transaction on its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

from fenced.leases.past import past
from fenced.leases.rows import AttemptRow, LeaseAlgorithm
from fenced.runtime import clocks
from fenced.values.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    check_floor,
    check_name,
    grant_id,
)
from fenced.values.past import PastLease

T = TypeVar("T")
Work = Callable[[LeaseAlgorithm], tuple[T, Sequence[AttemptRow]]]
"""What is done in a transaction: its answer, and the waiters to wake when it has ended."""


class Kind(Enum):
    """What a transaction needs of its store."""

    MINTS = "mints"
    """Its answer may hand a token out: first it is on the disk."""
    RENEWS = "renews"
    """It changes what exists, and must not queue behind grants."""
    ENDS = "ends"
    READS = "reads"


class RowAuthority:
    """What authorities over the lease algorithm share. A store supplies `_transact`."""

    async def _transact(self, work: Work[T], until: float | None, kind: Kind) -> T:
        """Do `work` in one transaction, and wake its waiters."""
        raise NotImplementedError

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        return await self._transact(lambda algorithm: (algorithm.ask(ask), ()), until, Kind.MINTS)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        publics = [grant_id(secret) for secret in secrets]
        return await self._transact(lambda algorithm: (algorithm.renew(publics), ()), until, Kind.RENEWS)

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return await self._transact(lambda algorithm: algorithm.release(secret, keep), until, Kind.ENDS)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._transact(lambda algorithm: algorithm.withdraw(secret), until, Kind.ENDS)

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        return await self._transact(lambda algorithm: (algorithm.survey(after, limit), ()), until, Kind.READS)

    async def observe(self, name: str, until: float | None = None) -> NameView:
        name = check_name(name)
        return await self._transact(lambda algorithm: (algorithm.observe(name), ()), until, Kind.READS)

    async def past(self, name: str, until: float | None = None) -> list[PastLease]:
        name = check_name(name)
        return await self._transact(
            lambda algorithm: (past(algorithm, name, clocks.wall_time()), ()), until, Kind.READS
        )

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        name = check_name(name)
        return await self._transact(lambda algorithm: algorithm.force_release(name, token), until, Kind.MINTS)

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        above = check_floor(above)
        return await self._transact(lambda algorithm: (algorithm.raise_floor(above), ()), until, Kind.MINTS)

    async def tidy(self, until: float | None = None) -> int:
        return await self._transact(lambda algorithm: (algorithm.tidy(), ()), until, Kind.ENDS)
