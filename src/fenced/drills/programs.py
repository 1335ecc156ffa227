"""What a drill needs beside its holders: a service, a relay in front of a server, a copied authority, a busy CPU."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from fenced.client import registry
from fenced.drills.bound import bound
from fenced.drills.processes import CouldNotRun
from fenced.drills.relay import Proxy
from fenced.drills.relay.ports import HOST, free_port
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.clocks import now

PORTS = {"postgresql": 5432, "postgres": 5432, "redis": 6379, "etcd": 2379, "zookeeper": 2181, "http": 80}
EMBEDDED = ("sqlite", "ledger")
BURNERS = 8
"""Busy processes beside the starved one, on its CPU."""
NICE = 19
FAKETIME = "faketime/libfaketime.so.1"
_POLL_SECONDS = 0.02
_START_SECONDS = 60.0
"""A service imports for a second, and for twenty on a machine that is very busy."""


class NotShown(Exception):
    """The fault of this drill cannot be made here, or did not happen: the drill is inconclusive, and says why."""


class LocalService:
    """`fenced serve` in front of a store, on loopback, until `stop`. The kernel ends it with the drill."""

    def __init__(self, store: str, values: str | None, folder: Path) -> None:
        try:
            import msgspec  # noqa: F401  (what the service needs and the package does not)
        except ImportError as error:
            raise NotShown(
                "this drill needs a service between holder and file: install fenced[service]"
            ) from error
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        self._log = folder / "service.log"
        command = [sys.executable, "-P", "-m", "fenced", "serve", "--listen", f"{HOST}:{port}"]
        command += ["--guarantee", "best-effort", *(["--values", values] if values else [])]
        with open(self._log, "wb") as log:
            self._popen = subprocess.Popen(
                bound(command),
                env={
                    **os.environ,
                    "FENCED_STORE": store,
                },  # it may have a password, and arguments can be read
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        try:
            self._wait(port)
        except BaseException:
            self.stop()
            raise

    def _wait(self, port: int) -> None:
        until = now() + _START_SECONDS
        while now() < until:
            if self._popen.poll() is not None:
                break
            with contextlib.suppress(OSError):
                socket.create_connection((HOST, port), timeout=1).close()
                return
            time.sleep(_POLL_SECONDS)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        raise CouldNotRun(
            f"the service of this drill does not listen: {lines[-1] if lines else 'it says nothing'}"
        )

    def stop(self) -> None:
        self._popen.kill()  # its store is the drill's own, or a database
        self._popen.wait()


def relay_to(url: str) -> tuple[str, Proxy]:
    """The same address through a relay of ours, and the relay."""
    parts = urlsplit(url)
    login, _, place = parts.netloc.rpartition("@")
    default = PORTS.get(parts.scheme)
    if default is None or not place or "," in place:
        raise NotShown(
            f"this drill puts a relay in front of the server, so it needs an address of one host without TLS, such as "
            f"{parts.scheme if parts.scheme in PORTS else 'postgresql'}://host:port"
        )
    proxy = Proxy(parts.hostname or HOST, parts.port or default)
    there = f"{login}@{HOST}:{proxy.port}" if login else f"{HOST}:{proxy.port}"
    return parts._replace(netloc=there).geturl(), proxy


def copied_authority(folder: Path, realm: str, token: int) -> str:
    """An authority of the same realm whose last token is `token`: what a restored copy of a store is, or a second half
    of one that is split. It is a SQLite file, whatever store the realm has."""
    path = folder / f"copy-{token}.db"
    authority = registry.authority(f"sqlite:///{path}", BlockingRuntime(), "made")
    step(authority.open())
    step(authority.close())
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO namespace (name, realm, token) VALUES ('default', ?, ?)", (realm, token))
    return f"sqlite:///{path}"


def faketime() -> str:
    """The library that gives a process a clock of its own."""
    for folder in ("/usr/lib", "/usr/local/lib", "/usr/lib64", *map(str, Path("/usr/lib").glob("*-linux-*"))):
        if (path := Path(folder) / FAKETIME).exists():
            return str(path)
    raise NotShown(
        "this drill needs libfaketime, which gives one process a slow clock: apt-get install libfaketime"
    )


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """Let a busy process share one CPU with others of a much higher priority.

    Each hand-over of the interpreter's lock, of which a renewal takes several, then waits for the starved thread that
    has it. Nobody without privileges can take a nice value back, but the busy processes end.
    """
    cpu = max(os.sched_getaffinity(0))
    for task in map(int, os.listdir(f"/proc/{pid}/task")):
        os.sched_setaffinity(task, {cpu})
        os.setpriority(os.PRIO_PROCESS, task, NICE)
    busy = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    burners = [
        subprocess.Popen(bound([sys.executable, "-I", "-S", "-c", busy, str(cpu)]), process_group=0)
        for _ in range(BURNERS)
    ]
    try:
        yield
    finally:
        for each in burners:
            each.kill()
        for each in burners:
            each.wait()
