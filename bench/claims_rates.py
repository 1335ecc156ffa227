"""Rates of claims in PostgreSQL: workers in one asyncio program, against bare claims, pgqueuer and procrastinate.

All of them claim and finish the same number of rows, with an empty body, turn by turn on one server. Claims go through
our whole Python layer. pgqueuer buffers its finishes and deletes the rows; ours and the bare ones commit each finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

import fenced
from bench.figures import Figure
from bench.interleaved import Effort
from fenced.work import AsyncClaims, AsyncClaimWorker

JOBS, ROUNDS = 1500, 3
STATEMENTS_BEFORE = 6
"""How many claims each connection has sent before a turn against bare claims is timed: workers keep their connections,
and a driver prepares a statement when it has sent it five times."""
WORKERS, BATCH = 8, 10
PAYLOAD = json.dumps({"prompt": "x" * 200})
OPTIONS: dict[str, Any] = {
    "table": "jobs",
    "name": "jobs/{id}",
    "ready": "status = 'pending'",
    "order": "priority, id",
    "taken": {"status": "running"},
    "back": {"status": "pending"},
}
COLUMNS = "status text NOT NULL DEFAULT 'pending', priority int NOT NULL DEFAULT 0, input text, output text"
BARE_CLAIM = (
    "UPDATE bare_jobs SET status = 'running' WHERE id = (SELECT id FROM bare_jobs WHERE status = 'pending' "
    "ORDER BY priority, id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id, input"
)
BARE_FINISH = "UPDATE bare_jobs SET status = 'done', output = %s WHERE id = %s"


@dataclass(frozen=True)
class Yard:
    """A database with a table of jobs for each, and how many jobs a turn has."""

    url: str
    jobs: int

    def run(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as db:
            for statement in statements:
                db.execute(statement)

    async def prepare(self) -> None:
        made = ("bare_jobs", "jobs")
        self.run(*(f"CREATE TABLE {table} (id bigint PRIMARY KEY, {COLUMNS})" for table in made))
        self.run("CREATE INDEX bare_ready_jobs ON bare_jobs (priority, id) WHERE status = 'pending'")
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as db:
            await AsyncClaims(**OPTIONS).install(db, mode="require")

    def fill(self, table: str, more: int = 0) -> None:
        """As many rows as a turn takes, and nothing else. Triggers are off meanwhile: old rows have claims."""
        rows = f"SELECT n, '{PAYLOAD}' FROM generate_series(1, {self.jobs + more}) AS n"
        self.run(
            f"ALTER TABLE {table} DISABLE TRIGGER USER; TRUNCATE {table}; "
            f"INSERT INTO {table} (id, input) {rows}; ALTER TABLE {table} ENABLE TRIGGER USER",
            f"VACUUM ANALYZE {table}",
        )

    async def bare(self, workers: int) -> float:
        """Two statements for each row, by psycopg."""
        self.fill("bare_jobs", workers * STATEMENTS_BEFORE)

        async def drain(db: Any, claims: float = math.inf) -> None:
            while claims > 0 and (row := await (await db.execute(BARE_CLAIM)).fetchone()) is not None:
                await db.execute(BARE_FINISH, ("x", row[0]))
                claims -= 1

        async with _psycopgs(self.url, workers) as connections:
            for db in connections:
                await drain(db, STATEMENTS_BEFORE)
            return await _seconds([drain(db) for db in connections])

    async def claims(self, workers: int, batch: int, connect: Any, before: int = 0) -> float:
        self.fill("jobs", workers * batch * before)
        runs = AsyncClaims(**OPTIONS)
        async with fenced.AsyncClient(self.url) as client, contextlib.AsyncExitStack() as stack:
            connections = await stack.enter_async_context(connect(self.url, workers))
            started = [await stack.enter_async_context(runs.worker(client, ttl=60)) for _ in range(workers)]

            async def drain(db: Any, worker: AsyncClaimWorker, claims: float = math.inf) -> None:
                while claims > 0 and (found := await worker.claim_many(db, batch)):
                    for run in found:
                        await run.finish(db, status="done", output="x")
                    claims -= 1

            pairs = list(zip(connections, started, strict=True))
            for db, worker in pairs:
                await drain(db, worker, before)
            return await _seconds([drain(db, worker) for db, worker in pairs])

    async def pgqueuer(self, workers: int) -> float:
        import asyncpg
        from pgqueuer import PgQueuer
        from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
        from pgqueuer.models import Job
        from pgqueuer.queries import Queries
        from pgqueuer.types import QueueExecutionMode

        logging.getLogger("pgqueuer").setLevel(logging.ERROR)
        connection = await asyncpg.connect(self.url)
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        try:
            await queries.enqueue(["job"] * self.jobs, [PAYLOAD.encode()] * self.jobs, [0] * self.jobs)
            pool = asyncpg.create_pool(self.url, min_size=workers + 1, max_size=max(4, workers + 2))
            async with pool:
                queuer = PgQueuer(AsyncpgPoolDriver(pool))

                @queuer.entrypoint("job")
                async def job(_job: Job) -> None:
                    pass

                async def drain() -> None:
                    await queuer.run(
                        dequeue_timeout=timedelta(seconds=1),
                        batch_size=workers,
                        mode=QueueExecutionMode.drain,
                    )

                return await _seconds([drain()])
        finally:
            await queries.uninstall()
            await connection.close()

    async def procrastinate(self, workers: int) -> float:
        import procrastinate

        logging.getLogger("procrastinate").setLevel(logging.ERROR)
        self.run("DROP SCHEMA IF EXISTS pc CASCADE", "CREATE SCHEMA pc")
        app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(
                conninfo=self.url, max_size=workers + 4, kwargs={"options": "-c search_path=pc"}
            )
        )

        @app.task(name="job")
        async def job(prompt: str) -> None:
            pass

        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            await app.configure_task("job").batch_defer_async(*[json.loads(PAYLOAD)] * self.jobs)

            async def drain() -> None:
                await app.run_worker_async(
                    concurrency=workers, wait=False, install_signal_handlers=False, listen_notify=False
                )

            return await _seconds([drain()])


def rates(url: str, effort: Effort, place: str, least: float, *, peers: bool) -> Iterator[Figure]:
    yard = Yard(url, effort.size(JOBS))
    rounds = effort.of(ROUNDS)
    asyncio.run(yard.prepare())
    bare, ours = _turns(
        rounds,
        lambda: yard.bare(WORKERS),
        lambda: yard.claims(WORKERS, BATCH, _psycopgs, STATEMENTS_BEFORE),
    )
    what = f"{WORKERS} workers of PostgreSQL {place}"
    against = f"bare single claims; {yard.jobs} rows, one asyncio program, psycopg"
    yield _faster(f"claim_batches_{place}", f"rate of {what}, batches of {BATCH}", bare, ours, least, against)
    if not peers:
        return
    for workers in (1, WORKERS):
        theirs, ours = _turns(
            rounds,
            lambda count=workers: yard.pgqueuer(count),  # type: ignore[misc]
            lambda count=workers: yard.claims(count, count, _asyncpgs),  # type: ignore[misc]
        )
        yield _faster(
            f"claim_pgqueuer_{workers}",
            f"rate with {workers} at once, batches of {workers}",
            theirs,
            ours,
            1.0,
            f"pgqueuer with asyncpg, the same batches, {place}",
        )
    theirs, ours = _turns(rounds, lambda: yard.procrastinate(1), lambda: yard.claims(1, 1, _psycopgs))
    against = f"procrastinate, one at a time, {place}"
    yield _faster("claim_procrastinate", "rate of one worker, one at a time", theirs, ours, 2.0, against)


def _faster(key: str, what: str, theirs: float, ours: float, least: float, against: str) -> Figure:
    """The other's time divided by ours: above 1 we are faster."""
    detail = f"{ours * 1e3:,.0f} ms against {theirs * 1e3:,.0f} ms, {against}"
    return Figure(key, what, theirs / ours, "x", least, detail, "at least")


def _turns(rounds: int, *measured: Callable[[], Coroutine[Any, Any, float]]) -> list[float]:
    """The median seconds of each, in turns."""
    times: list[list[float]] = [[] for _ in measured]
    for _ in range(rounds):
        for one, found in zip(measured, times, strict=True):
            found.append(asyncio.run(one()))
    return [statistics.median(each) for each in times]


async def _seconds(work: list[Coroutine[Any, Any, None]]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*work)
    return time.perf_counter() - began


@contextlib.asynccontextmanager
async def _psycopgs(url: str, count: int) -> AsyncIterator[list[Any]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(url, autocommit=True))
            for _ in range(count)
        ]


@contextlib.asynccontextmanager
async def _asyncpgs(url: str, count: int) -> AsyncIterator[list[Any]]:
    import asyncpg

    made = [await asyncpg.connect(url) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            await one.close()
