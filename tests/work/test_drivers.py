"""Claims over every driver and framework, in both colours: claim, write, transaction, finish, and a late worker."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

import fenced
from fenced.errors import StaleToken, Unsupported
from fenced.stores.mariadb.address import MariadbAddress
from fenced.work import AsyncClaims, Claims
from fenced_testkit.servers import Pgbouncer
from tests.work.places import EMPTY, KEYS, OPTIONS, TABLE, claimed, end_lease, place_at


@asynccontextmanager
async def psycopg_connection(url: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        yield connection


@asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncIterator[Any]:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def alchemy_session(url: str) -> AsyncIterator[Any]:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(
        url.replace("postgresql://", "postgresql+asyncpg://").replace("mariadb://", "mysql+asyncmy://")
    )
    try:
        async with AsyncSession(engine) as session:
            yield session
    finally:
        await engine.dispose()


@asynccontextmanager
async def aiosqlite_connection(url: str) -> AsyncIterator[Any]:
    import aiosqlite

    async with aiosqlite.connect(url, isolation_level=None) as connection:
        yield connection


@asynccontextmanager
async def asyncmy_connection(url: str) -> AsyncIterator[Any]:
    import asyncmy

    address = MariadbAddress(url)
    ((host, port),) = address.members
    connection = await asyncmy.connect(
        host=host, port=port, user=address.user, db=address.database, autocommit=True
    )
    try:
        yield connection
    finally:
        connection.close()


@asynccontextmanager
async def asyncmy_that_begins(url: str) -> AsyncIterator[Any]:
    """As it is by default: its first statement begins a transaction."""
    async with asyncmy_connection(url) as connection:
        await connection.autocommit(False)
        yield connection


ASYNC = {
    "psycopg": psycopg_connection,
    "asyncpg": asyncpg_connection,
    "sqlalchemy": alchemy_session,
    "aiosqlite": aiosqlite_connection,
    "asyncmy": asyncmy_connection,
    "asyncmy, begins": asyncmy_that_begins,
    "asyncmy, sqlalchemy": alchemy_session,
}


@pytest.fixture
def database(
    request: pytest.FixtureRequest, claimed_databases: dict[str, str], tmp_path: Path
) -> tuple[str, str]:
    """The database with the table, with one row, and the address of the authority."""
    driver = getattr(request, "param", "")
    if driver.startswith("asyncmy"):
        made: str = request.getfixturevalue("new_mariadb")()
        with place_at("mariadb", made, made) as place:
            place.prepare()
        return made, made
    if driver == "aiosqlite":
        with sqlite3.connect(tmp_path / "data.db") as file:
            file.execute(TABLE.format(key=KEYS["sqlite"]))
            Claims(**OPTIONS).install(file, mode="require")
            file.execute("INSERT INTO runs (id) VALUES (1)")
        return str(tmp_path / "data.db"), f"sqlite:///{tmp_path}/leases.db"
    url = claimed_databases["postgresql"]
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(EMPTY)
        db.execute("INSERT INTO runs (id) VALUES (1)")
    return url, url


@pytest.mark.parametrize(("database", "driver"), [(name, name) for name in ASYNC], indirect=["database"])
def test_a_late_worker_under_asyncio(driver: str, database: tuple[str, str]) -> None:
    async def story() -> None:
        data, authority = database
        runs = AsyncClaims(**OPTIONS)
        async with (
            ASYNC[driver](data) as db,
            fenced.AsyncClient(authority) as client,
            fenced.AsyncClient(authority) as other,
            runs.worker(other) as second,
        ):
            first = await runs.worker(client).__aenter__()
            (late,) = await first.claim_many(db, 2)
            await late.update(db, output="begun")
            lease = first._work.lease
            await client._engine.authority.force_release(lease.names[0], lease.token)
            assert await second.give_back(db) == 1
            async with second.claim(db) as run:
                assert run is not None
                assert (run["output"], run.attempt, run.token > late.token) == ("begun", 2, True)
                with pytest.raises(StaleToken):
                    await late.finish(db, status="done", output="late")
                async with run.transaction(db):
                    await run.finish(db, status="done", output="by " + driver)
            assert run.outcome == "done"
            late.outcome = None
            with pytest.raises(StaleToken):
                async with late.transaction(db):
                    pass
            status = await runs.status(db)
            assert (status.ready, status.claimed) == (0, 0)

    asyncio.run(story())


@contextmanager
def alchemy(url: str) -> Iterator[Any]:
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session:
        yield session
    engine.dispose()


@contextmanager
def implicit(url: str) -> Iterator[Any]:
    """psycopg as it is by default: it begins transactions by itself."""
    with psycopg.connect(url) as connection:
        yield connection


@pytest.mark.parametrize("connect", [alchemy, implicit])
def test_a_late_worker_over(connect: Any, database: tuple[str, str]) -> None:
    url, _ = database
    runs = Claims(**OPTIONS)
    with connect(url) as db, fenced.Client(url) as client, runs.worker(client) as second:
        first = runs.worker(client).__enter__()
        late = claimed(first, db)
        end_lease(first)
        assert second.give_back(db) == 1
        with second.claim(db) as run:
            assert run is not None
            with pytest.raises(StaleToken):
                late.finish(db, status="done", output="late")
            with run.transaction(db):
                run.finish(db, status="done", output="x")
        with psycopg.connect(url) as look:
            assert look.execute("SELECT status, output FROM runs").fetchone() == ("done", "x")
            assert look.execute("SELECT verdict, ruling FROM fenced_guard.record").fetchall() == [
                ("stale", "refuse")
            ]


def test_everything_works_through_a_pooler_in_transaction_mode(
    database: tuple[str, str], pgbouncer: Pgbouncer
) -> None:
    url, _ = database
    runs = Claims(**OPTIONS)
    pooled = pgbouncer.url(str(psycopg.conninfo.conninfo_to_dict(url)["dbname"]))
    with (
        psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as db,
        fenced.Client(url) as client,
        runs.worker(client) as second,
    ):
        first = runs.worker(client).__enter__()
        late = claimed(first, db)
        end_lease(first)
        assert second.give_back(db) == 1
        run = claimed(second, db)
        with pytest.raises(StaleToken):
            late.finish(db, status="done")
        with run.transaction(db) as tx:
            tx.execute("UPDATE runs SET output = 'announced'")
            run.finish(tx, status="done")


def test_sqlalchemy_over_sqlite_is_for_migrations(tmp_path: Path) -> None:
    from sqlalchemy import create_engine

    engine = create_engine(f"sqlite:///{tmp_path}/data.db")
    with engine.connect() as db, fenced.Client(f"sqlite:///{tmp_path}/leases.db") as client:
        db.exec_driver_sql(TABLE.format(key=KEYS["sqlite"]))
        db.commit()
        Claims(**OPTIONS).install(db, mode="require")
        with Claims(**OPTIONS).worker(client) as worker, pytest.raises(Unsupported):
            worker.claim_many(db)
    engine.dispose()


def test_take_hears_of_a_new_row(database: tuple[str, str]) -> None:
    """It waits by LISTEN: with a poll of a minute, only a notification lets it return."""
    url, _ = database
    runs = Claims(**OPTIONS)

    async def story() -> None:
        asynchronous = AsyncClaims(**OPTIONS)
        async with (
            await psycopg.AsyncConnection.connect(url, autocommit=True) as db,
            fenced.AsyncClient(url) as client,
            asynchronous.worker(client) as worker,
        ):
            taken = worker.take(db, limit=1, poll=60)
            run = await anext(taken)
            await run.finish(db, status="done")
            waiting = asyncio.ensure_future(anext(taken))
            with psycopg.connect(url, autocommit=True) as other:
                idle = "SELECT count(*) FROM fenced_guard.idle WHERE until > clock_timestamp()"
                while other.execute(idle).fetchone() == (0,) or not _listens(other):
                    await asyncio.sleep(0.01)
                other.execute("INSERT INTO runs (id) VALUES (2)")
                second = await waiting
                assert second.id == 2
                await second.finish(db, status="done")
                worker.stop()
                assert [run async for run in taken] == []

    asyncio.run(story())
    with (
        fenced.Client(url) as client,
        runs.worker(client) as worker,
    ):
        # Stopped before it begins: nothing is claimed.
        worker.stop()
        with psycopg.connect(url, autocommit=True) as db:
            assert list(worker.take(db)) == []


def _listens(db: psycopg.Connection[Any]) -> bool:
    found = db.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN fenced_work' AND state = 'idle'"
    )
    return found.fetchone() == (1,)


def test_a_worker_that_blocks_in_one_colour_is_refused_in_the_other(database: tuple[str, str]) -> None:
    async def story() -> None:
        runs = AsyncClaims(**OPTIONS)
        async with fenced.AsyncClient(database[1]) as client, runs.worker(client) as worker:
            with psycopg.connect(database[0]) as db, pytest.raises(Unsupported, match="not on"):
                await worker.claim_many(db)

    asyncio.run(story())
