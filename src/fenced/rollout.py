"""How far the rollout of a guard has come, and whether its next stage is safe: values, and one pure rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fenced.decision import Mark, Mode, Ruling, Verdict
from fenced.errors import InvalidStamp
from fenced.model import Stamp
from fenced.schema import Schema

QUIET_SECONDS = 86_400.0
"""How long a stage must have been quiet before the next one is called safe, unless somebody says otherwise."""

_NEXT = {"observe": "shadow", "shadow": "canary", "canary": "enforce", "enforce": "require"}


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a guard, for the audit: the same shape at every guard."""

    at: datetime
    guard: str
    """The guarded table; of a guard that guards no tables, its address."""
    name: str | None
    stamp: str | None
    """What the operation carried, as a text: it may be no stamp that can be read."""
    mark: int | None
    """The highest token that was seen for the name."""
    mark_grant: str | None
    mark_seq: int | None
    verdict: Verdict
    ruling: Ruling
    mode: str
    who: str | None = None
    application: str | None = None
    query: str | None = None

    @property
    def token(self) -> int | None:
        """The token that was carried; None if there was none that can be read."""
        try:
            return Stamp.parse(self.stamp).token if self.stamp else None
        except InvalidStamp:
            return None

    @classmethod
    def of(cls, row: Sequence[Any]) -> Decision:
        """A decision as SQL guards keep it: the fields in their order, the verdict and the ruling as texts."""
        at, guard, name, stamp, mark, grant, seq, verdict, ruling, *rest = row
        return cls(at, guard, name, stamp, mark, grant, seq, Verdict(verdict), Ruling(ruling), *rest)

    @classmethod
    def about(
        cls,
        at: datetime,
        guard: str,
        name: str | None,
        stamp: Stamp | None,
        mark: Mark | None,
        verdict: Verdict,
        ruling: Ruling,
        mode: str,
    ) -> Decision:
        """A decision about this stamp, made while the name had this mark."""
        token, grant, seq = (mark.token, mark.grant, mark.seq) if mark else (None, None, None)
        return cls(at, guard, name, str(stamp) if stamp else None, token, grant, seq, verdict, ruling, mode)


@dataclass(frozen=True, slots=True)
class DecisionCount:
    """Decisions of one kind by one writer: how many, and when the last one was."""

    verdict: str
    ruling: str
    mode: str
    count: int
    recent: int
    """Of these, in the time that is looked at."""
    last: datetime | None = None
    who: str | None = None
    application: str | None = None
    pattern: str | None = None
    """Whose mode counted; None where that is not known: then it counts for every pattern with that mode."""

    @property
    def would_refuse(self) -> bool:
        return self.verdict != "missing" and self.ruling in ("count", "record")

    @property
    def unstamped(self) -> bool:
        return self.verdict == "missing" and self.ruling != "refuse"

    @property
    def refused(self) -> bool:
        return self.ruling == "refuse"


@dataclass(frozen=True, slots=True)
class Next:
    """The stage that comes next; what speaks against it, if anything does."""

    stage: str | None
    reasons: tuple[str, ...] = ()

    @property
    def safe(self) -> bool:
        return self.stage is not None and not self.reasons


@dataclass(frozen=True, slots=True)
class Stage:
    """The mode of the names that match a pattern."""

    pattern: str
    mode: str
    since: datetime | None = None
    next: Next = Next(None)


@dataclass(frozen=True, slots=True)
class Override:
    """Lets names through, for a while."""

    pattern: str
    until: datetime
    who: str
    why: str


@dataclass(frozen=True, slots=True)
class GuardStatus:
    """One guarded table."""

    guard: str
    template: str
    rule: str
    mandatory: bool
    epoch: str | None
    stages: tuple[Stage, ...]
    overrides: tuple[Override, ...] = ()
    marks: int = 0
    highest: int = 0
    refused: int | None = None
    """Every refusal, also one that nobody recorded; None where the store cannot count those."""
    counts: tuple[DecisionCount, ...] = ()
    wrong: tuple[str, ...] = ()
    """What keeps the guard from seeing every write."""
    bypass: tuple[str, ...] = ()
    """Who could go round it, and how."""
    pending: tuple[str, ...] = ()
    """Transactions that began before the last change of a mode, which does not bind them."""


