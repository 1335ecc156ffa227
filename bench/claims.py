"""Claims against two bare statements: take a row (SKIP LOCKED), and finish it. Tables of their own, turn by turn."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import Action, Effort, medians
from fenced.work import Claims, ClaimWorker
from fenced_testkit.servers import PostgresqlServer

ROUNDS, WARM_UP = 1200, 100
RATE_JOBS, RATE_WORKERS, BATCH = 2000, 8, 10
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


def run(folder: Path, effort: Effort) -> Iterator[Figure]:
    with PostgresqlServer({"shared_buffers": "128MB"}) as server:
        url = server.url(server.create_database())
        with fenced.Client(url) as client, psycopg.connect(url, autocommit=True) as db:
            client.acquire("first").release()
            jobs = effort.of(ROUNDS) + effort.size(WARM_UP) + 10
            _make("postgresql", db, 2 * jobs)
            with RUNS.worker(client, ttl=60) as worker:
                yield from _one_at_a_time("PostgreSQL", "postgresql", db, worker, effort)
            yield from _rates(url, client, effort)
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        fenced.Client(f"sqlite:///{place}/leases.db") as client,
        contextlib.closing(sqlite3.connect(f"{place}/data.db", isolation_level=None)) as file,
    ):
        file.execute("PRAGMA journal_mode = WAL")
        _make("sqlite", file, 2 * (effort.of(ROUNDS) + effort.size(WARM_UP) + 10))
        with RUNS.worker(client, ttl=60) as worker:
            yield from _one_at_a_time("SQLite", "sqlite", file, worker, effort)


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
    sent: list[str] = []
    session: Any = type(worker._work.tables(db)._session)  # type: ignore[attr-defined]
    kept = session.records

    async def recorded(self: Any, sql: str, parameters: Any = ()) -> Any:
        sent.append(sql)
        return await kept(self, sql, parameters)

    session.records = recorded
    try:
        worker.claim_many(db, 1)
    finally:
        session.records = kept
    claim = sent[-1]
    finish = (
        f"UPDATE runs SET status = {place}, output = {place}, claim_holder = NULL, claim_at = NULL, "
        f"claim_write = {place} WHERE id = {place} RETURNING 1"
    )
    cursor = db.cursor()

    def job() -> None:
        key, token = _key_and_token(cursor, claim)
        cursor.execute(finish, ("done", "x", (token << 20) + 1, key)).fetchall()

    return job


def _key_and_token(cursor: Any, claim: str) -> tuple[Any, int]:
    row = cursor.execute(claim).fetchone()
    names = [column[0] for column in cursor.description]
    return row[0], row[names.index("claim_token")]


def _ours(db: Any, worker: ClaimWorker) -> Action:
    def job() -> None:
        (run,) = worker.claim_many(db, 1)
        run.finish(db, status="done", output="x")

    return job


def _one_at_a_time(name: str, engine: str, db: Any, worker: ClaimWorker, effort: Effort) -> Iterator[Figure]:
    bare, statements, whole = medians(
        _bare(engine, db),
        _statements(engine, db, worker),
        _ours(db, worker),
        rounds=effort.of(ROUNDS),
        warm_up=effort.size(WARM_UP),
    )
    what = f"claim and finish a row in {name}, require"
    layer = 1.4 if engine == "postgresql" else None
    yield ratio(
        f"claim_{engine}_statements",
        f"{what}, statements alone",
        statements,
        bare,
        target=1.3,
        against=AGAINST,
    )
    yield ratio(f"claim_{engine}", f"{what}, with our layer", whole, bare, target=layer, against=AGAINST)


def _rates(url: str, client: fenced.Client, effort: Effort) -> Iterator[Figure]:
    """Jobs a second of eight workers: batches of ten against bare single claims."""
    jobs = effort.size(RATE_JOBS)
    with psycopg.connect(url, autocommit=True) as db:
        for table in ("bare", "runs"):
            db.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER; DELETE FROM {table}")
            db.execute(
                f"INSERT INTO {table} (id, input) SELECT n, 'x' FROM generate_series(1, {jobs}) AS n; "
                f"ALTER TABLE {table} ENABLE TRIGGER USER; ANALYZE {table}"
            )
    ours = _timed(url, lambda db: _batches(db, client))
    bare = _timed(url, _singles)
    against = f"{RATE_WORKERS} workers, bare single claims"
    what = f"{jobs} rows by {RATE_WORKERS} workers in PostgreSQL, batches of {BATCH}"
    yield ratio("claim_postgresql_batches", what, ours, bare, target=1.0, against=against)


def _timed(url: str, work: Callable[[Any], None]) -> float:
    def worker() -> None:
        with psycopg.connect(url, autocommit=True) as db:
            work(db)

    threads = [threading.Thread(target=worker) for _ in range(RATE_WORKERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def _batches(db: Any, client: fenced.Client) -> None:
    with RUNS.worker(client, ttl=60) as worker:
        while found := worker.claim_many(db, BATCH):
            for run in found:
                run.finish(db, status="done", output="x")


def _singles(db: Any) -> None:
    while (found := db.execute(BARE_CLAIM["postgresql"]).fetchone()) is not None:
        db.execute("UPDATE bare SET status = 'done', output = 'x' WHERE id = %s", (found[0],))
