"""Many holders read, modify and write a few names, and the drill stops the current holders repeatedly."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fenced.drills.history import History
from fenced.drills.pause import why_not
from fenced.drills.processes import PATIENCE_SECONDS, CouldNotRun, HolderProcess, HolderProcesses, Message
from fenced.drills.stage import DrillStage
from fenced.drills.story import Log
from fenced.drills.terminal import Screen
from fenced.runtime.clocks import now

TTL = 0.3
SECONDS = 8.0
HOLDERS = 4
NAMES = 2
PAUSE_TTLS = (1.5, 3.0)
"""How long a pause lasts, in ttls."""
CALM_TTLS = (0.5, 1.5)
"""How long no holder of a name is stopped after a pause, in ttls."""
_AIM_SECONDS = 0.003
_TICK_SECONDS = 0.25


@dataclass(slots=True)
class Tally:
    """The counts in the progress line."""

    acknowledged: int = 0
    refused: int = 0
    pauses: int = 0


@dataclass(slots=True)
class Storm:
    """Stops holders between their read and their write, and resumes them after their lease has expired."""

    ttl: float
    end: float
    stopped_max: int
    random: random.Random
    log: Log
    calm_until: dict[str, float] = field(default_factory=dict)
    stopped: dict[str, tuple[HolderProcess, Message, float]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def take(self, process: HolderProcess, message: Message) -> bool:
        """Process a message; True if its holder has finished."""
        self.log.take(process.holder, message)
        match message["event"]:
            case "holding":
                self._consider(process, message)
            case "operation":
                self.tally.acknowledged += message["kind"] == "write" and message["decision"] == "admitted"
                self.tally.refused += message["decision"] == "refused"
        return bool(message["event"] == "done")

    def _consider(self, process: HolderProcess, message: Message) -> None:
        """Stop the holder if its name is due and it is certainly still between its read and its write.

        A process that is stopped inside an SQLite transaction would block its successor.
        """
        name, moment = message["name"], now()
        due = self.calm_until.get(name, 0.0) <= moment < self.end and name not in self.stopped
        if not due or len(self.stopped) >= self.stopped_max or message["until"] - moment < _AIM_SECONDS:
            return
        process.stop()
        self.tally.pauses += 1
        wake = moment + self.random.uniform(*PAUSE_TTLS) * self.ttl
        self.stopped[name] = (process, message, wake)

    def wake_due(self) -> None:
        """Resume the holders whose pause has ended."""
        for name, (process, message, wake) in list(self.stopped.items()):
            if now() >= wake:
                del self.stopped[name]
                moment = now()
                self.log.paused(process.holder, message, process.resume(), moment)
                self.calm_until[name] = moment + self.random.uniform(*CALM_TTLS) * self.ttl

    def next_wake(self) -> float:
        return min((wake for _, _, wake in self.stopped.values()), default=now() + _TICK_SECONDS)


def run(stage: DrillStage, log: Log, screen: Screen) -> None:
    """Run the storm for `seconds`, then let every holder finish its current turn."""
    plan = stage.plan
    with stage.start_holders([f"H{number}" for number in range(1, plan.holders + 1)]) as holders:
        log.start = now()
        for process in holders.processes.values():
            process.send("storm", names=stage.names, seconds=plan.seconds)
        end, somebody_runs = log.start + plan.seconds, plan.holders - 1
        storm = Storm(plan.ttl, end, somebody_runs, random.Random(plan.seed), log)
        _run_storm(holders, storm, screen)
    stage.read_finals(log.history)
    if not log.history.writes("admitted"):
        raise CouldNotRun(_why_nothing(log.history))


def _run_storm(holders: HolderProcesses, storm: Storm, screen: Screen) -> None:
    last = storm.end + PAUSE_TTLS[1] * storm.ttl + PATIENCE_SECONDS
    busy = set(holders.processes)
    while busy:
        moment = now()
        if moment > last:
            raise CouldNotRun(f"holders did not finish: {', '.join(sorted(busy))}")
        received = holders.next_message(min(storm.next_wake(), moment + _TICK_SECONDS))
        if received is not None and storm.take(*received):
            busy.discard(received[0].holder)
        storm.wake_due()
        screen.tick(_progress(storm, moment))


def _why_nothing(history: History) -> str:
    """Why no update was acknowledged: such a storm shows nothing."""
    for each in history.operations:
        if each.decision != "admitted":
            return why_not({"kind": each.kind, "decision": each.decision, "why": each.why})
    return "no update was acknowledged; give the storm more --seconds or a longer --ttl"


def _progress(storm: Storm, moment: float) -> str:
    tally, left = storm.tally, max(0.0, storm.end - moment)
    return (
        f"{left:4.1f} s left   acknowledged {tally.acknowledged}   refused {tally.refused}   "
        f"pauses {tally.pauses}   stopped now {len(storm.stopped)}"
    )
