"""Programs that use fenced, whichever version `PYTHONPATH` finds. Requests and answers are lines of JSON.

Several programs of one version share a process, because starting one takes a quarter of a second of CPU. Each has its
own client, with its own connections.

It uses only what all versions have. Not a test: `tests/upgrades/crew.py` starts it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sqlite3
import sys
import threading
from typing import Any

import fenced
from fenced.sql import Guard

Answer = dict[str, Any]
PAUSE_SECONDS = 0.01
"""Between two rounds of work in the background, so that the other programs get the CPU."""


def connected(url: str) -> Any:
    if url.startswith("sqlite:///"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
    import psycopg

    return psycopg.connect(url, autocommit=True)


class Program:
    def __init__(self, authority: str, namespace: str) -> None:
        self._client = fenced.Client(authority, namespace=namespace, guarantee="best-effort")
        self._leases: dict[str, Any] = {}
        self._answers: dict[str, Answer] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._stopped = threading.Event()
        self._rounds = 0

    # Leases.

    def acquire(self, name: str) -> Answer:
        lease = self._leases[name] = self._client.acquire(name, ttl=30, wait=120)
        return {"token": lease.token}

    def check(self, name: str) -> Answer:
        self._leases[name].check()
        return {"token": self._leases[name].token}

    def release(self, name: str) -> Answer:
        self._leases[name].release()
        return {}

    def begin(self, request: str, *arguments: Any) -> Answer:
        """Another request, in the background. `end` has its answer."""

        def run() -> None:
            self._answers[request] = answered(lambda: getattr(self, request)(*arguments))

        thread = self._threads[request] = threading.Thread(target=run, daemon=True)
        thread.start()
        return {}

    def end(self, request: str) -> Answer:
        self._threads[request].join()
        return self._answers[request]

    def work(self, names: list[str], log: str) -> Answer:
        """Take names in turn until `stop`. The log shows whether two holders overlapped, and their tokens in order."""
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        while not self._stopped.wait(PAUSE_SECONDS):
            for name in names:
                with self._client.hold(name, ttl=30, wait=120) as lease:
                    for word in ("begin", "end"):
                        os.write(descriptor, f"{name} {lease.token} {word}\n".encode())
            self._rounds += 1
        return {"rounds": self._rounds}

    def rounds(self) -> Answer:
        return {"rounds": self._rounds}

    def fail(self, request: str) -> Answer:
        """The error of a request in the background, if it has ended with one."""
        return self._answers.get(request, {"answer": {}})

    def stop(self) -> Answer:
        self._stopped.set()
        return {}

    # A guarded table.

    def prepare(self, url: str, mode: str) -> Answer:
        """Make the table and install the guard, with a mode for some names, a mark and a record."""
        with contextlib.closing(connected(url)) as db:
            db.execute("CREATE TABLE orders (id integer PRIMARY KEY, qty integer)")
            db.execute("INSERT INTO orders VALUES (1, 0), (2, 0), (3, 0), (4, 0)")
            guard = Guard(table="orders", name="orders/{id}")
            guard.install(db, mode=mode)
            guard.set_mode(db, "shadow", "orders/4*")
            with self._client.hold("orders/3") as lease, guard.transaction(db, lease) as tx:
                tx.execute("UPDATE orders SET qty = 3 WHERE id = 3")
            for _ in range(2):
                with self._client.hold("orders/4") as lease:
                    with guard.transaction(db, lease) as tx:
                        tx.execute("UPDATE orders SET qty = 3 WHERE id = 4")
                    old = self._leases.setdefault("late", lease.bare_stamp())
            with guard.transaction(db, old) as tx:  # stale, and let through: recorded
                tx.execute("UPDATE orders SET qty = 4 WHERE id = 4")
        return {}

    def install(self, url: str) -> Answer:
        with contextlib.closing(connected(url)) as db:
            Guard(table="orders", name="orders/{id}").install(db)
        return {}

    def write(self, url: str) -> Answer:
        """Count in two rows until `stop`, and try with the lease of the round before, which must be refused."""
        guard, late, refused = Guard(table="orders", name="orders/{id}"), None, 0
        count = "UPDATE orders SET qty = qty + 1 WHERE id = {}"
        with contextlib.closing(connected(url)) as db:
            while not self._stopped.wait(PAUSE_SECONDS):
                for row in (1, 2):
                    with self._client.hold(f"orders/{row}", ttl=30, wait=120) as lease:
                        with guard.transaction(db, lease) as tx:
                            tx.execute(count.format(row))
                        if late is not None and row == 2:
                            try:
                                with guard.transaction(db, late) as tx:
                                    tx.execute(count.format(2))
                            except fenced.StaleToken:
                                refused += 1
                        late = lease.bare_stamp() if row == 2 else late
                self._rounds += 1
        return {"rounds": self._rounds, "refused": refused}


def answered(work: Any) -> Answer:
    try:
        return {"answer": work()}
    except Exception as error:  # noqa: BLE001 - the other process reports it
        return {"error": type(error).__name__, "says": str(error)}


class Host:
    """The programs of this process."""

    def __init__(self) -> None:
        self._programs: list[Program] = []

    def start(self, authority: str, namespace: str) -> Answer:
        self._programs.append(Program(authority, namespace))
        return {"number": len(self._programs) - 1, "version": fenced.__version__}

    def ask(self, number: int, request: str, *arguments: Any) -> Answer:
        answer: Answer = getattr(self._programs[number], request)(*arguments)
        return answer

    def command(self, *words: str) -> Answer:
        """`fenced WORDS`: its status, and what it printed."""
        from fenced.cli import main

        printed, status = io.TextIOWrapper(io.BytesIO(), "utf-8"), 0
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                main(words)
            except SystemExit as ended:
                status = int(ended.code or 0)
        printed.seek(0)
        return {"status": status, "printed": printed.read()}


def main() -> None:
    host = Host()
    for line in sys.stdin:
        request, *arguments = json.loads(line)
        print(json.dumps(answered(lambda: getattr(host, request)(*arguments))), flush=True)  # noqa: B023


if __name__ == "__main__":
    main()