@dataclass(frozen=True, slots=True)
class DatabaseStatus:
    """All guards of a database."""

    now: datetime
    realm: str | None
    guards: tuple[GuardStatus, ...]
    max_jump: int | None = None
    sample: float = 0.0
    proof: bool = False
    unrecorded: int = 0
    """Decisions that could not be written down."""
    patience: float | None = None
    """Seconds that a successor waits for an older transaction; None if the guard has no such setting."""
    schema: Schema | None = None

    @property
    def wrong(self) -> bool:
        return self.unrecorded > 0 or any(guard.wrong for guard in self.guards)


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key that signs stamps, as it may be shown."""

    id: str
    kind: str
    added: datetime
    revoked: datetime | None


@dataclass(frozen=True, slots=True)
class Change:
    """Something that an operator did."""

    at: datetime
    who: str
    application: str
    guard: str | None
    what: str
    detail: dict[str, object]


def advised(status: GuardStatus, now: datetime, quiet_for: float) -> GuardStatus:
    """The status with what it says about each next stage."""
    stages = tuple(replace(stage, next=_next(stage, status, now, quiet_for)) for stage in status.stages)
    return replace(status, stages=stages)


def _next(stage: Stage, status: GuardStatus, now: datetime, quiet_for: float) -> Next:
    """The rule: a stage is followed by the next one when

    - nothing that the next stage would stop was seen in it for `quiet_for` seconds, and it has lasted as long
      (shadow stops nothing, so it may follow at once);
    - every write is seen: no trigger is missing or disabled;
    - no override lets its names through.
    """
    mode = Mode.parse(stage.mode).name
    following = _NEXT.get(mode)
    if following is None:
        return Next(None)
    reasons = [f"{len(status.wrong)} things are wrong"] if len(status.wrong) > 1 else [*status.wrong]
    if mode == "observe":
        return Next(following, tuple(reasons))
    if mode == "enforce" and not status.mandatory:
        reasons.append("without triggers nobody sees a write that carries no stamp")
    if status.overrides:
        reasons.append("an override lets writes through")
    if status.pending:
        reasons.append(f"{several(len(status.pending), 'transaction')} began before the last change")
    against = [count for count in status.counts if _stopped(count, mode) and _concerns(count, stage)]
    reasons += _summed(against, now, quiet_for)
    if stage.since is not None and (age := (now - stage.since).total_seconds()) < quiet_for:
        reasons.append(f"{stage.mode} has lasted {span(age)} of {span(quiet_for)}")
    return Next(following, tuple(reasons))


def _stopped(count: DecisionCount, mode: str) -> bool:
    """Whether the stage after `mode` would have stopped it, or this one has, among the names that it takes."""
    if mode == "enforce":
        return count.unstamped
    return count.would_refuse or (count.refused and count.verdict != "missing")


def _concerns(count: DecisionCount, stage: Stage) -> bool:
    if count.pattern is None:
        return count.recent > 0 and count.mode in (stage.mode, "override")
    return count.recent > 0 and count.pattern == stage.pattern


def _summed(counts: Sequence[DecisionCount], now: datetime, quiet_for: float) -> list[str]:
    kinds = (
        ("unstamped write", [c for c in counts if c.unstamped]),
        ("would-be refusal", [c for c in counts if c.would_refuse]),
        ("refusal", [c for c in counts if c.refused]),
    )
    return [
        f"{several(sum(c.recent for c in found), what)} {_when(found, now, quiet_for)}"
        for what, found in kinds
        if found
    ]


def _when(counts: Sequence[DecisionCount], now: datetime, quiet_for: float) -> str:
    timed = [count for count in counts if count.last is not None]
    if not timed:
        return "in this mode"
    writers = by_writer(timed)
    others = f" and {several(len(writers) - 1, 'other')}" if len(writers) > 1 else ""
    (who, _, last), *_ = writers
    return f"in the last {span(quiet_for)}, last {ago(last, now)} by {who}{others}"


def by_writer(counts: Iterable[DecisionCount]) -> list[tuple[str, int, datetime | None]]:
    """Who, how many, and when the last one was; the one who was there last comes first."""
    found: dict[str, tuple[int, datetime | None]] = {}
    for count in counts:
        who = ", ".join(filter(None, (count.who, count.application))) or "somebody"
        before, last = found.get(who, (0, None))
        latest = max(filter(None, (last, count.last)), default=None)
        found[who] = before + count.count, latest
    rows = [(who, count, last) for who, (count, last) in found.items()]
    return sorted(rows, key=lambda row: row[2].timestamp() if row[2] else 0.0, reverse=True)


def several(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """A time for people, in one unit."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and unit != "d"):
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def ago(at: datetime | None, now: datetime) -> str:
    return "at an unknown time" if at is None else f"{span((now - at).total_seconds())} ago"
