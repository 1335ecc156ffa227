"""Elections under kills and stops: candidates in processes, on each authority, and followers that they command.

A change ends the leader: every second one is killed and comes back as a new process, the others are stopped until
another one leads, and then go on and command once more. Three followers run here, so their clock is the one that
measures. Two of them remember in memory; the third keeps its marks in a file, and is made anew in each change.
Looked for: a follower that obeys an earlier term, a term of two leaders, a change that takes longer than its bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fenced
from evidence.authority_storms.judge import Bounds
from evidence.authority_storms.weather import SERVERS, Log, open_store
from evidence.elections import candidate
from fenced.recipes.election import Follower
from fenced.runtime.clocks import now
from fenced_testkit.servers import ServiceServer

AUTHORITIES = ("sqlite", *SERVERS, "service")
CHANGES = 200
CANDIDATES = 4
TTL = 2.0
GIVE_UP_SECONDS = 60.0


class NobodyLeads(Exception):
    """For so long that waiting on makes no sense."""


class Followers:
    """Three followers, and what they have obeyed."""

    def __init__(self, folder: Path) -> None:
        self.changed = threading.Condition()
        self.obeyed: list[tuple[int, int, str, float]] = []
        """(follower, term, candidate, when), in the order in which each follower obeyed."""
        self.refused: Counter[str] = Counter()
        """By candidate."""
        self.known: set[str] = set()
        self._marks = f"sqlite:///{folder}/marks.db"
        self.followers = [Follower(candidate.ELECTION), Follower(candidate.ELECTION), self._durable()]
        self._servers = [self._serve(number) for number in range(len(self.followers))]
        self.ports = [server.server_address[1] for server in self._servers]

    def _durable(self) -> Follower:
        return Follower(candidate.ELECTION, fenced.Values(self._marks))

    def restart(self) -> None:
        """The durable follower forgets what it had in memory."""
        with self.changed:
            self.followers[-1] = self._durable()

    def _serve(self, number: int) -> socketserver.ThreadingTCPServer:
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(ConnectionError, ValueError):  # its candidate was killed
                    for line in self.rfile:
                        self.wfile.write(outer.command(number, json.loads(line)))

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def command(self, number: int, told: dict[str, str]) -> bytes:
        with self.changed:  # comparing and obeying are one step here, as in a guard
            self.known.add(told["who"])
            self.changed.notify_all()
            if "stamp" not in told:
                return b"hello\n"
            stamp = fenced.Stamp.parse(told["stamp"])
            try:
                self.followers[number].accept(stamp)
            except fenced.StaleToken:
                self.refused[told["who"]] += 1
                return b"refused\n"
            self.obeyed.append((number, stamp.token, told["who"], now()))
            return b"obeyed\n"

    def leader_after(self, term: int, seconds: float) -> tuple[int, str, float] | None:
        """The first command that was obeyed of a later term: its term, its leader and when; None after `seconds`."""

        def later() -> tuple[int, str, float] | None:
            found = [each for each in self.obeyed if each[1] > term]
            return found[0][1:] if found else None

        with self.changed:
            self.changed.wait_for(later, seconds)
            return later()

    def until_known(self, who: set[str]) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: who <= self.known, GIVE_UP_SECONDS):
                raise NobodyLeads(f"these candidates did not start: {', '.join(sorted(who - self.known))}")

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


def broken_promises(obeyed: list[tuple[int, int, str, float]]) -> list[str]:
    """What must not happen, by what the followers obeyed."""
    broken, leaders, highest = [], dict[int, str](), dict[int, int]()
    for follower, term, who, _ in obeyed:
        if term < highest.get(follower, 0):
            broken.append(f"follower {follower} obeyed term {term} of {who} after {highest[follower]}")
        highest[follower] = max(term, highest.get(follower, 0))
        if leaders.setdefault(term, who) != who:
            broken.append(f"term {term} has two leaders, {leaders[term]} and {who}")
    return broken


class Seat:
    """A candidate's place: a new process, with a new name, after each kill."""

    def __init__(self, number: int, url: str, ttl: float, folder: Path, ports: list[int]) -> None:
        self._number, self._folder, self._starts = number, folder, 0
        self._url, self._last = url, [str(ttl), *map(str, ports)]
        self.who = ""

    def start(self) -> None:
        self._starts += 1
        self.who = f"c{self._number}.{self._starts}"
        colour = "asyncio" if self._number % 2 else "blocking"
        command = [sys.executable, "-P", candidate.__file__, self._url, self.who, colour, *self._last]
        with (self._folder / f"{self.who}.err").open("wb") as errors, self._out().open("wb") as told:
            self.process = subprocess.Popen(command, stdout=told, stderr=errors, process_group=0)

    def _out(self) -> Path:
        return self._folder / f"{self.who}.out"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, what: signal.Signals) -> None:
        os.kill(self.process.pid, what)


