"""What `fenced doctor` asks: each guard for its status, then each authority for its standing. Nothing is written.

Guards come first. A grant and its write between two looks can then only make the counter look higher than the marks,
which is how it should be, and never the marks higher than the counter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fenced.client import registry
from fenced.client.reaching import operate
from fenced.errors import FencedError, InvalidStamp, Unsupported, redacted
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.contracts import Operator
from fenced.values.model import Stamp, Standing
from fenced.values.rollout import DatabaseStatus, Decision

REPEATED = 3
"""So many refusals of one grant as stale are a program that tries again."""
RECORDS = 1000


@dataclass(frozen=True, slots=True)
class Span:
    """When something was looked at, by this machine's wall clock."""

    began: float
    ended: float

    def ahead(self, clock: float) -> tuple[float, float]:
        """How many seconds a clock that was read meanwhile is ahead, and how many it may be off."""
        return clock - (self.began + self.ended) / 2, (self.ended - self.began) / 2


@dataclass(frozen=True, slots=True)
class GuardLook:
    """What the guards at one address say."""

    url: str
    span: Span
    status: DatabaseStatus | None = None
    error: FencedError | None = None
    retried: tuple[str, ...] = ()
    """Names under which a refused grant was tried again and again."""
    keys: int | None = None
    """How many keys may sign stamps; None: not known, or there are no proofs."""
    roles: frozenset[str] | None = None
    """The users of the database; None: not asked, or not known."""

    @property
    def where(self) -> str:
        return str(redacted(self.url))

    @property
    def has_tables(self) -> bool:
        return registry.is_engine(self.url)


@dataclass(frozen=True, slots=True)
class AuthorityLook:
    """What an authority says."""

    url: str
    span: Span
    standing: Standing | None = None
    error: FencedError | None = None

    @property
    def where(self) -> str:
        return str(redacted(self.url))


def look_at_guard(url: str, *, asks_roles: bool = False) -> GuardLook:
    began = time.time()
    try:
        status = operate(url, lambda operator: operator.status())
        span = Span(began, time.time())
        return GuardLook(
            url,
            span,
            status,
            retried=operate(url, _retried),
            keys=operate(url, _keys) if status.proof else None,
            roles=operate(url, _roles) if asks_roles else None,
        )
    except FencedError as error:
        return GuardLook(url, Span(began, time.time()), error=error)


def look_at_authority(url: str, namespace: str) -> AuthorityLook:
    began = time.time()
    authority = None
    try:
        authority = registry.authority(url, BlockingRuntime(), namespace)
        standing = step(authority.open(create=False))
        return AuthorityLook(url, Span(began, time.time()), standing)
    except FencedError as error:
        return AuthorityLook(url, Span(began, time.time()), error=error)
    finally:
        if authority is not None:
            step(authority.close())


async def _retried(operator: Operator) -> tuple[str, ...]:
    try:
        return retried(await operator.records(None, RECORDS))
    except Unsupported:
        return ()


async def _keys(operator: Operator) -> int | None:
    try:
        return sum(key.revoked is None for key in await operator.keys())
    except Unsupported:
        return None


async def _roles(operator: Operator) -> frozenset[str] | None:
    try:
        return await operator.roles()
    except Unsupported:
        return None


def retried(records: Iterable[Decision]) -> tuple[str, ...]:
    """The names under which one grant was refused as stale again and again."""
    refused: Counter[tuple[str, str]] = Counter()
    for each in records:
        if each.verdict == "stale" and each.ruling == "refuse" and each.stamp and each.name:
            try:
                refused[each.name, Stamp.parse(each.stamp).grant] += 1
            except InvalidStamp:
                continue
    return tuple(sorted({name for (name, _), count in refused.items() if count >= REPEATED}))
