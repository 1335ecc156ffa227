"""The records of a drill, and the pure check that turns them into counts and a verdict.

The check uses only facts: what was granted, what was acknowledged, in which order the resource applied it, and what
is stored at the end. Times are seconds on one clock of one machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Literal

Kind = Literal["announce", "read", "write"]
Decision = Literal["admitted", "refused", "failed", "unknown"]
"""`failed`: nothing happened (the store was busy or not reachable). `unknown`: it may have happened."""
Verdict = Literal["held", "broken", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Grant:
    """The authority granted a lease."""

    name: str
    token: int
    holder: str
    began: float
    time: float


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation at the resource, as its holder saw it. A write carries the id of its update."""

    holder: str
    kind: Kind
    name: str
    stamp: str
    token: int
    decision: Decision
    began: float
    time: float
    why: str | None = None
    mark: int | None = None
    version: int | None = None
    update: str | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """A holder did not run, or was cut off."""

    holder: str
    name: str
    token: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class RenewalEvent:
    """A renewal that a holder sent by hand, and its answer: `kept`, or why not."""

    holder: str
    name: str
    token: int
    answer: str
    began: float
    time: float


@dataclass(slots=True)
class History:
    """Everything that one drill recorded."""

    grants: list[Grant] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    renewals: list[RenewalEvent] = field(default_factory=list)
    finals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each name, the ids of the updates that its value holds at the end."""
    facts: dict[str, object] = field(default_factory=dict)
    """What else a drill has seen, by its own names: that its fault happened, for one."""
    ttl: float = 0.0
    """The ttl that the authority granted."""

    def writes(self, decision: Decision) -> list[Operation]:
        return [each for each in self.operations if each.kind == "write" and each.decision == decision]


@dataclass(frozen=True, slots=True)
class Findings:
    """The counts, and the operations behind those that must be zero."""

    acknowledged: int
    contested: int
    """Those of them that were acknowledged while a holder of their name was stopped, or within one ttl after."""
    refused: int
    overtaken: int
    """Leases under which a holder acted after an operation with a newer token had been admitted for their name."""
    stale: tuple[Operation, ...]
    """Writes that were admitted after a newer token had been admitted or announced for their name."""
    lost: tuple[Operation, ...]
    """Acknowledged updates that are missing at the end."""
    refused_applied: tuple[Operation, ...]
    """Refused updates that are there at the end."""
    tokens_fallen: tuple[Grant, ...]
    """Grants whose token is not above that of every grant before them."""
    revived: tuple[RenewalEvent, ...]
    """Renewals that were confirmed after the name had been granted to somebody else."""
    doubled: tuple[str, ...] = ()
    """Ids of updates that are there more than once at the end."""

    @property
    def harm(self) -> frozenset[str]:
        """The names of those that must be empty, and are not."""
        kinds = ("stale", "lost", "refused_applied", "tokens_fallen", "revived", "doubled")
        return frozenset(kind for kind in kinds if getattr(self, kind))

    @property
    def lost_percent(self) -> float:
        return 100 * len(self.lost) / self.acknowledged if self.acknowledged else 0.0


def check(history: History) -> Findings:
    """Judge a whole history."""
    acknowledged = history.writes("admitted")
    return Findings(
        acknowledged=len(acknowledged),
        contested=sum(_is_contested(each, history) for each in acknowledged),
        refused=sum(each.decision == "refused" for each in history.operations),
        overtaken=_overtaken(history.operations),
        stale=tuple(_stale(history.operations)),
        lost=tuple(each for each in acknowledged if not _is_there(history, each)),
        refused_applied=tuple(each for each in history.writes("refused") if _is_there(history, each)),
        tokens_fallen=tuple(_fallen(history.grants)),
        revived=tuple(each for each in history.renewals if _is_revival(each, history.grants)),
        doubled=tuple(_doubled(history)),
    )


def _is_there(history: History, operation: Operation) -> bool:
    return operation.update in history.finals.get(operation.name, ())


def _doubled(history: History) -> Iterable[str]:
    return (each for ids in history.finals.values() for each, count in Counter(ids).items() if count > 1)


def _is_contested(write: Operation, history: History) -> bool:
    return any(
        each.name == write.name and each.began <= write.time <= each.ended + history.ttl
        for each in history.pauses
    )


def _overtaken(operations: Sequence[Operation]) -> int:
    acted = [
        each
        for each in operations
        if each.decision == "refused" or (each.kind == "write" and each.decision == "admitted")
    ]
    return sum(
        len({each.token for each in _late(acted, admitted, name)})
        for name, admitted in _admitted_by_name(operations).items()
    )


def _stale(operations: Sequence[Operation]) -> list[Operation]:
    found: dict[int, Operation] = {}
    for name, admitted in _admitted_by_name(operations).items():
        writes = [each for each in admitted if each.kind == "write"]
        for each in (*_stale_by_version(admitted), *_late(writes, admitted, name)):
            found[id(each)] = each
    return sorted(found.values(), key=lambda each: each.time)


def _admitted_by_name(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    by_name: dict[str, list[Operation]] = {}
    for each in operations:
        if each.decision == "admitted":
            by_name.setdefault(each.name, []).append(each)
    return by_name


def _stale_by_version(admitted: Sequence[Operation]) -> list[Operation]:
    """Stale by the resource's order: a read that saw version 7 came after write 7 and before write 8."""
    ordered = [each for each in admitted if each.version is not None]
    ordered.sort(key=lambda each: (each.version, each.kind != "write"))
    highest, stale = 0, []
    for each in ordered:
        if each.kind == "write" and each.token < highest:
            stale.append(each)
        highest = max(highest, each.token)
    return stale


def _late(candidates: Iterable[Operation], admitted: Sequence[Operation], name: str) -> list[Operation]:
    """Those of `candidates` that began after an operation with a newer token had ended: late in real time."""
    ordered = sorted(admitted, key=lambda each: each.time)
    ends = [each.time for each in ordered]
    highest = [0, *accumulate((each.token for each in ordered), max)]
    here = (each for each in candidates if each.name == name)
    return [each for each in here if each.token < highest[bisect_left(ends, each.began)]]


def _fallen(grants: Sequence[Grant]) -> list[Grant]:
    ordered = sorted(grants, key=lambda each: each.time)
    ends = [each.time for each in ordered]
    highest = [0, *accumulate((each.token for each in ordered), max)]
    seen: set[int] = set()
    fallen = []
    for each in ordered:
        if each.token in seen or each.token <= highest[bisect_left(ends, each.began)]:
            fallen.append(each)
        seen.add(each.token)
    return fallen


def _is_revival(renewal: RenewalEvent, grants: Iterable[Grant]) -> bool:
    newer = (each for each in grants if each.name == renewal.name and each.token > renewal.token)
    return renewal.answer == "kept" and any(each.time < renewal.began for each in newer)


def as_json(history: History, *, start: float) -> dict[str, list[dict[str, object]]]:
    """The lists of a history with times in seconds since `start`."""
    lists: dict[str, Sequence[Grant | Operation | Pause | RenewalEvent]] = {
        "grants": history.grants,
        "operations": history.operations,
        "pauses": history.pauses,
        "renewals": history.renewals,
    }
    return {key: [_row(asdict(item), start) for item in items] for key, items in lists.items()}


def _row(values: dict[str, object], start: float) -> dict[str, object]:
    for key in ("began", "time", "ended"):
        moment = values.get(key)
        if isinstance(moment, float):
            values[key] = round(moment - start, 6)
    return values
