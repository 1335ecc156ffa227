"""Replicas in seeded worlds: lost, late and doubled messages, partitions, restarts, primaries that do not know that
they were deposed. Each world ends with one more primary, which must have all that was acknowledged, once, in its place.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fenced.errors import StaleToken
from fenced.recipes.replicas import Behind, Log, NoMajority, Primary, ReplicaLog, Round, Steps
from fenced.values.decision import Mark, Verdict, judge
from fenced.values.model import Stamp

STEPS = 1500


class Disk:
    """What survives a restart: a store that compares versions, as a guard does."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.log: Log = ()

    def _admit(self, version: Stamp, *, announce: bool) -> None:
        judged = judge(self.mark, version, name="log", rule="retry", realm=None, announce=announce)
        if judged.verdict is not Verdict.ADMIT:
            raise StaleToken(f"version {version.token}", name="log")
        self.mark = judged.mark

    def announce(self, version: Stamp) -> None:
        self._admit(version, announce=True)

    def read(self, version: Stamp) -> Log:
        self._admit(version, announce=True)
        return self.log

    def replace(self, version: Stamp, log: Log) -> None:
        self._admit(version, announce=False)
        self.log = log

    def extend(self, version: Stamp, entries: Log) -> None:
        self._admit(version, announce=False)
        self.log += entries


@dataclass(eq=False)
class Running:
    """A primary in a world, and what it is waiting for."""

    primary: Primary
    steps: Steps | None = None
    what: str = ""
    round: Round | None = None
    number: int = 0
    answers: dict[int, Any] = field(default_factory=dict)
    values: tuple[bytes, ...] = ()
    open: bool = False
    dead: bool = False


@dataclass(frozen=True)
class Message:
    """A call to a replica, or its answer (`result` of a call that was carried out)."""

    running: Running
    number: int
    replica: int
    round: Round | None
    result: Any = None


