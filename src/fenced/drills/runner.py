"""Runs one drill: opens the stage, starts the holders, makes the fault, and checks what was recorded."""

from __future__ import annotations

from fenced.drills.declared import Cast
from fenced.drills.history import check
from fenced.drills.outcome import DrillOutcome, Setting
from fenced.drills.play import Play
from fenced.drills.processes import CouldNotRun
from fenced.drills.programs import NotShown
from fenced.drills.stage import NO_GUARD, DrillStage, Plan, opened
from fenced.drills.story import Log
from fenced.drills.terminal import Screen
from fenced.runtime.clocks import now


def run_drill(plan: Plan, screen: Screen) -> DrillOutcome:
    """Run one drill, again if its fault did not happen, from opening the stage to its findings."""
    if plan.guard == "":
        raise CouldNotRun(f"--guard is an address, or {NO_GUARD}")
    for trial in range(1, plan.drill.tries + 1):
        outcome = _run_once(plan, screen)
        if outcome.verdict != "inconclusive" or outcome.setting is None or trial == plan.drill.tries:
            break
        screen.again(outcome)
    return outcome


def _run_once(plan: Plan, screen: Screen) -> DrillOutcome:
    began = now()
    log, setting, why = Log(began), None, ""
    try:
        with opened(plan) as stage:
            setting = Setting.of(stage)
            log = Log(now(), stage.guarded, screen.step)
            log.history.ttl = stage.ttl
            screen.heading(plan, setting)
            _play(stage, log, screen)
    except NotShown as error:
        why = str(error)
    return DrillOutcome(
        plan, setting, log.history, check(log.history), tuple(log.steps), log.start, now(), why
    )


def _play(stage: DrillStage, log: Log, screen: Screen) -> None:
    many = {f"H{number}": Cast() for number in range(1, stage.plan.holders + 1)}
    with stage.start_holders(stage.drill.cast or many) as holders:
        log.start = now()
        stage.drill.run(Play(stage, holders, log, screen))
