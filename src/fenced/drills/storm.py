"""Many holders read, modify and write a few names, and the drill stops the current holders repeatedly."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from fenced.drills.declared import Drill
from fenced.drills.history import History
from fenced.drills.play import Play, why_not
from fenced.drills.processes import PATIENCE_SECONDS, CouldNotRun, HolderProcess, HolderProcesses, Message
from fenced.drills.story import Log
from fenced.drills.terminal import Screen
from fenced.runtime.clocks import now

HOLDERS = {"storm": 8, "set": 5}
NAMES = {"storm": 4, "set": 1}
PAUSE_TTLS = (1.0, 2.5)
"""How long a pause lasts, in ttls, if the holder was overtaken meanwhile."""
PAUSE_TTLS_MAX = 4.0
"""How long it lasts if nobody overtakes the holder: it may be stopped inside a transaction that all others wait for."""
CALM_TTLS = (0.25, 1.25)
"""How long no holder of a name is stopped after a pause, in ttls."""
_AIM_SECONDS = 0.003
_TICK_SECONDS = 0.25


@dataclass(slots=True)
class Tally:
    """The counts in the progress line."""

    acknowledged: int = 0
    refused: int = 0
    pauses: int = 0


class StoppedHolder(NamedTuple):
    """A process that is stopped, what it did last, and when it is resumed."""

    process: HolderProcess
    message: Message
    wake: float
    """If it was overtaken by then, or as soon as it is."""
    latest: float
    """In any case."""


@dataclass(slots=True)
class Storm:
    """Stops holders between their read and their write, and resumes them after a newer holder has read."""

    ttl: float
    end: float
    stopped_max: int
    random: random.Random
    log: Log
    newest: dict[str, int] = field(default_factory=dict)
    """For each name, the highest token of an operation that was admitted."""
    calm_until: dict[str, float] = field(default_factory=dict)
    stopped: dict[str, StoppedHolder] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def take(self, process: HolderProcess, message: Message) -> bool:
        """Process a message; True if its holder has finished."""
        self.log.take(process.holder, message)
        match message["event"]:
            case "holding":
                self._consider(process, message)
            case "operation":
                self._note_newest(message)
                self.tally.acknowledged += message["kind"] == "write" and message["decision"] == "admitted"
                self.tally.refused += message["decision"] == "refused"
        return bool(message["event"] == "done")

    def _note_newest(self, message: Message) -> None:
        if message["decision"] == "admitted" and message["kind"] != "announce":
            self.newest[message["name"]] = max(message["token"], self.newest.get(message["name"], 0))

    def _consider(self, process: HolderProcess, message: Message) -> None:
        """Stop the holder if its name is due and it is certainly still between its read and its write.

        A process that is stopped inside an SQLite transaction would block its successor. In the last ttl of the storm
        nobody could take over any more.
        """
        name, moment = message["name"], now()
        due = self.calm_until.get(name, 0.0) <= moment < self.end - self.ttl and name not in self.stopped
        if not due or len(self.stopped) >= self.stopped_max or message["until"] - moment < _AIM_SECONDS:
            return
        process.stop()
        self.tally.pauses += 1
        wake = moment + self.random.uniform(*PAUSE_TTLS) * self.ttl
        self.stopped[name] = StoppedHolder(process, message, wake, moment + PAUSE_TTLS_MAX * self.ttl)

    def wake_due(self) -> None:
        """Resume the holders that are due; at the end of the storm, all of them."""
        for name, stopped in list(self.stopped.items()):
            moment = now()
            if moment >= min(self.end, self._due(name)):
                del self.stopped[name]
                self.log.paused(stopped.process.holder, stopped.message, stopped.process.resume(), moment)
                self.calm_until[name] = moment + self.random.uniform(*CALM_TTLS) * self.ttl

    def next_wake(self) -> float:
        """When the next holder is due, as far as is known now: a message that it was overtaken may make it earlier."""
        return min(map(self._due, self.stopped), default=math.inf)

    def _due(self, name: str) -> float:
        stopped = self.stopped[name]
        overtaken = self.newest.get(name, 0) > stopped.message["token"]
        return stopped.wake if overtaken else stopped.latest


def storm(play: Play) -> None:
    """Run for `seconds`, then let every holder finish its current turn."""
    stage, log = play.stage, play.log
    for process in play.holders.processes.values():
        process.send("storm", names=stage.names, seconds=stage.seconds)
    end, somebody_runs = log.start + stage.seconds, stage.plan.holders - 1
    run = Storm(stage.ttl, end, somebody_runs, random.Random(stage.plan.seed), log)
    _run_storm(play.holders, run, play.screen)
    stage.read_finals(log.history)
    _check_admitted(log.history)


def _run_storm(holders: HolderProcesses, storm: Storm, screen: Screen) -> None:
    last = storm.end + storm.ttl + PATIENCE_SECONDS
    busy = set(holders.processes)
    while busy:
        moment = now()
        if moment > last:
            raise CouldNotRun(f"holders did not finish: {', '.join(sorted(busy))}")
        received = holders.next_message(min(storm.next_wake(), moment + _TICK_SECONDS))
        if received is not None and storm.take(*received):
            busy.discard(received[0].holder)
        storm.wake_due()
        screen.tick(progress(storm, moment))


def _check_admitted(history: History) -> None:
    """Raise CouldNotRun if the resource has admitted no write at all, and say why."""
    failed = [each for each in history.operations if each.decision != "admitted"]
    if failed and not history.writes("admitted"):
        first = failed[0]
        raise CouldNotRun(why_not({"kind": first.kind, "decision": first.decision, "why": first.why}))


def progress(storm: Storm, moment: float) -> str:
    """The line that shows how far a storm is; it fits 80 columns."""
    tally, left = storm.tally, max(0.0, storm.end - moment)
    return (
        f"  {left:.1f} s left  acknowledged {tally.acknowledged}  refused {tally.refused}  "
        f"pauses {tally.pauses}  stopped {len(storm.stopped)}"
    )


STORM = Drill(
    "storm",
    "all of it, again and again",
    "Holders are stopped while they work",
    "Holders are stopped again and again while they work. Is any update lost?",
    "One story is an example. A storm counts: every acknowledged update must be there at the end.",
    storm,
    "",
    ttl=0.3,
    cast={},
    tries=1,
)
SET = Drill(
    "set",
    "unique elements added to a set under a lock",
    "Holders add unique elements to one set, and are stopped while they do",
    "Holders add unique elements to one set. Is an element lost or doubled?",
    "The workload of Jepsen's tests of locks: each holder reads the set, adds an element of its own, writes it back.",
    storm,
    "",
    ttl=0.3,
    cast={},
    tries=1,
)