class ReplicaWorld:
    disk_type: ClassVar[type[Disk]] = Disk
    replica_type: ClassVar[type[ReplicaLog]] = ReplicaLog
    primary_type: ClassVar[type[Primary]] = Primary
    forgets_promises: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = self.rng.choice((3, 3, 5))
        self.disks = [self.disk_type() for _ in range(self.size)]
        self.replicas = [self.start(each) for each in range(self.size)]
        self.up = [True] * self.size
        self.cut: set[tuple[int, int]] = set()
        """By the number of a primary, the replicas that it does not reach."""
        self.messages: list[Message] = []
        self.primaries: list[Running] = []
        self.acknowledged: list[bytes] = []
        self.places: dict[bytes, int] = {}
        self.faults = self.rng.choice((0.03, 0.1, 0.3, 1.0))
        self.doubled = self.rng.choice((0.01, 0.05, 0.15))
        self.counts: Counter[str] = Counter()

    def start(self, number: int) -> ReplicaLog:
        if self.forgets_promises:
            self.disks[number].mark = None
        return self.replica_type(self.disks[number])

    def elect(self) -> Running:
        """The authority grants. The lease before may have expired while its holder goes on."""
        token = len(self.primaries) + 1
        version = Stamp("0" * 16, ("log",), token, 1, f"{token:032x}")
        running = Running(self.primary_type(version, self.size))
        self.primaries.append(running)
        self.counts["primaries"] += 1
        self.go_on(running)
        return running

    def begin(self, running: Running) -> Steps:
        primary = running.primary
        if not running.open:
            running.what = "open"
            return primary.open()
        if primary.stale and self.rng.random() < 0.3:
            running.what = "rebuild"
            return primary.rebuild()
        running.what = "append"
        first = self.counts["appended"]
        running.values = tuple(
            f"{primary.version.token}.{first + each}".encode()
            for each in range(self.rng.choice((1, 1, 2, 5)))
        )
        self.counts["appended"] += len(running.values)
        return primary.append(*running.values)

    def go_on(self, running: Running) -> None:
        """Begin its next steps, or resume them with what has answered so far."""
        if running.dead:
            return
        try:
            if running.steps is None:
                running.steps = self.begin(running)
                running.round = next(running.steps)
            else:
                running.round = running.steps.send(running.answers)
        except StopIteration:
            running.steps = running.round = None
            self.ended(running)
            return
        except NoMajority:
            running.dead = True
            return
        running.number += 1
        running.answers = {}
        self.messages += [
            Message(running, running.number, each, running.round) for each in sorted(running.round.replicas)
        ]

    def ended(self, running: Running) -> None:
        if running.what == "open":
            running.open = True  # from here on readers may see what it has found
            self.show(running, [value for value in running.primary.values if value not in self.acknowledged])
            self.counts["opened"] += 1
        elif running.what == "append":
            self.show(running, running.values)
            self.counts["acknowledged"] += len(running.values)
        else:
            self.counts["rebuilt"] += 1

    def show(self, running: Running, values: Any) -> None:
        places = {entry.value: place for place, entry in enumerate(running.primary.log)}
        self.acknowledged += values
        self.places |= {value: places[value] for value in values}

    def deliver(self, message: Message) -> None:
        running, replica = message.running, message.replica
        if (running.primary.version.token, replica) in self.cut or not self.up[replica]:
            return
        if message.round is None:
            if running.number == message.number and running.steps is not None:
                running.answers[replica] = message.result
                assert running.round is not None
                everybody = len(running.answers) == len(running.round.replicas)
                majority = len(running.answers) >= running.primary.majority
                if everybody or (majority and self.rng.random() < 0.5):
                    self.go_on(running)
            return
        try:
            result = getattr(self.replicas[replica], message.round.call)(*message.round.arguments)
        except (StaleToken, Behind):
            self.counts["refused"] += 1
            return
        self.messages.append(Message(running, message.number, replica, None, result))

    def step(self) -> None:
        rng, roll, faults = self.rng, self.rng.random(), self.faults
        if self.messages and roll < 1 - 0.28 * faults - 0.12:
            place = rng.randrange(len(self.messages)) if rng.random() < 0.4 else 0
            message = self.messages[place] if rng.random() < self.doubled else self.messages.pop(place)
            if rng.random() > 0.03:
                self.deliver(message)
        elif roll < 1 - 0.14 * faults:
            live = [each for each in self.primaries if not each.dead]
            if not self.primaries:
                self.elect()
            elif live:
                running = rng.choice(live[-3:])
                if running.steps is None or rng.random() < 0.04:
                    self.go_on(running)  # its next steps, or a time-out with what has answered so far
        elif roll < 1 - 0.10 * faults:
            down = [each for each in range(self.size) if not self.up[each]]
            replica = rng.choice(down) if down and rng.random() < 0.8 else rng.randrange(self.size)
            self.up[replica] = not self.up[replica]
            if self.up[replica]:
                self.replicas[replica] = self.start(replica)
                self.counts["restarts"] += 1
        elif roll < 1 - 0.05 * faults:
            if self.primaries:
                newest = len(self.primaries) - rng.randrange(min(2, len(self.primaries)))
                pair = (newest, rng.randrange(self.size))
                if self.cut and rng.random() < 0.6:
                    pair = rng.choice(sorted(self.cut))
                self.counts["partitions"] += pair not in self.cut
                self.cut ^= {pair}
        elif roll < 1 - 0.037 * faults or not self.primaries:
            self.elect()

    def run(self) -> str:
        """What was broken; empty: nothing."""
        for _ in range(STEPS):
            self.step()
        self.cut.clear()
        self.messages.clear()
        for replica in range(self.size):
            if not self.up[replica]:
                self.up[replica], self.replicas[replica] = True, self.start(replica)
        last = self.elect()
        order = self.rng.sample(range(self.size), self.size)
        while not last.open:
            self.messages.sort(key=lambda message: order[message.replica])
            while self.messages and not last.open:
                self.deliver(self.messages.pop(0))
            if not last.open:
                if last.dead:
                    return "no primary opens although every replica answers"
                self.go_on(last)
        found = list(last.primary.values)
        places = {entry.value: place for place, entry in enumerate(last.primary.log)}
        if lost := [value for value in self.acknowledged if value not in places]:
            return f"{len(lost)} of {len(self.acknowledged)} acknowledged entries are lost"
        if moved := [value for value, place in self.places.items() if places[value] != place]:
            return f"{len(moved)} acknowledged entries have moved"
        return "an entry is there twice" if len(set(found)) != len(found) else ""


