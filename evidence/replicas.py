"""The program examples/replicas.py under kills, stops and partitions; and the primaries and replicas in seeded worlds.

Three replicas and three that would be primary are processes; leases come from a service. Each primary reaches the
service and the replicas through relays of its own. The faults come in turn: a replica is killed, the primary is killed,
stopped, cut off from the service, cut off from the replicas. Each waits for the other primary or for the next entry.
Looked for: an acknowledged entry that is lost, there twice or at another place, and a stale replica that nobody found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fenced.drills.relay import Proxy
from fenced.drills.relay.ports import HOST
from fenced.runtime.clocks import now
from fenced_testkit.servers import ServiceServer
from tests.recipes.replica_worlds import MISTAKES, ReplicaWorld

PROGRAM = Path(__file__).parents[1] / "examples" / "replicas.py"
WORLDS = 5_000
REPLICAS = 3
CANDIDATES = 3
TTL = 1.0
GIVE_UP_SECONDS = 60.0
KILLS = 100
REPLICA_KILLED, KILLED, STOPPED = "replica killed", "primary killed", "primary stopped"
WITHOUT_AUTHORITY, WITHOUT_REPLICAS = "primary without the authority", "primary without the replicas"
FAULTS = (
    REPLICA_KILLED,
    KILLED,
    REPLICA_KILLED,
    STOPPED,
    REPLICA_KILLED,
    WITHOUT_AUTHORITY,
    WITHOUT_REPLICAS,
)


class StuckError(Exception):
    """For so long that waiting on makes no sense."""


class Program:
    """The example as a process, and what it has said so far."""

    def __init__(self, folder: Path, part: str, name: str, *words: object) -> None:
        self.name, self._out = name, folder / f"said by {name}"
        command = [sys.executable, str(PROGRAM), part, name, *map(str, words)]
        with self._out.open("wb") as out, (folder / f"errors of {name}").open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=out, stderr=errors)

    def said(self, what: str) -> list[list[Any]]:
        text, _, _ = self._out.read_text().rpartition("\n")
        return [words for first, *words in map(json.loads, text.splitlines()) if first == what]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def until(truth: Any, what: str) -> Any:
    began = now()
    while not (found := truth()):
        if now() - began > GIVE_UP_SECONDS:
            raise StuckError(f"{what}: not within {GIVE_UP_SECONDS:g} s")
        threading.Event().wait(0.01)
    return found


class Candidate:
    """One that would be primary, and the relays through which it reaches the others. A new process after each kill."""

    def __init__(self, number: int, service: ServiceServer, ports: Sequence[int], folder: Path) -> None:
        self._number, self._folder, self._starts = number, folder, 0
        self.to_service = Proxy(service.host, service.port)
        self.to_replicas = [Proxy(HOST, port) for port in ports]
        self.past: list[Program] = []

    def start(self) -> None:
        self._starts += 1
        url = f"http://{self.to_service.host}:{self.to_service.port}"
        ports = [each.port for each in self.to_replicas]
        name = f"c{self._number}.{self._starts}"
        self.past.append(Program(self._folder, "primary", name, url, TTL, *ports))

    @property
    def program(self) -> Program:
        return self.past[-1]

    @property
    def token(self) -> int:
        """Of its newest time as primary, in this process."""
        return max((token for (token,) in self.program.said("opened")), default=0)

    def close(self) -> None:
        self.program.kill()
        for each in (self.to_service, *self.to_replicas):
            each.stop()


class ReplicaStorm:
    def __init__(self, folder: Path, service: ServiceServer) -> None:
        self._folder, self._service = folder, service
        self.counts: Counter[str] = Counter()
        self.replicas = [Program(folder, "replica", str(number), folder, 0) for number in range(REPLICAS)]
        self.ports = [int(self._port(each)) for each in self.replicas]
        self.candidates = [Candidate(number, service, self.ports, folder) for number in range(CANDIDATES)]
        for each in self.candidates:
            each.start()

    def _port(self, replica: Program) -> int:
        (port,) = until(lambda: replica.said("port"), "a replica listens")[0]
        return int(port)

    def primary(self, after: int = 0) -> Candidate:
        """Whoever has opened with the highest token, if that is higher than `after`."""

        def look() -> Candidate | None:
            newest = max(self.candidates, key=lambda each: each.token)
            return newest if newest.token > after else None

        found: Candidate = until(look, f"a primary opens after token {after}")
        return found

    def acknowledged(self) -> list[tuple[str, int]]:
        return [
            (value, place)
            for each in self.candidates
            for program in each.past
            for value, place in program.said("acknowledged")
        ]

    def go_on(self) -> None:
        """Until something more is acknowledged: a fault meets a log that is written."""
        before = len(self.acknowledged())
        until(lambda: len(self.acknowledged()) > before, "something more is acknowledged")

    def fault(self, what: str) -> None:
        self.go_on()
        if what == REPLICA_KILLED:
            self._kill_replica()
        else:
            leads = self.primary()
            getattr(self, "_" + what.replace(" ", "_"))(leads, leads.token)
        self.counts[what] += 1

    def _kill_replica(self) -> None:
        number = self.counts[REPLICA_KILLED] % REPLICAS
        self.replicas[number].kill()
        self.go_on()  # what it misses makes it stale
        self.replicas[number] = Program(
            self._folder, "replica", str(number), self._folder, self.ports[number]
        )
        self._port(self.replicas[number])

    def _primary_killed(self, leads: Candidate, token: int) -> None:
        leads.program.kill()
        leads.start()
        self.primary(after=token)

    def _primary_stopped(self, leads: Candidate, token: int) -> None:
        os.kill(leads.program.process.pid, signal.SIGSTOP)
        try:
            self.primary(after=token)
        finally:
            os.kill(leads.program.process.pid, signal.SIGCONT)

    def _primary_without_the_authority(self, leads: Candidate, token: int) -> None:
        """Its lease ends, and it writes on: it does not look at its lease."""
        stepped = len(leads.program.said("stepped down"))
        leads.to_service.black_hole()
        self.primary(after=token)
        until(lambda: len(leads.program.said("stepped down")) > stepped, "the deposed primary steps down")
        leads.to_service.heal()
        if leads.program.said("stepped down")[stepped] == ["StaleToken"]:
            self.counts["cut off from the authority, refused by a replica"] += 1

    def _primary_without_the_replicas(self, leads: Candidate, token: int) -> None:
        for each in leads.to_replicas:
            each.refuse()
            each.cut()
        self.primary(after=token)
        for each in leads.to_replicas:
            each.heal()

    def close(self) -> None:
        for candidate in self.candidates:
            candidate.close()
        for replica in self.replicas:
            replica.kill()

    def found(self) -> dict[str, Any]:
        """Kill who would be primary, and let one more open and read."""
        for each in self.candidates:
            each.program.kill()
        programs = [program for each in self.candidates for program in each.past]
        acknowledged = self.acknowledged()
        reader = Program(self._folder, "read", "reader", self._service.url(), TTL, *self.ports)
        values: list[str] = until(lambda: reader.said("values"), "the last primary reads")[0]
        reader.process.wait()
        logs = {(self._folder / str(number) / "log").read_bytes() for number in range(REPLICAS)}
        broken = broken_promises(acknowledged, values)
        if len(logs) != 1:
            broken.append(f"{len(logs)} logs of {REPLICAS} replicas after the last primary rebuilt them")
        stepped = Counter(error for program in programs for (error,) in program.said("stepped down"))
        return {
            "faults": dict(self.counts),
            "primaries": sum(len(program.said("opened")) for program in programs),
            "acknowledged": len(acknowledged),
            "in_the_log_without_acknowledgement": len(set(values) - {value for value, _ in acknowledged}),
            "stale_replicas_rebuilt": sum(len(program.said("rebuilt")) for program in programs),
            "primaries_that_stepped_down": dict(stepped),
            "broken": broken,
        }


def broken_promises(acknowledged: list[tuple[str, int]], values: list[str]) -> list[str]:
    """What must not have become of what was acknowledged at its place."""
    counts, broken = Counter(values), list[str]()
    for value, place in acknowledged:
        if not counts[value]:
            broken.append(f"{value} is lost")
        elif counts[value] > 1:
            broken.append(f"{value} is there {counts[value]} times")
        elif values[place] != value:
            broken.append(f"{value} has moved from {place} to {values.index(value)}")
    return broken


def storm(kills: int, faults: Sequence[str] = FAULTS) -> dict[str, Any]:
    """The faults in turn, until so many processes were killed; or each once."""
    began = now()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, ServiceServer() as service:
        running, stuck = ReplicaStorm(Path(name), service), list[str]()
        with contextlib.closing(running):
            try:
                number = 0
                while number < len(faults) or running.counts[REPLICA_KILLED] + running.counts[KILLED] < kills:
                    running.fault(faults[number % len(faults)])
                    number += 1
                running.go_on()
                found = running.found()
            except StuckError as error:
                found, stuck = {"faults": dict(running.counts), "broken": []}, [str(error)]
    found["broken"] = stuck + found["broken"]
    return {"ttl": TTL, "seconds": round(now() - began), **found}


def worlds(count: int) -> dict[str, Any]:
    counts, broken = Counter[str](), dict[str, str]()
    for seed in range(count):
        world = ReplicaWorld(seed)
        if said := world.run():
            broken[str(seed)] = said
        counts += world.counts
    return {
        "seeds": f"0-{count - 1}",
        "broken": broken,
        "counts": dict(counts.most_common()),
        "planted_mistakes_found_in": {name: _found_in(kind, count) for name, kind in MISTAKES.items()},
    }


def _found_in(mistake: type[ReplicaWorld], count: int) -> int | None:
    """The first seed whose world breaks with this mistake."""
    return next((seed for seed in range(count) if mistake(seed).run()), None)


def run() -> dict[str, Any]:
    return {"worlds": worlds(WORLDS), "storm": storm(KILLS)}
