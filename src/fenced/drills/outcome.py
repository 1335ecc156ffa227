"""The result of a drill as one value, for the terminal, JSON and the report."""

from __future__ import annotations

import datetime
import math
import platform
import sqlite3
from dataclasses import asdict, dataclass
from functools import cached_property

import fenced
from fenced.drills.history import Findings, History, Verdict, as_json
from fenced.drills.stage import NO_GUARD, DrillStage, Plan
from fenced.drills.story import StoryStep


@dataclass(frozen=True, slots=True)
class Setting:
    """What a drill ran against, for people: addresses without secrets."""

    authority: str
    guard: str
    names: tuple[str, ...]
    doubts: tuple[str, ...]
    fresh_authority: bool
    fresh_guard: bool
    ttl: float
    seconds: float

    @classmethod
    def of(cls, stage: DrillStage) -> Setting:
        return cls(
            stage.authority_shown,
            stage.guard_shown,
            tuple(stage.names),
            stage.doubts,
            stage.fresh_authority,
            stage.fresh_guard,
            stage.ttl,
            stage.seconds,
        )


@dataclass(frozen=True)
class DrillOutcome:
    """One finished drill."""

    plan: Plan
    setting: Setting | None
    """None: the drill could not be set up, and `why` says why."""
    history: History
    findings: Findings
    steps: tuple[StoryStep, ...]
    start: float
    ended: float
    why: str = ""
    """Why nothing was shown."""

    @property
    def guarded(self) -> bool:
        return self.plan.guard != NO_GUARD

    @property
    def seconds(self) -> float:
        return self.ended - self.start

    @cached_property
    def verdict(self) -> Verdict:
        """By the recorded facts alone. A drill that broke off has shown nothing, unless there is harm already."""
        found = self.plan.drill.verdict(self.history, self.findings)
        return "inconclusive" if self.why and (found == "held" or not self.history.finals) else found

    @cached_property
    def started(self) -> str:
        started = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=self.seconds)
        return f"{started:%Y-%m-%dT%H:%M:%SZ}"

    @property
    def sentence(self) -> str:
        """The verdict in a sentence that claims no more than the drill has shown."""
        match self.verdict:
            case "inconclusive":
                return self._nothing_shown()
            case "held" if self.plan.drill.many:
                return (
                    f"{counted(self.findings.overtaken, 'overtaken holder')} came back, and each was refused. "
                    f"None of {self.findings.acknowledged} acknowledged updates is missing."
                )
            case "held" if not self.guarded:
                return f"Nothing was lost here, and there was no guard. {self.plan.drill.teaches}"
            case "held":
                return self.plan.drill.held
            case "broken":
                return self._harm()

    def _nothing_shown(self) -> str:
        if self.why:
            return f"This shows nothing: {self.why}."
        if not self.plan.drill.many:
            return (
                "The fault did not happen, so there was nothing to refuse: this shows nothing. Run it again."
            )
        longer = math.ceil(max(2 * self.seconds, 5 * self.history.ttl))
        return (
            "Nobody was overtaken, so there was nothing to refuse: this shows nothing. "
            f"Let it last longer: --seconds {longer}."
        )

    def _harm(self) -> str:
        findings, harm = self.findings, self.findings.harm - self.plan.drill.accepts
        if "revived" in harm:
            return "A renewal that came too late revived a lease that had moved on."
        if "tokens_fallen" in harm:
            return f"The authority granted a token that was not new: {findings.tokens_fallen[0].token}."
        if "refused_applied" in harm:
            return f"{len(findings.refused_applied)} updates were refused, and are there nevertheless."
        if self.plan.drill.many:
            return (
                f"{len(findings.lost)} of {findings.acknowledged} acknowledged updates are gone "
                f"({findings.lost_percent:.1f} %), {len(findings.doubled)} are doubled. "
                f"Stale operations admitted: {len(findings.stale)}."
            )
        if "stale" in harm and self.guarded:
            return "The guard admitted a stale write. If its mode is not enforce or require, that is why."
        return self.plan.drill.broken


def versions() -> dict[str, str]:
    return {
        "fenced": fenced.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()}",
    }


def to_json(outcome: DrillOutcome) -> dict[str, object]:
    """The one object that `--json` prints."""
    plan, findings, setting = outcome.plan, outcome.findings, outcome.setting
    return {
        "drill": plan.drill.name,
        "failure": plan.drill.failure,
        "verdict": outcome.verdict,
        "sentence": outcome.sentence,
        "authority": None if setting is None else setting.authority,
        "guard": None if setting is None else setting.guard,
        "acknowledged": findings.acknowledged,
        "contested": findings.contested,
        "refused": findings.refused,
        "overtaken": findings.overtaken,
        "stale_admitted": len(findings.stale),
        "lost_updates": len(findings.lost),
        "doubled_updates": len(findings.doubled),
        "refused_applied": len(findings.refused_applied),
        "tokens_fallen": len(findings.tokens_fallen),
        "revived": len(findings.revived),
        "names": [] if setting is None else list(setting.names),
        "finals": {name: sorted(ids) for name, ids in outcome.history.finals.items()},
        "facts": outcome.history.facts,
        "ttl": outcome.history.ttl,
        "ttl_asked": plan.ttl,
        "factor": factor(outcome),
        "seed": plan.seed,
        "started": outcome.started,
        "seconds": round(outcome.seconds, 3),
        "doubts": [] if setting is None else list(setting.doubts),
        "versions": versions(),
        **as_json(outcome.history, start=outcome.start),
        "steps": [asdict(each) for each in outcome.steps],
    }


def factor(outcome: DrillOutcome) -> float | None:
    """How long a second of the literature is here."""
    drill, ttl = outcome.plan.drill, outcome.history.ttl
    return None if drill.many or not ttl else round(ttl / drill.story_seconds, 4)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