# Ten classical mistakes.


class TakesAnyLog(Primary):
    """It takes the log of the first replica that answers."""

    def _newest(self, logs: Any) -> Log:
        return tuple(logs[0])


class LongestLogWins(Primary):
    """It takes the longest log, whatever its last version."""

    def _newest(self, logs: Any) -> Log:
        return max(logs, key=lambda log: (len(log), log[-1].version if log else 0))


class BumpsOneOnly(Primary):
    """It is content with one promise."""

    def _expect_majority(self, done: Any) -> None:
        if not done:
            raise NoMajority("nobody")


class AcknowledgesAlone(Primary):
    """It acknowledges what a single replica has."""

    def append(self, *values: bytes) -> Steps:
        majority, self.majority = self.majority, 1
        try:
            yield from super().append(*values)
        finally:
            self.majority = majority


class ServesTooEarly(Primary):
    """It opens when one replica has its log."""

    def _install(self, which: Any) -> Steps:
        yield from super()._install(which)
        if self.current:
            self.majority = 1


class KeepsTheLate(Primary):
    """A replica that missed an entry still counts."""

    def append(self, *values: bytes) -> Steps:
        before = set(self.current)
        yield from super().append(*values)
        self.current = before


class NoOpenEntry(Primary):
    """It writes nothing of its own before it opens, so the last version of its log is another one's."""

    def open(self) -> Steps:
        found = yield Round("bump", (self.version,), frozenset(range(self.count)))
        self._expect_majority(found)
        self.log = self._newest(list(found.values()))
        yield from self._install(found)
        self._expect_majority(self.current)
        self._open = True


class FillsGaps(ReplicaLog):
    """It takes entries whatever it lacks before them."""

    def append(self, version: Stamp, index: int, entries: Log) -> int:
        here = self._store.read(version)
        self._store.replace(version, (*here[:index], *entries))
        return index + len(entries)


class AppendsToAnyLog(ReplicaLog):
    """It does not look whose entry the last one is."""

    def append(self, version: Stamp, index: int, entries: Log) -> int:
        here = self._store.read(version)
        if index > len(here):
            raise Behind("entries are missing")
        self._store.extend(version, entries[len(here) - index :])
        return len(here)


class ReplacesLate(ReplicaLog):
    """A late copy of an install removes what was appended since."""

    def install(self, version: Stamp, log: Log) -> int:
        self._store.replace(version, log)
        return len(log)


class ComparesNothing(Disk):
    """It takes every version."""

    def _admit(self, version: Stamp, *, announce: bool) -> None:
        return


def world_with(**parts: Any) -> type[ReplicaWorld]:
    return type("PlantedWorld", (ReplicaWorld,), parts)


MISTAKES: dict[str, type[ReplicaWorld]] = {
    "takes any log": world_with(primary_type=TakesAnyLog),
    "longest log wins": world_with(primary_type=LongestLogWins),
    "bumps one only": world_with(primary_type=BumpsOneOnly),
    "acknowledges alone": world_with(primary_type=AcknowledgesAlone),
    "serves before a majority is rebuilt": world_with(primary_type=ServesTooEarly),
    "gaps are filled in": world_with(primary_type=KeepsTheLate, replica_type=FillsGaps),
    "no open entry": world_with(primary_type=NoOpenEntry, replica_type=AppendsToAnyLog),
    "promises are not durable": world_with(forgets_promises=True),
    "versions are not compared": world_with(disk_type=ComparesNothing),
}