class Camp:
    """The candidates of one election, and its changes."""

    def __init__(
        self, url: str, folder: Path, ttl: float, bound: float, blocked: Callable[[], bool] = lambda: False
    ) -> None:
        self._folder, self._bound, self._blocked = folder, bound, blocked
        self.followers = Followers(folder)
        self.seats = [Seat(number, url, ttl, folder, self.followers.ports) for number in range(CANDIDATES)]
        self.seconds: dict[str, list[float]] = {"killed": [], "stopped": []}
        self.stuck: list[str] = []
        self.inside = 0
        """Stops inside a transaction of SQLite: nobody else can write until the process goes on."""

    def run(self, changes: int) -> dict[str, Any]:
        try:
            for seat in self.seats:
                seat.start()
            leads = self._next(0)
            while (done := sum(map(len, self.seconds.values()))) < changes:
                self.followers.until_known({seat.who for seat in self.seats})
                leads = self._change(*leads, killed=done % 2 == 0)
                self.followers.restart()
        except NobodyLeads as error:
            self.stuck.append(f"{error}; {dict(self._errors())}")
        finally:
            for seat in self.seats:
                seat.kill()
            self.followers.close()
        return self._found()

    def _next(self, term: int) -> tuple[int, str]:
        found = self.followers.leader_after(term, GIVE_UP_SECONDS)
        if found is None:
            raise NobodyLeads(f"nobody leads {GIVE_UP_SECONDS:g} s after term {term}")
        return found[:2]

    def _errors(self) -> Counter[str]:
        return Counter(line for path in self._folder.glob("c*.out") for line in path.read_text().splitlines())

    def _change(self, term: int, who: str, *, killed: bool) -> tuple[int, str]:
        seat = next(seat for seat in self.seats if seat.who == who)
        began = now()
        if killed:
            seat.kill()
            seat.start()
        else:
            seat.signal(signal.SIGSTOP)
        inside = not killed and self._blocked()
        if inside:
            seat.signal(signal.SIGCONT)
        found = self.followers.leader_after(term, GIVE_UP_SECONDS if not inside else 0)
        if not (killed or inside):
            seat.signal(signal.SIGCONT)
        if inside:
            self.inside += 1
            return found[:2] if found else (term, who)
        if found is None:
            raise NobodyLeads(f"nobody leads {GIVE_UP_SECONDS:g} s after {who} with term {term}")
        self.seconds["killed" if killed else "stopped"].append(found[2] - began)
        return found[:2]

    def _found(self) -> dict[str, Any]:
        times = sorted(self.seconds["killed"] + self.seconds["stopped"]) or [0.0]
        return {
            "changes": {how: len(seconds) for how, seconds in self.seconds.items()},
            "terms": len({term for _, term, _, _ in self.followers.obeyed}),
            "commands_obeyed": len(self.followers.obeyed),
            "commands_refused": self.followers.refused.total(),
            "seconds_to_a_new_leader": {
                "median": round(statistics.median(times), 2),
                "longest": round(times[-1], 2),
                "bound": round(self._bound, 2),
                "over": sum(each > self._bound for each in times),
            },
            "stopped_inside_a_transaction": self.inside,
            "errors_of_candidates": dict(self._errors()),
            "broken": self.stuck + broken_promises(self.followers.obeyed),
        }


@contextlib.contextmanager
def _opened(authority: str, folder: Path) -> Iterator[tuple[str, float, Callable[[], bool]]]:
    """Its address, ZooKeeper's tick, and whether a stopped process keeps others from writing."""
    if authority == "service":
        with ServiceServer() as server:
            yield server.url(), 0.0, lambda: False
        return
    with (
        contextlib.closing(Log(folder / "storm.jsonl")) as log,
        open_store(authority, folder, log) as store,
    ):
        yield store.url, store.tick, store.blocked


def run_one(authority: str, changes: int, ttl: float = TTL) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, _opened(authority, Path(name)) as (url, tick, blocked):
        bound = Bounds.of(authority, ttl, tick).client_fault
        return {"ttl": ttl, **Camp(url, Path(name), ttl, bound, blocked).run(changes)}


def run(
    authorities: tuple[str, ...] = AUTHORITIES, changes: int = CHANGES, at_a_time: int = 6
) -> dict[str, Any]:
    with ThreadPoolExecutor(at_a_time) as pool:
        found = pool.map(lambda authority: run_one(authority, changes), authorities)
        return dict(zip(authorities, found, strict=True))
