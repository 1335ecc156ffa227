"""Workers that are stopped and killed at random while they claim rows: each row has one accepted finish.

Processes with several workers each claim one to three rows, and finish them in single statements or in transactions.
The storm stops processes (SIGSTOP) for longer than their ttl, and kills some (SIGKILL). A trigger of its own writes
down every finish that the database has accepted, with its token. The control refuses nothing: there the judge must
find lost work.

    python -m evidence.claim_storm work ENGINE DATA AUTHORITY WORKERS SEED    # one process of the storm
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import psycopg

import fenced
from fenced.work import Claims
from fenced_testkit.servers import MariadbServer, PostgresqlServer
from tests.work.places import mariadb_connection

TTL = 0.5
JOBS, PROCESSES, WORKERS = 100_000, 8, 8
RUNS = Claims(
    table="runs",
    name="runs/{id}",
    ready="status = 'pending'",
    taken={"status": "running"},
    back={"status": "pending"},
    dead={"status": "pending"},  # no dead letters: the storm counts finishes
    max_attempts=30_000,
    backoff=(0.0, 0.01),
)
TABLES = {
    "postgresql": [
        "CREATE TABLE runs (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'pending', output bigint)",
        "CREATE TABLE accepted (run bigint, token bigint)",
        (
            "CREATE FUNCTION accept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO accepted VALUES (NEW.id, NEW.output); RETURN NULL; END $$"
        ),
        (
            "CREATE TRIGGER zz_accept AFTER UPDATE ON runs FOR EACH ROW WHEN (NEW.status = 'done') "
            "EXECUTE FUNCTION accept()"
        ),
        "INSERT INTO runs (id) SELECT n FROM generate_series(1, {jobs}) AS n",
    ],
    "sqlite": [
        "PRAGMA journal_mode = WAL",
        "CREATE TABLE runs (id INTEGER PRIMARY KEY, status TEXT NOT NULL DEFAULT 'pending', output INTEGER)",
        "CREATE TABLE accepted (run INTEGER, token INTEGER)",
        (
            "CREATE TRIGGER zz_accept AFTER UPDATE ON runs WHEN NEW.status = 'done' "
            "BEGIN INSERT INTO accepted VALUES (NEW.id, NEW.output); END"
        ),
        (
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {jobs}) "
            "INSERT INTO runs (id) SELECT i FROM n"
        ),
    ],
    "mariadb": [
        "CREATE TABLE runs (id bigint PRIMARY KEY, status varchar(20) NOT NULL DEFAULT 'pending', output bigint)",
        "CREATE TABLE accepted (run bigint, token bigint)",
        (
            "CREATE TRIGGER zz_accept AFTER UPDATE ON runs FOR EACH ROW "
            "IF NEW.status = 'done' THEN INSERT INTO accepted VALUES (NEW.id, NEW.output); END IF"
        ),
        "CREATE TABLE digits AS " + " UNION ALL ".join(f"SELECT {n} AS n" for n in range(10)),
        (
            "INSERT INTO runs (id) SELECT a.n + 10 * b.n + 100 * c.n + 1000 * d.n + 10000 * e.n + 1 AS i "
            "FROM digits a, digits b, digits c, digits d, digits e HAVING i <= {jobs}"
        ),
    ],
}
LEFT = "SELECT 1 FROM runs WHERE status <> 'done' LIMIT 1"


@dataclass(frozen=True)
class Field:
    """Where a storm runs. `guarded` False is the control: the same workers, and nothing is refused."""

    engine: str
    data: str
    authority: str
    guarded: bool = True

    def connect(self) -> Any:
        if self.engine == "postgresql":
            return psycopg.connect(self.data, autocommit=True)
        if self.engine == "mariadb":
            return mariadb_connection(self.data)
        return sqlite3.connect(self.data, isolation_level=None, timeout=60, check_same_thread=False)

    def prepare(self, jobs: int) -> None:
        with fenced.Client(self.authority) as client:
            client.acquire("storm").release()
        with contextlib.closing(self.connect()) as db:
            *made, filled = TABLES[self.engine]
            for statement in made:
                db.execute(statement)
            RUNS.install(db, mode="require")
            db.execute(filled.format(jobs=jobs))
            if not self.guarded:
                self._plant(db)

    def _plant(self, db: Any) -> None:
        """The planted bug: a stale token is not refused."""
        if self.engine != "sqlite":
            RUNS.set_mode(db, "observe")
        else:
            db.execute("DROP TRIGGER fenced_runs_update")


def run(jobs: int = JOBS, processes: int = PROCESSES, workers: int = WORKERS) -> dict[str, Any]:
    """Every engine, guarded and not."""
    found: dict[str, Any] = {"jobs": jobs, "processes": processes, "workers": processes * workers, "ttl": TTL}
    with (
        PostgresqlServer() as server,
        MariadbServer() as other,
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
    ):
        for guarded in (True, False):
            size = jobs if guarded else jobs // 10
            which = "guarded" if guarded else "nothing refused"
            url = server.url(server.create_database())
            found[f"postgresql, {which}"] = storm(
                Field("postgresql", url, url, guarded), size, processes, workers
            )
            url = other.url(other.create_database())
            found[f"mariadb, {which}"] = storm(Field("mariadb", url, url, guarded), size, processes, workers)
            place = f"{folder}/{guarded}"
            field = Field("sqlite", f"{place}.db", f"sqlite:///{place}.leases.db", guarded)
            found[f"sqlite, {which}"] = storm(field, size, processes, workers)
    return found


def storm(field: Field, jobs: int, processes: int, workers: int, seed: int = 1) -> dict[str, Any]:
    """Run one storm to its end, and judge it."""
    field.prepare(jobs)
    dice = random.Random(seed)
    began = time.monotonic()
    counts: Counter[str] = Counter()
    alive = [_start(field, workers, seed + number) for number in range(processes)]
    asleep: dict[int, float] = {}
    try:
        with contextlib.closing(field.connect()) as db:
            while db.execute(LEFT).fetchone() is not None:
                time.sleep(0.05)
                _disturb(field, alive, asleep, dice, counts, workers, seed + sum(counts.values()) + processes)
    finally:
        _wake(alive, asleep, now=None)
    for process in alive:
        for word in process.communicate(timeout=120)[0].split():
            what, _, count = word.partition("=")
            counts[what] += int(count)
    return {"seconds": round(time.monotonic() - began, 1), **counts, **judge(field)}


def _start(field: Field, workers: int, seed: int) -> subprocess.Popen[str]:
    words = ["work", field.engine, field.data, field.authority, str(workers), str(seed)]
    return subprocess.Popen(
        [sys.executable, "-m", "evidence.claim_storm", *words], stdout=subprocess.PIPE, text=True
    )


def _disturb(
    field: Field,
    alive: list[subprocess.Popen[str]],
    asleep: dict[int, float],
    dice: random.Random,
    counts: Counter[str],
    workers: int,
    seed: int,
) -> None:
    """Stop a process for up to three ttls, or kill one and start another."""
    _wake(alive, asleep, now=time.monotonic())
    place = dice.randrange(len(alive))
    chance = dice.random()
    if place in asleep or alive[place].poll() is not None:
        return
    if chance < 0.15:
        alive[place].send_signal(signal.SIGSTOP)
        asleep[place] = time.monotonic() + dice.uniform(0.5, 3) * TTL
        counts["stops"] += 1
    elif chance < 0.17:
        alive[place].kill()
        alive[place].communicate()
        alive[place] = _start(field, workers, seed)
        counts["kills"] += 1


def _wake(alive: list[subprocess.Popen[str]], asleep: dict[int, float], now: float | None) -> None:
    for place in [place for place, until in asleep.items() if now is None or until <= now]:
        del asleep[place]
        alive[place].send_signal(signal.SIGCONT)


def judge(field: Field) -> dict[str, int]:
    """Accepted finishes too many, rows without one, and rows that do not carry the token of their finish."""
    with contextlib.closing(field.connect()) as db:

        def count(sql: str) -> int:
            (number,) = db.execute(sql).fetchone()
            return int(number)

        return {
            "accepted": count("SELECT count(*) FROM accepted"),
            "too_many": count("SELECT count(*) - count(DISTINCT run) FROM accepted"),
            "unfinished": count("SELECT count(*) FROM runs WHERE id NOT IN (SELECT run FROM accepted)"),
            "overwritten": count("SELECT count(*) FROM runs WHERE output <> claim_token OR output IS NULL"),
        }


def _work(engine: str, data: str, authority: str, workers: str, seed: str) -> None:
    field = Field(engine, data, authority)
    counts: Counter[str] = Counter()
    with fenced.Client(authority) as client:
        threads = [
            threading.Thread(target=_worker, args=(field, client, random.Random(f"{seed}/{n}"), counts))
            for n in range(int(workers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(*(f"{what}={count}" for what, count in counts.items()))


def _worker(field: Field, client: fenced.Client, dice: random.Random, counts: Counter[str]) -> None:
    """One worker, with a new lease whenever it has lost one. Counts are approximate: threads share them."""
    with contextlib.closing(field.connect()) as db:
        while db.execute(LEFT).fetchone() is not None:
            try:
                with RUNS.worker(client, ttl=TTL) as worker:
                    while db.execute(LEFT).fetchone() is not None:
                        _turn(worker, db, dice, counts)
            except fenced.LeaseLost:
                counts["leases_lost"] += 1
            except (fenced.Unavailable, fenced.Indeterminate, fenced.Contended):
                counts["unavailable"] += 1


def _turn(worker: Any, db: Any, dice: random.Random, counts: Counter[str]) -> None:
    found = worker.claim_many(db, dice.randint(1, 3))
    if not found:
        time.sleep(TTL / 10)
    for run in found:
        counts["claims"] += 1
        time.sleep(dice.random() * 0.004)
        try:
            if dice.random() < 0.5:
                run.finish(db, status="done", output=run.token)
            else:
                with run.transaction(db) as tx:
                    run.finish(tx, status="done", output=run.token)
        except fenced.Refused:
            counts["refused"] += 1


if __name__ == "__main__":
    assert sys.argv[1] == "work"
    _work(*sys.argv[2:])
