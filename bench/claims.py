"""Claims against two bare statements: take a row (SKIP LOCKED), and finish it. Tables of their own, turn by turn."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

import fenced
from bench.claims_rates import rates
from bench.figures import Figure, ratio
from bench.interleaved import Action, Effort, medians
from fenced.stores.mariadb.guard.connecting import connect
from fenced.work import Claims, ClaimWorker
from fenced_testkit.servers import MariadbServer, PostgresqlServer

ROUNDS, WARM_UP = 1200, 100
KEPT, IDLE = 500, 20
MEMORY = "/dev/shm"
COLUMNS = "status text NOT NULL DEFAULT 'pending', priority int NOT NULL DEFAULT 0, input text, output text"
BARE_CLAIM = {
    "postgresql": "UPDATE bare SET status = 'running' WHERE id = (SELECT id FROM bare WHERE status = 'pending' "
    "ORDER BY priority, id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING *",
    "sqlite": "UPDATE bare SET status = 'running' WHERE id = (SELECT id FROM bare WHERE status = 'pending' "
    "ORDER BY priority, id LIMIT 1) RETURNING *",
}
AGAINST = "two bare statements: claim with SKIP LOCKED, finish by id"
RUNS = Claims(
    table="runs",
    name="runs/{id}",
    ready="status = 'pending'",
    order="priority, id",
    taken={"status": "running"},
    back={"status": "pending"},
)


@dataclass(frozen=True)
class Place:
    """Where the data is, and what each figure is held to there."""

    name: str
    statements: float
    layer: float
    sqlite: float
    batches: float


PLACES = (Place("memory", 1.5, 1.8, 1.8, 1.2), Place("disk", 1.3, 1.4, 1.3, 1.0))


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    for place in PLACES:
        with contextlib.ExitStack() as stack:
            where = None
            if place.name == "memory":
                where = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY, prefix="fenced-")))
            server = PostgresqlServer({"shared_buffers": "128MB"}, where and where / "server")
            if where:
                where.chmod(0o711)  # the server runs as another user
            yield from _on_postgresql(stack.enter_context(server), place, effort)
            files = stack.enter_context(tempfile.TemporaryDirectory(dir=where or folder))
            yield from _on_sqlite(files, place, effort)
            yield from _on_mariadb(
                stack.enter_context(MariadbServer(folder=f"{files}/mariadb")), place, effort
            )


def _on_postgresql(server: PostgresqlServer, place: Place, effort: Effort) -> Iterator[Figure]:
    url = server.url(server.create_database())
    with fenced.Client(url) as client, psycopg.connect(url, autocommit=True) as db:
        client.acquire("first").release()
        _make("postgresql", db, 2 * (effort.of(ROUNDS) + effort.size(WARM_UP) + 10) + KEPT)
        with RUNS.worker(client, ttl=60) as worker:
            yield from _one_at_a_time("PostgreSQL", "postgresql", db, worker, place, effort)
        if place.name == "memory":
            yield from _counts(db, client, effort)
    yield from rates(url, effort, place.name, place.batches, peers=place.name == "memory")


def _on_sqlite(folder: str, place: Place, effort: Effort) -> Iterator[Figure]:
    with (
        fenced.Client(f"sqlite:///{folder}/leases.db", guarantee="best-effort") as client,
        contextlib.closing(sqlite3.connect(f"{folder}/data.db", isolation_level=None)) as file,
    ):
        file.execute("PRAGMA journal_mode = WAL")
        _make("sqlite", file, 2 * (effort.of(ROUNDS) + effort.size(WARM_UP) + 10))
        with RUNS.worker(client, ttl=60) as worker:
            yield from _one_at_a_time("SQLite", "sqlite", file, worker, place, effort)


def _on_mariadb(server: MariadbServer, place: Place, effort: Effort) -> Iterator[Figure]:
    """For information: there, taking a row by hand is a transaction, too."""
    url = server.url(server.create_database())
    jobs = effort.of(ROUNDS) + effort.size(WARM_UP) + 10
    with fenced.Client(url) as client, contextlib.closing(connect(url)) as db:
        cursor = db.cursor()
        execute = cursor.execute
        for table in ("bare", "runs"):
            columns = COLUMNS.replace("status text", "status varchar(20)")
            execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, {columns})")
            cursor.executemany(
                f"INSERT INTO {table} (id, input) VALUES (%s, %s)", [(n, "x" * 200) for n in range(jobs)]
            )
        execute("CREATE INDEX bare_ready ON bare (status, priority, id)")
        RUNS.install(db, mode="require")
        execute("ANALYZE TABLE bare, runs")
        with RUNS.worker(client, ttl=60) as worker:
            bare, whole = medians(
                _bare_on_mariadb(cursor),
                _ours(db, worker),
                rounds=effort.of(ROUNDS),
                warm_up=effort.size(WARM_UP),
            )
    what = f"claim and finish a row in MariaDB {place.name}, require, with our layer"
    against = "by hand: begin, SELECT ... SKIP LOCKED, UPDATE, commit; then finish by id"
    yield ratio(f"claim_mariadb_{place.name}", what, whole, bare, against=against)


def _bare_on_mariadb(cursor: Any) -> Action:
    def job() -> None:
        cursor.execute("BEGIN")
        cursor.execute(
            "SELECT * FROM bare WHERE status = 'pending' ORDER BY priority, id LIMIT 1 FOR UPDATE SKIP LOCKED"
        )
        (key, *_) = cursor.fetchone()
        cursor.execute(f"UPDATE bare SET status = 'running' WHERE id = {key}")
        cursor.execute("COMMIT")
        cursor.execute(f"UPDATE bare SET status = 'done', output = 'x' WHERE id = {key}")

    return job


def _make(engine: str, db: Any, jobs: int) -> None:
    key = "bigint PRIMARY KEY" if engine == "postgresql" else "INTEGER PRIMARY KEY"
    for table in ("bare", "runs"):
        db.execute(f"CREATE TABLE {table} (id {key}, {COLUMNS})")
        db.execute(
            f"WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {jobs}) "
            f"INSERT INTO {table} (id, input) SELECT i, '{'x' * 200}' FROM n"
        )
    db.execute("CREATE INDEX bare_ready ON bare (priority, id) WHERE status = 'pending'")
    RUNS.install(db, mode="require")
    db.execute("ANALYZE")


def _bare(engine: str, db: Any) -> Action:
    place = "%s" if engine == "postgresql" else "?"
    finish = f"UPDATE bare SET status = {place}, output = {place} WHERE id = {place}"

    def job() -> None:
        (key, *_) = db.execute(BARE_CLAIM[engine]).fetchone()
        db.execute(finish, ("done", "x", key))

    return job


def _statements(engine: str, db: Any, worker: ClaimWorker) -> Action:
    """The statements that claims send, by the same driver and without our layer."""
    place = "%s" if engine == "postgresql" else "?"
    with _sent(db, worker) as sent:
        worker.claim_many(db, 1)
    claim = sent[-1]
    finish = (
        f"UPDATE runs SET status = {place}, output = {place}, claim_holder = NULL, claim_at = NULL, "
        f"claim_write = {place} WHERE id = {place} RETURNING 1"
    )
    cursor = db.cursor()
    names = [column[0] for column in cursor.execute("SELECT * FROM runs LIMIT 0").description]
    key, token = names.index("id"), names.index("claim_token")

    def job() -> None:
        row = cursor.execute(claim).fetchone()
        cursor.execute(finish, ("done", "x", (row[token] << 20) + 1, row[key])).fetchall()

    return job


def _ours(db: Any, worker: ClaimWorker) -> Action:
    def job() -> None:
        (run,) = worker.claim_many(db, 1)
        run.finish(db, status="done", output="x")

    return job


def _one_at_a_time(
    name: str, engine: str, db: Any, worker: ClaimWorker, place: Place, effort: Effort
) -> Iterator[Figure]:
    bare, statements, whole = medians(
        _bare(engine, db),
        _statements(engine, db, worker),
        _ours(db, worker),
        rounds=effort.of(ROUNDS),
        warm_up=effort.size(WARM_UP),
    )
    what = f"claim and finish a row in {name} {place.name}, require"
    key = f"claim_{engine}_{place.name}"
    alone, layer = (place.statements, place.layer) if engine == "postgresql" else (place.sqlite, None)
    yield ratio(
        f"{key}_statements", f"{what}, statements alone", statements, bare, target=alone, against=AGAINST
    )
    yield ratio(key, f"{what}, with our layer", whole, bare, target=layer, against=AGAINST)


def _counts(db: Any, client: fenced.Client, effort: Effort) -> Iterator[Figure]:
    """What a worker writes to keep its claims, and what it sends when nothing is ready."""
    with RUNS.worker(client, ttl=0.6) as worker:
        claimed = worker.claim_many(db, effort.size(KEPT))
        first = before = _versions(db)
        for _ in range(3):  # renewals
            while (now := _versions(db)) == before:
                time.sleep(0.02)
            before = now
        written = {table for table, *_ in first ^ now}
        rows = len(now - first)
        for run in claimed:
            run.finish(db, status="done")
    what = f"rows written in three renewals of a worker with {len(claimed)} claims"
    yield Figure("claim_renewal_rows", what, rows, "rows", 1.0, f"in {', '.join(written)}")
    db.execute("UPDATE runs SET status = 'later' WHERE status = 'pending' AND claim_token IS NULL")
    with RUNS.worker(client, ttl=60) as worker:
        worker.claim_many(db, 1)  # looks for dead workers, which it does every third of its ttl
        with _sent(db, worker) as sent:
            for _ in range(IDLE):
                worker.claim_many(db, 1)
    yield Figure("claim_idle", "statements of an idle poll", len(sent) / IDLE, "", 1.0, f"{IDLE} polls")


def _versions(db: Any) -> set[tuple[str, str, str]]:
    """The newest version of each claimed row, and of each lease: a row that is written has a new one."""
    return set(
        db.execute(
            "SELECT 'runs', id::text, xmin::text FROM runs WHERE claim_holder IS NOT NULL "
            "UNION ALL SELECT 'fenced.attempt', id::text, xmin::text FROM fenced.attempt WHERE state = 'granted'"
        ).fetchall()
    )


@contextlib.contextmanager
def _sent(db: Any, worker: ClaimWorker) -> Iterator[list[str]]:
    """Every statement that claims send meanwhile."""
    sent: list[str] = []
    session: Any = type(worker._work.tables(db)._session)  # type: ignore[attr-defined]
    kept = {name: getattr(session, name) for name in ("records", "run")}

    def recorded(name: str) -> Callable[..., Any]:
        async def call(self: Any, sql: str, parameters: Any = ()) -> Any:
            sent.append(sql)
            return await kept[name](self, sql, parameters)

        return call

    try:
        for name in kept:
            setattr(session, name, recorded(name))
        yield sent
    finally:
        for name, method in kept.items():
            setattr(session, name, method)
