"""The records of several guards as one list, for `fenced audit` and `fenced explain`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase

from fenced.client import registry
from fenced.client.reaching import operate
from fenced.diagnosis.looks import Span
from fenced.errors import Unsupported, redacted
from fenced.guards.remembered import AUDIT_LAGS
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.contracts import Operator
from fenced.values.rollout import Change, DatabaseStatus, Decision

NEWEST = 10_000
"""How many records are read of each guard: as many as one keeps one by one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which decisions somebody wants to see."""

    name: str | None = None
    """A pattern; * stands for any characters."""
    token: int | None = None
    since: datetime | None = None
    verdict: str | None = None

    def __contains__(self, decision: Decision) -> bool:
        return (
            (self.name is None or (decision.name is not None and fnmatchcase(decision.name, self.name)))
            and self.token in (None, decision.token)
            and (self.since is None or decision.at >= self.since)
            and self.verdict in (None, decision.verdict.value)
        )


@dataclass(frozen=True, slots=True)
class Audit:
    """What the guards at one address have recorded, the newest last."""

    where: str
    decisions: tuple[Decision, ...]
    status: DatabaseStatus | None
    changes: tuple[Change, ...]
    ahead: float | None
    """Seconds that the clock of the store is ahead of this machine's, if that is more than the look is unsure of."""
    lags: bool
    """Decisions are written a second late, and a process that was killed has lost those since its last write."""

    @property
    def full(self) -> bool:
        """Whether there may be older records than these."""
        return len(self.decisions) >= NEWEST


def audited(url: str, *, changes: bool = False) -> Audit:
    began = time.time()
    status = operate(url, _status)
    span = Span(began, time.time())
    ahead = None
    if status is not None and not status.local_clock:
        off, sure = span.ahead(status.now.timestamp())
        ahead = off if abs(off) > sure else None
    decisions = tuple(operate(url, lambda operator: operator.records(None, NEWEST)))
    made = tuple(operate(url, _changes)) if changes else ()
    return Audit(str(redacted(url)), decisions, status, made, ahead, _lags(url))


async def _status(operator: Operator) -> DatabaseStatus | None:
    try:
        return await operator.status()
    except Unsupported:
        return None


async def _changes(operator: Operator) -> list[Change]:
    try:
        return await operator.history(None, NEWEST)
    except Unsupported:
        return []


def _lags(url: str) -> bool:
    guard = registry.guard(url, BlockingRuntime())
    try:
        return any(trait.key == AUDIT_LAGS.key for trait in guard.traits)
    finally:
        step(guard.close())


def merged(audits: Iterable[Audit], wanted: Wanted) -> list[tuple[str, Decision]]:
    """The wanted decisions of all guards with their addresses, in the order of their times."""
    found = [(audit.where, each) for audit in audits for each in audit.decisions if each in wanted]
    return sorted(found, key=lambda row: row[1].at)


def followed(
    read: Callable[[], Sequence[Audit]], wanted: Wanted, rest: Callable[[], None]
) -> Iterator[list[tuple[str, Decision]]]:
    """What is there, and then, again and again, what has been recorded since. `rest` waits in between."""
    seen: dict[str, frozenset[Decision]] = {}
    while True:
        audits = read()
        fresh = []
        for audit in audits:
            before = seen.get(audit.where, frozenset())
            fresh += [
                (audit.where, each) for each in audit.decisions if each not in before and each in wanted
            ]
            # What is no longer among the newest is not read again either.
            seen[audit.where] = frozenset(audit.decisions)
        yield sorted(fresh, key=lambda row: row[1].at)
        rest()
