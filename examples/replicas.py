"""A log on three replicas, each a process with a guarded file in a folder of its own. Two more would be primary.

One replica is killed, misses entries, and is rebuilt. The lease of one primary is taken away; it writes on, and changes
nothing.

python examples/replicas.py
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fenced
from fenced.files import FileGuard
from fenced.recipes.replicas import Behind, Entry, Log, Primary, ReplicaLog, drive

HOST = "127.0.0.1"  # whoever can connect is believed: a real one needs TLS, or signed stamps
ANSWER_SECONDS = 5.0
ERRORS: dict[str, type[fenced.FencedError]] = {"StaleToken": fenced.StaleToken, "Behind": Behind}


class FileStore:
    """One replica's log, a line for each entry. The guard compares the version in the step that changes the file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._guard = FileGuard(folder)

    def announce(self, version: fenced.Stamp) -> None:
        self._guard.announce(version, "log")

    def read(self, version: fenced.Stamp) -> Log:
        try:
            text = self._guard.read(version, "log")
        except FileNotFoundError:
            return ()
        lines = text.split(b"\n")[:-1]  # a line without its end was never acknowledged
        return from_json([json.loads(line) for line in lines])

    def replace(self, version: fenced.Stamp, log: Log) -> None:
        self._guard.write(version, "log", _lines(log))

    def extend(self, version: fenced.Stamp, entries: Log) -> None:
        self._guard.append(version, "log", _lines(entries))


def to_json(log: Log) -> list[Any]:
    return [[entry.version, entry.value and base64.b64encode(entry.value).decode()] for entry in log]


def from_json(log: list[Any]) -> Log:
    return tuple(Entry(version, value and base64.b64decode(value)) for version, value in log)


def _lines(log: Log) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in to_json(log))


def replica(name: str, folder: str, port: str) -> None:
    """A replica: carries out one call after the other, whoever sends them."""
    log, one_call = ReplicaLog(FileStore(Path(folder) / name)), threading.Lock()

    def answer(call: str, version: str, index: int, entries: list[Any]) -> object:
        stamp = fenced.Stamp.parse(version)
        with one_call:  # a replica reads its log and then changes it: two calls at once could mix
            if call == "bump":
                return to_json(log.bump(stamp))
            if call == "install":
                return log.install(stamp, from_json(entries))
            return log.append(stamp, index, from_json(entries))

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                try:
                    told = {"result": answer(*json.loads(line))}
                except (fenced.StaleToken, Behind) as error:
                    told = {"error": type(error).__name__, "says": str(error)}
                self.wfile.write(json.dumps(told).encode() + b"\n")

    socketserver.ThreadingTCPServer.allow_reuse_address = True
    with socketserver.ThreadingTCPServer((HOST, int(port)), Handler) as server:
        say("port", server.server_address[1])
        server.serve_forever()


