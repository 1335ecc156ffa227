"""The result of a drill as one value, for the terminal, JSON and the report."""

from __future__ import annotations

import datetime
import math
import platform
import sqlite3
from dataclasses import dataclass

import fenced
from fenced.drills.history import Findings, History, as_json
from fenced.drills.stage import DrillStage, Plan
from fenced.drills.story import Log, StoryStep


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """One finished drill."""

    plan: Plan
    authority: str
    guard: str
    guarded: bool
    names: tuple[str, ...]
    doubts: tuple[str, ...]
    history: History
    findings: Findings
    steps: tuple[StoryStep, ...]
    start: float
    seconds: float
    started: str


def outcome(stage: DrillStage, log: Log, findings: Findings, *, ended: float) -> DrillOutcome:
    started = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ended - log.start)
    return DrillOutcome(
        plan=stage.plan,
        authority=stage.authority_shown,
        guard=stage.guard_shown,
        guarded=stage.guarded,
        names=tuple(stage.names),
        doubts=stage.doubts,
        history=log.history,
        findings=findings,
        steps=tuple(log.steps),
        start=log.start,
        seconds=ended - log.start,
        started=f"{started:%Y-%m-%dT%H:%M:%SZ}",
    )


def versions() -> dict[str, str]:
    return {
        "fenced": fenced.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()}",
    }


def to_json(outcome: DrillOutcome) -> dict[str, object]:
    """The one object that `--json` prints."""
    plan, findings = outcome.plan, outcome.findings
    return {
        "scenario": plan.scenario,
        "authority": outcome.authority,
        "guard": outcome.guard,
        "verdict": findings.verdict,
        "acknowledged": findings.acknowledged,
        "contested": findings.contested,
        "refused": findings.refused,
        "overtaken": findings.overtaken,
        "stale_admitted": len(findings.stale),
        "lost_updates": len(findings.lost),
        "refused_applied": len(findings.refused_applied),
        "tokens_fallen": len(findings.tokens_fallen),
        "revived": len(findings.revived),
        "names": list(outcome.names),
        "finals": {name: sorted(ids) for name, ids in outcome.history.finals.items()},
        "ttl": outcome.history.ttl,
        "ttl_asked": plan.ttl,
        "seed": plan.seed,
        "started": outcome.started,
        "seconds": round(outcome.seconds, 3),
        "doubts": list(outcome.doubts),
        "versions": versions(),
        **as_json(outcome.history, start=outcome.start),
    }


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sentence(outcome: DrillOutcome) -> str:
    """The verdict in a sentence that claims no more than the drill has shown."""
    findings, storm = outcome.findings, outcome.plan.scenario == "storm"
    match findings.verdict:
        case "inconclusive":
            longer = math.ceil(max(2 * outcome.seconds, 5 * outcome.history.ttl))
            advice = f"Let it last longer: --seconds {longer}." if storm else "Run it again."
            return f"Nobody was overtaken, so there was nothing to refuse: this shows nothing. {advice}"
        case "held" if storm:
            return (
                f"{counted(findings.overtaken, 'overtaken holder')} came back, and each was refused. "
                f"None of {findings.acknowledged} acknowledged updates is missing."
            )
        case "held" if outcome.plan.scenario == "late-renewal":
            return "The late renewal revived nothing; the database refused A's write."
        case "held":
            return "A did not know that it was late. The database did, and refused it."
        case "broken":
            return _fault(outcome)


def _fault(outcome: DrillOutcome) -> str:
    findings = outcome.findings
    if findings.revived:
        return "A renewal that came too late revived a lease that had moved on."
    if findings.tokens_fallen:
        return f"The authority granted a token that was not new: {findings.tokens_fallen[0].token}."
    if findings.refused_applied:
        return f"{len(findings.refused_applied)} updates were refused, and are there nevertheless."
    if outcome.plan.scenario == "storm":
        return (
            f"{len(findings.lost)} of {findings.acknowledged} acknowledged updates are gone "
            f"({findings.lost_percent:.1f} %). Stale operations admitted: {len(findings.stale)}."
        )
    if outcome.guarded:
        return "The guard admitted a stale write. If its mode is not enforce or require, that is why."
    return "A did not know that it was late: its write wiped out B's sale."
