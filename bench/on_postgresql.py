"""PostgreSQL: session advisory locks by psycopg, a pooler, and what the server is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg

import fenced
from bench import growth, requests
from bench.contending import WARM_UP, AsyncLock, Kind, Lock
from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians
from bench.peers import NAME, compare, ourselves
from fenced_testkit.servers import Pgbouncer, PostgresqlServer

SETTINGS = {"shared_buffers": "128MB"}
"""PostgreSQL's own default; the servers of the tests have less."""

COUNTING = {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "top"}
KEY = 7310311205
LOCK = "SELECT pg_advisory_lock(%s)"
UNLOCK = "SELECT pg_advisory_unlock(%s)"
ALONE_PAIRS = 1000


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with PostgresqlServer(SETTINGS) as server:
        ((version,),) = server.execute("SHOW server_version")
        name = f"PostgreSQL {version.split()[0]}"
        url = server.url(server.create_database("leases"))
        yield from compare(name, "postgresql", ourselves(url), [_advisory(url)], effort)
        yield from _alone(server, url, effort)
        yield _growth(server, effort)
    with PostgresqlServer({**SETTINGS, **COUNTING}) as server:
        yield from _requests(server, effort)


class Advisory:
    """A lock of a session, and so of a connection of its own."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def acquire(self) -> None:
        self._connection.execute(LOCK, (KEY,), prepare=True)

    def release(self) -> None:
        self._connection.execute(UNLOCK, (KEY,), prepare=True)


class AsyncAdvisory:
    """The same under asyncio."""

    def __init__(self, connection: psycopg.AsyncConnection) -> None:
        self._connection = connection

    async def acquire(self) -> None:
        await self._connection.execute(LOCK, (KEY,), prepare=True)

    async def release(self) -> None:
        await self._connection.execute(UNLOCK, (KEY,), prepare=True)


def _advisory(url: str) -> Kind:
    def crew(stack: contextlib.ExitStack, count: int) -> list[Lock]:
        connect = psycopg.connect
        return [Advisory(stack.enter_context(connect(url, autocommit=True))) for _ in range(count)]

    async def async_crew(stack: contextlib.AsyncExitStack, count: int) -> list[AsyncLock]:
        locks: list[AsyncLock] = []
        for _ in range(count):
            connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
            locks.append(AsyncAdvisory(await stack.enter_async_context(connection)))
        return locks

    targets = {"pair": 0.45, "2 waiters": 0.5, "16 waiters": 0.5, "64 waiters": 0.5}
    note = "it writes nothing: no lease, no token"
    return Kind("advisory", "advisory lock, psycopg", crew, async_crew, targets=targets, note=note)


def _alone(server: PostgresqlServer, url: str, effort: Effort) -> Iterator[Figure]:
    """Our pair beside the two commits that it cannot do without, and behind a pooler."""
    flushed, unflushed = (
        f"{url}?options=-csynchronous_commit%3Don",
        f"{url}?options=-csynchronous_commit%3Doff",
    )
    with (
        Pgbouncer(server) as pooler,
        fenced.Client(url) as direct,
        fenced.Client(pooler.url("leases")) as behind,
        psycopg.connect(flushed, autocommit=True) as granting,
        psycopg.connect(unflushed, autocommit=True) as releasing,
    ):
        granting.execute("CREATE TABLE bare AS SELECT 0 AS count")

        def commit_twice() -> None:
            for connection in (granting, releasing):
                connection.execute("UPDATE bare SET count = count + 1", prepare=True)

        pooled, pair, bare = medians(
            lambda: behind.acquire(NAME).release(),
            lambda: direct.acquire(NAME).release(),
            commit_twice,
            rounds=effort.of(ALONE_PAIRS),
            warm_up=effort.size(WARM_UP),
        )
    against = "one flushed and one unflushed UPDATE of one row"
    yield ratio("postgresql.bare", "pair against two bare commits", pair, bare, against=against)
    what = "pair behind pgbouncer, transaction mode"
    yield ratio("postgresql.pgbouncer", what, pooled, pair, against="without it")


# Requests.


def _requests(server: PostgresqlServer, effort: Effort) -> Iterator[Figure]:
    """Counts the statements that clients sent, as pg_stat_statements does; those inside functions are left out.

    The counter itself asks in another database, and is not counted.
    """
    database = server.create_database("counted")
    server.execute("CREATE EXTENSION pg_stat_statements")
    calls = f"""
        SELECT coalesce(sum(s.calls), 0)::bigint FROM pg_stat_statements s
        JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = '{database}'
    """

    def count() -> int:
        ((found,),) = server.execute(calls)
        return int(found)

    yield from requests.run("postgresql", server.url(database), count, effort)


# Growth.


FILL = """
INSERT INTO fenced.attempt SELECT copy.*
FROM fenced.attempt AS original, generate_series(0, {last}) AS number,
  jsonb_populate_record(original, jsonb_build_object(
    'id', gen_random_uuid(), 'names', ARRAY['used/' || lpad(number::text, 7, '0')])) AS copy;
INSERT INTO fenced.name SELECT copy.*
FROM fenced.name AS original, fenced.attempt AS used,
  jsonb_populate_record(original, jsonb_build_object('name', used.names[1], 'attempt', used.id)) AS copy
WHERE used.names[1] <> original.name;
"""
"""What a real acquire and release has left, once more for other names, under ids of their own."""


def _growth(server: PostgresqlServer, effort: Effort) -> Figure:
    many = effort.of(growth.MANY)
    with (
        fenced.Client(server.url(server.create_database("few"))) as few,
        fenced.Client(server.url(server.create_database("many"))) as lots,
    ):
        _fill(server, few, "few", growth.FEW)
        _fill(server, lots, "many", many)
        return growth.figure("postgresql", few, lots, many, effort)


def _fill(server: PostgresqlServer, client: fenced.Client, database: str, names: int) -> None:
    client.acquire(growth.used_name(names)).release()
    server.execute(FILL.format(last=names - 1), database)
    server.execute("VACUUM ANALYZE", database)
    server.execute("CHECKPOINT", database)
