"""How far the rollout of a guard has come, and whether its next stage is safe: values, and one pure rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fenced.errors import InvalidStamp
from fenced.values.decision import MODES, Mark, Mode, Ruling, Verdict
from fenced.values.model import Stamp
from fenced.values.schema import Schema

QUIET_SECONDS = 86_400.0
"""How long a stage must have been quiet before the next one is called safe, unless somebody says otherwise."""

"""The stages of a rollout, in their order."""


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
    address: str | None = None
    """Of the client, as the store sees it; None if it is not known, and for a Unix socket."""
    pid: int | None = None
    """The server's process that served the client."""

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
    """The pattern whose mode applied. None: unknown, counted for every pattern with that mode."""
    address: str | None = None
    """Where the last one came from, as in a Decision."""
    pid: int | None = None

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
    """Roles that can bypass the guard, and how."""
    pending: tuple[str, ...] = ()
    """Transactions that began before the last change of a mode, which does not bind them."""

    @property
    def not_recorded(self) -> int:
        """How many refusals have no record: those of programs that do not use fenced.sql, and those that were lost."""
        recorded = sum(count.count for count in self.counts if count.refused)
        return 0 if self.refused is None else max(0, self.refused - recorded)


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
    elsewhere: str | None = None
    """Where to look for refusals that have no record; None if every refusal has one."""
    doubts: tuple[str, ...] = ()
    """How a crash of the store could lose marks, and what prevents it."""
    failover: str | None = None
    """What a fail-over of the store would lose; None: nothing is known of one."""
    hidden: tuple[str, ...] = ()
    """What this role may not see, and the right that it lacks."""
    local_clock: bool = True
    """Whether `now` is this machine's clock, and not the store's."""

    @property
    def wrong(self) -> bool:
        return self.unrecorded > 0 or bool(self.doubts) or any(guard.wrong for guard in self.guards)


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
    between = MODES[MODES.index(Mode.parse(stage.mode).name) + 1 :]
    return Next(between[0], _against(between[0], stage, status, now, quiet_for)) if between else Next(None)


def skipped(
    status: GuardStatus, pattern: str, mode: str, now: datetime, quiet_for: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stages that a change of the pattern's mode would skip, and what speaks against it. Empty: it skips none."""
    target = Mode.parse(mode).name
    own = {stage.pattern: stage for stage in status.stages}
    stage = own.get(pattern) or own.get("*")
    if stage is None:
        return (), ()
    skips = MODES[MODES.index(Mode.parse(stage.mode).name) + 1 : MODES.index(target)]
    return skips, _against(target, stage, status, now, quiet_for) if skips else ()


def _against(
    target: str, stage: Stage, status: GuardStatus, now: datetime, quiet_for: float
) -> tuple[str, ...]:
    """What speaks against a change of `stage` to the mode `target`. Nothing does when

    - the guard has judged stamps, so that there is something to conclude from;
    - nothing that the target would stop was seen for `quiet_for` seconds, and the stage has lasted as long;
    - every write is seen: no trigger is missing or disabled;
    - no override lets its names through.

    Shadow stops nothing, so it may follow at once.
    """
    reasons = [f"{len(status.wrong)} things are wrong"] if len(status.wrong) > 1 else [*status.wrong]
    if target == "shadow":
        return tuple(reasons)
    if not status.marks and all(count.verdict == "missing" for count in status.counts):
        reasons.append("nothing was judged yet: no program has announced a stamp for a name of this guard")
    if target == "require" and not status.mandatory:
        reasons.append("without triggers nobody sees a write that carries no stamp")
    if status.overrides:
        reasons.append("an override lets writes through")
    if status.pending:
        reasons.append(f"{several(len(status.pending), 'transaction')} began before the last change")
    against = [
        count for count in status.counts if _stopped(count, stage.mode, target) and _concerns(count, stage)
    ]
    reasons += _summed(against, now, quiet_for)
    if stage.since is not None and (age := (now - stage.since).total_seconds()) < quiet_for:
        reasons.append(f"{stage.mode} has lasted {span(age)} of {span(quiet_for)}")
    return tuple(reasons)


def _stopped(count: DecisionCount, mode: str, target: str) -> bool:
    """Whether `target` would have stopped it and `mode` would not, or `mode` has, among the names of a canary."""
    if mode != "enforce" and (count.would_refuse or (count.refused and count.verdict != "missing")):
        return True
    return target == "require" and count.unstamped


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
    first, *others = by_writer(timed)
    more = f" and {several(len(others), 'other')}" if others else ""
    return f"in the last {span(quiet_for)}, last {ago(first.last, now)} by {first.who}{more}"


@dataclass(frozen=True, slots=True)
class ByWriter:
    """The decisions about one writer, identified by its role and its application name."""

    who: str
    count: int
    last: datetime | None
    where: str | None
    """Where the last one came from."""


def by_writer(counts: Iterable[DecisionCount]) -> list[ByWriter]:
    """The counts by writer; the one that wrote last comes first."""
    found: dict[str, ByWriter] = {}
    for count in counts:
        who = ", ".join(filter(None, (count.who, count.application))) or "somebody"
        this = ByWriter(who, count.count, count.last, _where(count))
        before = found.get(who)
        if before is not None:
            latest = max(this, before, key=_last)
            this = replace(latest, count=this.count + before.count)
        found[who] = this
    return sorted(found.values(), key=_last, reverse=True)


def _last(row: ByWriter) -> float:
    return row.last.timestamp() if row.last else 0.0


def _where(count: DecisionCount) -> str | None:
    return None if count.pid is None else f"{count.address or 'this machine'}, process {count.pid}"


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
