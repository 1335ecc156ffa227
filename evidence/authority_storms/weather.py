"""The processes of a storm, the store that they share, and the faults of both, drawn from one seed."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from evidence.authority_storms import worker
from fenced.drills.relay import Proxy
from fenced.runtime.clocks import now
from fenced_testkit.servers import EtcdServer, MariadbServer, PostgresqlServer, RedisServer, ZooKeeperServer
from fenced_testkit.servers.base import Server

TICK_SECONDS = 0.05
BURST_SECONDS = (0.5, 4.0)
"""For how long new faults begin. Then a quiet time follows, in which their effects must end."""
FAULTS_MAX = 6
STOP_SECONDS = 5.0
PROBE_SECONDS = 1.0
"""If a probe does not get SQLite's write lock in this time, the workers are taken to be blocked too."""
SERVERS: dict[str, tuple[type[Server], str]] = {
    "postgresql": (PostgresqlServer, "postgresql://postgres@{}:{}/postgres"),
    "mariadb": (MariadbServer, "mariadb://root@{}:{}/mysql"),
    "redis": (RedisServer, "redis://{}:{}/0"),
    "etcd": (EtcdServer, "etcd://{}:{}"),
    "zookeeper": (ZooKeeperServer, "zookeeper://{}:{}"),
}
LOCKER = """
import sqlite3, sys
store = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
store.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


class Log:
    """The storm's own events, in the same form as the event logs of its workers."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def write(self, do: str, at: float | None = None, **details: Any) -> None:
        with self._lock:
            line = {"at": now() if at is None else at, "who": "storm", "do": do, **details}
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()

    def fault(self, what: str) -> None:
        self.counts[what] += 1
        self.write("fault", what=what)


class Agenda:
    """Actions, each with its time."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._due)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), action))

    def run(self, until: float) -> None:
        """Run each action at its time, and return at `until`."""
        while (left := min(until, self._due[0][0] if self._due else until) - now()) > 0 or (
            self._due and self._due[0][0] <= until
        ):
            if left > 0:
                time.sleep(left)
            else:
                heapq.heappop(self._due)[2]()


class Member:
    """One worker. It is a new process after each restart."""

    def __init__(self, number: int, url: str, folder: Path, ttl: float, seed: str, log: Log) -> None:
        self.number = number
        self.colour = "asyncio" if number % 3 == 2 else "blocking"
        self.stopped = False
        self.process: subprocess.Popen[bytes] | None = None
        self._arguments = [self.colour, "keep" if number % 2 else "", str(ttl), seed]
        self._url, self._folder, self._log = url, folder, log
        self._starts = 0
        self.who = ""

    @property
    def well(self) -> bool:
        """Whether its process is running, is not stopped, and handles signals."""
        return self.process is not None and not self.stopped and (self._folder / f"{self.who}.jsonl").exists()

    def start(self) -> None:
        self._starts += 1
        self.who = f"w{self.number}.{self._starts}"
        errors = (self._folder / f"{self.who}.err").open("wb")
        with errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    worker.__file__,
                    self._url,
                    str(self._folder),
                    self.who,
                    *self._arguments,
                ],
                stdin=subprocess.PIPE,
                stderr=errors,
                process_group=0,
            )

    def kill(self) -> None:
        if self.process is None:
            return
        begin = now()
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._log.write("killed", whom=self.who, begin=begin)
        self.process = None

    def stop(self) -> Callable[[], None]:
        """Send SIGSTOP. Returns the function that lets the process continue."""
        assert self.process is not None
        begin, process, who = now(), self.process, self.who
        os.kill(process.pid, signal.SIGSTOP)
        what = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, process.pid, what) is None and now() < begin + STOP_SECONDS:
            time.sleep(0.001)
        standing, self.stopped = now(), True

        def go_on() -> None:
            os.kill(process.pid, signal.SIGCONT)
            self.stopped = False
            self._log.write("paused", whom=who, begin=begin, standing=standing)

        return go_on

    def interrupt(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)

    def ended(self) -> bool:
        """Whether its process ended by itself, which it should not."""
        return self.process is not None and self.process.poll() is not None


class Store:
    """The store of the leases, and its faults. A fault returns the function that ends it, or None if it has ended."""

    url: str
    tick = 0.0
    version = ""

    def faults(self) -> dict[str, Callable[[], Callable[[], None] | None]]:
        raise NotImplementedError

    def blocked(self) -> bool:
        """Whether a worker that was just stopped blocks all others. Only SQLite's workers can, by their shared file."""
        return False

    def close(self) -> None:
        raise NotImplementedError


