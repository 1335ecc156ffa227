"""The result of a drill as one value, for the terminal, JSON and the report."""

from __future__ import annotations

import datetime
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
        "stale_admitted": len(findings.stale),
        "lost_updates": len(findings.lost),
        "refused_applied": len(findings.refused_applied),
        "tokens_fallen": len(findings.tokens_fallen),
        "revived": len(findings.revived),
        "names": list(outcome.names),
        "finals": {name: sorted(ids) for name, ids in outcome.history.finals.items()},
        "ttl": plan.ttl,
        "seed": plan.seed,
        "started": outcome.started,
        "seconds": round(outcome.seconds, 3),
        "doubts": list(outcome.doubts),
        "versions": versions(),
        **as_json(outcome.history, start=outcome.start),
    }


def sentence(outcome: DrillOutcome) -> str:
    """The verdict in a sentence that claims no more than the drill has shown."""
    findings = outcome.findings
    if outcome.plan.scenario == "storm":
        return _storm_sentence(outcome)
    if findings.revived:
        return "A renewal that came too late revived a lease that had moved on."
    if findings.held:
        if outcome.plan.scenario == "late-renewal":
            return "The late renewal revived nothing, and the database refused A's late write."
        return "A did not know that it was late. The database did, and refused its write."
    if outcome.guarded:
        return "The guard admitted a stale write. If its mode is not enforce or require, that is why."
    return "A did not know that it was late, and its write wiped out a sale that B was told had succeeded."


def _storm_sentence(outcome: DrillOutcome) -> str:
    findings = outcome.findings
    total, lost, stale = findings.acknowledged, len(findings.lost), len(findings.stale)
    if not findings.held:
        return (
            f"{lost} of {total} acknowledged updates are gone ({findings.lost_percent:.1f} %), "
            f"and {stale} stale operations were admitted."
        )
    if not outcome.guarded:
        return (
            f"None of {total} acknowledged updates was lost this time, and nothing would have prevented it."
        )
    return f"None of {total} acknowledged updates is missing, and no stale operation was admitted."