class RemoteReplica:
    """A replica as a primary sees it. After an error it connects anew."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._peer: socket.socket | None = None

    def bump(self, version: fenced.Stamp) -> Log:
        return from_json(self._ask("bump", version, 0, ()))

    def install(self, version: fenced.Stamp, log: Log) -> int:
        return int(self._ask("install", version, 0, log))

    def append(self, version: fenced.Stamp, index: int, entries: Log) -> int:
        return int(self._ask("append", version, index, entries))

    def _ask(self, call: str, version: fenced.Stamp, index: int, entries: Log) -> Any:
        if self._peer is None:
            self._peer = socket.create_connection((HOST, self._port), timeout=ANSWER_SECONDS)
        try:
            with self._peer.makefile("rwb") as file:
                file.write(json.dumps([call, str(version), index, to_json(entries)]).encode() + b"\n")
                file.flush()
                line = file.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):  # a later answer must not be taken for that of another call
            self._peer.close()
            self._peer = None
            raise ConnectionError(f"no answer to {call} from port {self._port}")
        told = json.loads(line)
        if "error" in told:
            raise ERRORS[told["error"]](told["says"])
        return told["result"]


def primary(name: str, authority: str, ttl: str, *ports: str) -> None:
    """A primary as often as it gets the lease. It says what was acknowledged, and at which place of the log."""
    logging.getLogger("fenced").setLevel(logging.ERROR)
    replicas = [RemoteReplica(int(port)) for port in ports]
    numbers = itertools.count(1)
    with fenced.Client(authority, label=name) as client:
        while True:
            try:
                with client.hold("log", ttl=float(ttl)) as lease:
                    lead(Primary(lease.announcement(), len(replicas)), replicas, name, numbers)
            except fenced.FencedError as error:  # StaleToken: deposed. NoMajority: it must step down
                say("stepped down", type(error).__name__)
                time.sleep(0.1)


def lead(leader: Primary, replicas: list[RemoteReplica], name: str, numbers: itertools.count[int]) -> None:
    """Until an error. It does not look at its lease: a replica that has promised a newer primary refuses it."""
    drive(leader.open(), replicas)
    say("opened", leader.version.token)
    while True:
        value = f"{name}-{next(numbers)}"
        drive(leader.append(value.encode()), replicas)
        say("acknowledged", value, len(leader.values) - 1)
        if missing := leader.stale:
            drive(leader.rebuild(), replicas)
            for each in missing - leader.stale:
                say("rebuilt", each)
        time.sleep(0.02)


def read(name: str, authority: str, ttl: str, *ports: str) -> None:
    """The log, as the next primary finds it."""
    replicas = [RemoteReplica(int(port)) for port in ports]
    with fenced.Client(authority, label=name) as client, client.hold("log", ttl=float(ttl)) as lease:
        last = Primary(lease.announcement(), len(replicas))
        drive(last.open(), replicas)
        say("values", *(value.decode() for value in last.values))


def say(*words: object) -> None:
    print(json.dumps(words), flush=True)


class Program:
    """This file as another process, and what it has said."""

    def __init__(self, out: Path, *words: object) -> None:
        self.out = out
        with out.open("wb") as file:
            command = [sys.executable, __file__, *map(str, words)]
            self.process = subprocess.Popen(command, stdout=file)

    def said(self, what: str) -> list[list[Any]]:
        lines = [
            json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line[-1:] == "\n"
        ]
        return [words for _, *words in filter(lambda line: line[0] == what, lines)]

    def until(self, what: str, count: int = 1) -> list[Any]:
        """The last of so many things that it said."""
        while len(self.said(what)) < count:
            if self.process.poll() is not None and len(self.said(what)) < count:
                raise RuntimeError(f"{self.process.args!r} has ended")
            time.sleep(0.01)
        return self.said(what)[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        folder, url, ttl = Path(name), f"sqlite:///{name}/leases.db", 2  # in the Google File System 60 s

        def start(*words: object) -> Program:
            program = Program(folder / f"said by {words[1]}", *words)
            stack.callback(program.kill)
            return program

        replicas = [start("replica", number, folder, 0) for number in range(3)]
        ports = [each.until("port")[0] for each in replicas]
        a = start("primary", "a", url, ttl, *ports)
        a.until("acknowledged", 3)
        b = start("primary", "b", url, ttl, *ports)

        replicas[2].kill()
        a.until("acknowledged", len(a.said("acknowledged")) + 3)
        start("replica", 2, folder, ports[2])
        a.until("rebuilt")
        print("a stale replica was rebuilt")

        (token,) = a.until("opened")
        force = ["release", "log", "--authority", url, "--force", str(token)]
        subprocess.run([sys.executable, "-m", "fenced", *force], check=True, stdout=subprocess.DEVNULL)
        print("the deposed primary:", *a.until("stepped down"))
        b.until("acknowledged", 3)
        a.kill()
        b.kill()

        values = start("read", "reader", url, ttl, *ports).until("values")
        acknowledged = [value for each in (a, b) for value, _ in each.said("acknowledged")]
        once = all(values.count(each) == 1 for each in acknowledged)
        print("the log has all that was acknowledged, once:", once)


if __name__ == "__main__":
    parts: dict[str, Callable[..., None]] = {"replica": replica, "primary": primary, "read": read}
    if len(sys.argv) > 1:
        parts[sys.argv[1]](*sys.argv[2:])
    else:
        main()