class SqliteStore(Store):
    version = sqlite3.sqlite_version

    def __init__(self, folder: Path, log: Log) -> None:
        self._path, self._log = folder / "leases.db", log
        self.url = f"sqlite:///{self._path}"

    def faults(self) -> dict[str, Callable[[], Callable[[], None] | None]]:
        return {"write lock held": self._lock, "write lock held by a stopped process": self._lock_and_stop}

    def _lock(self, stop: bool = False) -> Callable[[], None]:
        begin = now()
        locker = subprocess.Popen(
            [sys.executable, "-c", LOCKER, str(self._path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert locker.stdin is not None and locker.stdout is not None
        locker.stdout.readline()
        if stop:
            locker.send_signal(signal.SIGSTOP)

        def end() -> None:
            assert locker.stdin is not None and locker.stdout is not None
            if stop:
                locker.kill()
            locker.stdin.close()
            locker.wait()
            locker.stdout.close()
            self._log.write("outage", begin=begin, silent=False)

        return end

    def _lock_and_stop(self) -> Callable[[], None]:
        return self._lock(stop=True)

    def blocked(self) -> bool:
        """A process that was stopped inside its transaction keeps SQLite's lock, and no other process can write."""
        with contextlib.closing(
            sqlite3.connect(self._path, isolation_level=None, timeout=PROBE_SECONDS)
        ) as probe:
            try:
                probe.execute("BEGIN IMMEDIATE")
                probe.execute("ROLLBACK")
            except sqlite3.OperationalError:
                return True
        return False

    def close(self) -> None:
        pass


class ServerStore(Store):
    def __init__(self, authority: str, log: Log) -> None:
        make, address = SERVERS[authority]
        self._log = log
        self._server = make()
        self._server.__enter__()
        self._proxy = Proxy(self._server.host, self._server.port)
        self.url = address.format(self._proxy.host, self._proxy.port)
        self.version = _version(self._server)
        if isinstance(self._server, ZooKeeperServer):
            self.tick = int(self._server.settings["tickTime"]) / 1000

    def faults(self) -> dict[str, Callable[[], Callable[[], None] | None]]:
        return {
            "server frozen": self._freeze,
            "server killed": self._kill,
            "black hole": lambda: self._black_hole(drop=False),
            "black hole that drops": lambda: self._black_hole(drop=True),
            "connections reset": lambda: self._once(self._proxy.reset),
            "connections cut": lambda: self._once(self._proxy.cut),
        }

    def _outage(self, begin: float, silent: bool = False) -> None:
        self._log.write("outage", begin=begin, silent=silent)

    def _freeze(self) -> Callable[[], None]:
        begin = now()
        self._server.freeze()

        def thaw() -> None:
            self._server.thaw()
            self._outage(begin)

        return thaw

    def _kill(self) -> Callable[[], None]:
        begin = now()
        self._server.kill()

        def restart() -> None:
            self._server.start()
            self._outage(begin)

        return restart

    def _black_hole(self, drop: bool) -> Callable[[], None]:
        begin = now()
        self._proxy.black_hole(drop=drop)

        def heal() -> None:
            self._proxy.heal()
            self._outage(begin, silent=drop)

        return heal

    def _once(self, break_: Callable[[], None]) -> None:
        begin = now()
        break_()
        self._outage(begin)

    def close(self) -> None:
        self._proxy.stop()
        self._server.close()


def _version(server: Server) -> str:
    match server:
        case PostgresqlServer():
            return str(server.execute("SHOW server_version")[0][0])
        case RedisServer():
            return str(server.execute("INFO", "server")["redis_version"])
        case EtcdServer():
            status = server.status()
            return status.version if status else ""
        case ZooKeeperServer():
            return server.version
        case _:
            return ""


class Stalls:
    """The longest delay of this process. If it is long, the machine was too busy for meaningful figures."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        due = now() + TICK_SECONDS
        while not self._over.wait(max(0.0, due - now())):
            self.longest = max(self.longest, now() - due)
            due = now() + TICK_SECONDS

    def end(self) -> float:
        self._over.set()
        self._thread.join()
        return self.longest


class FaultSchedule:
    """Bursts of faults, each followed by a quiet time in which their effects must end."""

    def __init__(
        self, store: Store, members: list[Member], ttl: float, quiet: float, seed: str, log: Log
    ) -> None:
        self._store, self._members, self._ttl, self._quiet, self._log = store, members, ttl, quiet, log
        self._random = random.Random(f"{seed}/weather")
        self._agenda = Agenda()
        self._out = self._blocking = False
        self._deck: list[Callable[[], None]] = []
        self.died: list[str] = []

    def run(self, seconds: float) -> None:
        end = now() + seconds
        while now() < end and not all(member.well or member.ended() for member in self._members):
            self._agenda.run(now() + TICK_SECONDS)
        while now() < end - self._quiet:
            burst = now() + self._random.uniform(*BURST_SECONDS)
            for _ in range(self._random.randint(1, FAULTS_MAX)):
                self._agenda.at(self._random.uniform(now(), burst), self._any_fault)
            self._agenda.run(burst)
            while self._agenda:  # wait until every fault of this burst has ended
                self._agenda.run(now() + TICK_SECONDS)
            self._revive()
            self._agenda.run(min(end, now() + self._quiet))
        self._agenda.run(end)
        self._revive()
        self._log.write("end")

    def _revive(self) -> None:
        for member in self._members:
            if member.ended():
                self.died.append(member.who)
                member.kill()
                member.start()

    def _any_fault(self) -> None:
        """The next fault of a shuffled deck: all kinds are about equally frequent, in random order."""
        if not self._deck:
            of_clients = [self._kill, self._stop, self._stop, self._interrupt]
            of_the_store = [partial(self._break_the_store, what) for what in self._store.faults()]
            self._deck = [*of_clients, *of_the_store]
            self._random.shuffle(self._deck)
        self._deck.pop()()

    def _one(self, colour: str = "") -> Member | None:
        well = [member for member in self._members if member.well and member.colour.startswith(colour)]
        return self._random.choice(well) if len(well) > 2 else None

    def _kill(self) -> None:
        if (member := self._one()) is not None:
            member.kill()
            self._log.fault("client killed")
            self._agenda.at(now() + self._random.uniform(0, self._ttl / 2), member.start)

    def _stop(self) -> None:
        if (member := self._one()) is None:
            return
        begin = now()
        go_on = member.stop()
        # SQLite has one writer at a time: if the lock was already taken, this worker did not have it.
        blocked = not self._out and not self._blocking and self._store.blocked()
        self._blocking = self._blocking or blocked
        self._log.fault("client stopped inside a transaction" if blocked else "client stopped")

        def end() -> None:
            go_on()
            if blocked:
                self._blocking = False
                self._log.write("outage", begin=begin, silent=False)

        self._agenda.at(now() + self._random.uniform(0.3, 3) * self._ttl, end)

    def _interrupt(self) -> None:
        for _ in range(self._random.randint(1, 3)):
            if (member := self._one("blocking")) is not None:
                member.interrupt()
                self._log.fault("client interrupted")

    def _break_the_store(self, what: str) -> None:
        if self._out or self._blocking:  # one fault of the store at a time
            self._deck.insert(0, partial(self._break_the_store, what))
            return
        self._log.fault(what)
        heal = self._store.faults()[what]()
        if heal is None:
            return
        self._out = True

        def end() -> None:
            assert heal is not None
            heal()
            self._out = False

        # Half of them end before leases expire: then only the clients' retries free the names that they gave up.
        longest = self._random.choice((0.7, 2.0))
        self._agenda.at(now() + self._random.uniform(0.2, longest) * self._ttl, end)


@contextlib.contextmanager
def open_store(authority: str, folder: Path, log: Log) -> Iterator[Store]:
    store = SqliteStore(folder, log) if authority == "sqlite" else ServerStore(authority, log)
    try:
        yield store
    finally:
        store.close()


def storm(
    authority: str, folder: Path, *, seconds: float, workers: int, ttl: float, quiet: float, seed: str
) -> dict[str, Any]:
    """Run a storm for `seconds`; every process writes its events into the folder."""
    log = Log(folder / "storm.jsonl")
    with open_store(authority, folder, log) as store:
        members = [Member(number, store.url, folder, ttl, seed, log) for number in range(1, workers + 1)]
        stalls = Stalls()
        try:
            for member in members:
                member.start()
            schedule = FaultSchedule(store, members, ttl, quiet, seed, log)
            schedule.run(seconds)
        finally:
            for member in members:
                member.kill()
        return {
            "server": store.version,
            "tick": store.tick,
            "faults": dict(log.counts),
            "ended_by_themselves": schedule.died,
            "longest_stall_of_the_machine": round(stalls.end(), 3),
        }


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of all processes. The last line of a killed process may be incomplete, and is skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)
