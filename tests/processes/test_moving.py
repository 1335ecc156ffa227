"""`fenced authority move`, killed after each of its steps, while programs of every authority write to every guard."""

from __future__ import annotations

import itertools
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg

import fenced
from fenced.sql import Guard

LITE, SERVER = Guard(table="orders", name="lite/{id}"), Guard(table="orders", name="server/{id}")

# Dies by SIGKILL after some steps: when it is about to choose the next one.
KILLED = """
import itertools, os, signal, sys
from fenced import cli
from fenced.client import moving
choose, steps, asked = moving.next_step, int(sys.argv[1]), itertools.count()
def next_step(*seen):
    if next(asked) == steps:
        os.kill(os.getpid(), signal.SIGKILL)
    return choose(*seen)
moving.next_step = next_step
cli.main(sys.argv[2:])
"""


class Writer(threading.Thread):
    """A program that points at one authority all the time, and counts what each guard admits and refuses."""

    def __init__(self, stop: threading.Event, client: fenced.Client, shop: Path, database: str) -> None:
        super().__init__(daemon=True)
        self.admitted: Counter[Guard] = Counter()
        self.refused: Counter[Guard] = Counter()
        self.kinds: set[str] = set()
        self.broken: BaseException | None = None
        self._stop_writing, self._client, self._shop, self._database = stop, client, shop, database

    def run(self) -> None:
        try:
            with (
                closing(sqlite3.connect(self._shop, isolation_level=None, timeout=60)) as lite,
                psycopg.connect(self._database, autocommit=True) as server,
            ):
                while not self._stop_writing.wait(0.2):
                    self._write(LITE, lite, "lite/1")
                    self._write(SERVER, server, "server/1")
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.broken = error

    def _write(self, guard: Guard, db: Any, name: str) -> None:
        try:
            with self._client.hold(name, ttl=60) as lease, guard.transaction(db, lease) as tx:
                (number,) = tx.execute("SELECT number FROM orders").fetchone()
                tx.execute(f"UPDATE orders SET number = {number + 1}")
                tx.execute(f"INSERT INTO journal (realm, token) VALUES ('{lease.realm}', {lease.token})")
            self.admitted[guard] += 1
        except fenced.Contended:
            pass  # the guard was adopting: nothing was written
        except fenced.Refused as refused:
            self.refused[guard] += 1
            self.kinds.add(refused.kind)


def wait_for_all(writers: list[Writer], admitted: int) -> None:
    """Wait until each guard has admitted this writer a few more times, and refused each of the others."""
    before = [(writer.admitted.copy(), writer.refused.copy()) for writer in writers]

    def all_done() -> bool:
        return all(
            writer.admitted[guard] > was_admitted[guard] + 2
            if number == admitted
            else writer.refused[guard] > was_refused[guard] + 2
            for number, (writer, (was_admitted, was_refused)) in enumerate(zip(writers, before, strict=True))
            for guard in (LITE, SERVER)
        )

    give_up = time.monotonic() + 60
    while not all_done():
        assert not [writer.broken for writer in writers if writer.broken]
        assert time.monotonic() < give_up
        time.sleep(0.01)


def move(old: str, new: str, guards: tuple[str, ...], *more: str, kill_after: int) -> int:
    """Run the command; how many of its steps were done."""
    options = [word for url in guards for word in ("--guards", url)]
    command = [sys.executable, "-c", KILLED, str(kill_after), "authority", "move", old, new, *options, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, -signal.SIGKILL) and not done.stderr, done
    assert ("moved: 2 databases" in done.stdout) == (done.returncode == 0)
    return done.stdout.count(" NEW ")


def test_killed_after_every_step_with_writers_throughout(
    tmp_path: Path, postgresql_url: str, redis_url: str
) -> None:
    shop = tmp_path / "shop.db"
    urls = [f"sqlite:///{tmp_path}/leases.db", postgresql_url, redis_url]
    guards = (f"sqlite:///{shop}", postgresql_url)
    stop = threading.Event()
    with ExitStack() as stack:
        lite = stack.enter_context(closing(sqlite3.connect(shop, isolation_level=None, timeout=60)))
        server = stack.enter_context(closing(psycopg.connect(postgresql_url, autocommit=True)))
        names = ("default", "default", tmp_path.name)
        clients = [
            stack.enter_context(fenced.Client(url, namespace=name))
            for url, name in zip(urls, names, strict=True)
        ]
        realms = [client.acquire("warm-up").realm for client in clients]
        for guard, db, key in ((LITE, lite, "INTEGER PRIMARY KEY"), (SERVER, server, "serial PRIMARY KEY")):
            db.execute("CREATE TABLE orders (id integer PRIMARY KEY, number integer)")
            db.execute("INSERT INTO orders VALUES (1, 0)")
            db.execute(f"CREATE TABLE journal (id {key}, realm text, token bigint)")
            guard.install(db, mode="require")
            guard.adopt(db, realms[0])
        writers = [Writer(stop, client, shop, postgresql_url) for client in clients]
        stack.callback(stop.set)
        for writer in writers:
            writer.start()
        wait_for_all(writers, admitted=0)
        # One run for the floor, one for each guard, and one that finds everything done.
        runs = [move(urls[0], urls[1], guards, kill_after=1) for _ in range(4)]
        assert runs == [1, 1, 1, 0]
        wait_for_all(writers, admitted=1)
        onwards = (urls[1], urls[2], guards, "--new-namespace", names[2])
        assert [move(*onwards, kill_after=2), move(*onwards, kill_after=9)] == [2, 1]
        wait_for_all(writers, admitted=2)
        stop.set()
        for writer in writers:
            writer.join(60)
        for guard, db in ((LITE, lite), (SERVER, server)):
            found = db.execute("SELECT realm, token FROM journal ORDER BY id").fetchall()
            assert [realm for realm, _ in itertools.groupby(realm for realm, _ in found)] == realms
            tokens = [token for _, token in found]
            assert tokens == sorted(set(tokens)), "every write had a higher token than all earlier ones"
            acknowledged = sum(writer.admitted[guard] for writer in writers)
            assert db.execute("SELECT number FROM orders").fetchone() == (acknowledged,) == (len(found),)
    assert not [writer.broken for writer in writers if writer.broken]
    assert writers[0].kinds == {"foreign"}
