"""The guard on the program's own connections to MariaDB and MySQL, whichever driver they are of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import asyncmy
import MySQLdb
import pymysql
import pytest

import fenced
from fenced.errors import Misconfigured, MissingStamp, Misuse, StaleToken, Uncovered, Unsupported
from fenced.sql import AsyncGuard, Guard, refusal
from fenced.testing.kit import stamp
from fenced.values.decision import Mark
from fenced_testkit.servers import MariadbServer

PLAIN = Guard(table="orders", name="orders/{id}")
SUSPENDING = AsyncGuard(table="orders", name="orders/{id}")
TABLE = "CREATE TABLE orders (id int PRIMARY KEY, qty int, ref varchar(20) UNIQUE) ENGINE = InnoDB"
ROWS = "INSERT INTO orders VALUES (42, 0, 'a'), (43, 0, 'b')"
UPDATE = "UPDATE orders SET qty = qty + 1 WHERE id = 42"


class Writer(Protocol):
    """One connection of the program's own, and the guard on it."""

    connection: Any

    async def run(self, sql: str) -> list[tuple[Any, ...]]: ...
    def transaction(self, fence: Any, *names: str, **options: Any) -> AbstractAsyncContextManager[Any]: ...
    async def close(self) -> None: ...


class Plain:
    """A blocking connection."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def run(self, sql: str) -> list[tuple[Any, ...]]:
        cursor = self.connection.cursor()
        cursor.execute(sql)
        rows = list(cursor.fetchall())
        cursor.close()
        return rows

    @asynccontextmanager
    async def transaction(self, fence: Any, *names: str, **options: Any) -> AsyncIterator[Any]:
        with PLAIN.transaction(self.connection, fence, *names, **options) as tx:
            assert tx is self.connection
            yield tx

    async def close(self) -> None:
        self.connection.close()


class Suspending:
    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def run(self, sql: str) -> list[tuple[Any, ...]]:
        async with self.connection.cursor() as cursor:
            await cursor.execute(sql)
            return list(await cursor.fetchall() or ()) if cursor.description else []

    def transaction(self, fence: Any, *names: str, **options: Any) -> AbstractAsyncContextManager[Any]:
        return SUSPENDING.transaction(self.connection, fence, *names, **options)

    async def close(self) -> None:
        self.connection.close()


async def connect(driver: str, server: MariadbServer, database: str) -> Writer:
    kind, _, begins = driver.partition(", ")
    where: dict[str, Any] = {"host": server.host, "port": server.port, "user": "root"}
    if kind == "PyMySQL":
        return Plain(pymysql.connect(**where, database=database, autocommit=not begins))
    if kind == "mysqlclient":
        return Plain(MySQLdb.connect(**where, database=database, autocommit=not begins))
    return Suspending(await asyncmy.connect(**where, db=database, autocommit=not begins))


DRIVERS = [f"{name}{how}" for name in ("PyMySQL", "mysqlclient", "asyncmy") for how in ("", ", begins")]
every_driver = pytest.mark.parametrize("driver", DRIVERS)


@pytest.fixture
def database(mariadb_server: MariadbServer) -> str:
    """With a guarded table, in require."""
    name = mariadb_server.create_database()
    with plain(mariadb_server, name) as db, db.cursor() as cursor:
        cursor.execute(TABLE)
        cursor.execute(ROWS)
        PLAIN.install(db, mode="require")
    return name


def plain(server: MariadbServer, database: str) -> Any:
    where: dict[str, Any] = {"host": server.host, "port": server.port, "user": "root"}
    return pymysql.connect(**where, database=database, autocommit=True)


@pytest.fixture
def db(mariadb_server: MariadbServer, database: str) -> Iterator[Any]:
    """An onlooker's connection."""
    with plain(mariadb_server, database) as connection:
        yield connection


def query(db: Any, sql: str) -> Any:
    with db.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()


def qty(db: Any, row: int = 42) -> Any:
    ((found,),) = query(db, f"SELECT qty FROM orders WHERE id = {row}")
    return found


def with_writer(driver: str, server: MariadbServer, database: str, story: Any) -> None:
    async def run() -> None:
        writer = await connect(driver, server, database)
        try:
            await story(writer)
        finally:
            await writer.close()

    asyncio.run(run())


@every_driver
def test_a_guarded_write(driver: str, mariadb_server: MariadbServer, database: str, db: Any) -> None:
    async def story(writer: Writer) -> None:
        for seq in (1, 2, 3):  # the second one finds the mark raised
            async with writer.transaction(stamp(33, seq)):
                await writer.run(UPDATE)
        assert qty(db) == 3
        assert PLAIN.peek(db, "orders/42") == Mark(33, f"{33:032x}", 0)
        async with writer.transaction(stamp(34)):
            assert await writer.run("SELECT qty FROM orders WHERE id = 42") == [(3,)]
        with pytest.raises(StaleToken, match="token 33 is stale: 34 has been seen") as error:
            async with writer.transaction(stamp(33, 4)):
                raise AssertionError("the block must not run")
        assert (error.value.name, error.value.mark, error.value.holder) == ("orders/42", 34, f"{34:032x}")

    with_writer(driver, mariadb_server, database, story)


@every_driver
def test_a_stamp_ends_with_its_transaction(
    driver: str, mariadb_server: MariadbServer, database: str, db: Any
) -> None:
    """However the block ends, the next statement on the same connection has no stamp."""

    class Undo(Exception):
        pass

    async def story(writer: Writer) -> None:
        async def unstamped() -> None:
            with pytest.raises(Exception, match="carries no stamp"):
                await writer.run(UPDATE)
            await writer.run("ROLLBACK")

        async with writer.transaction(stamp(5)):
            await writer.run(UPDATE)
        await unstamped()
        with pytest.raises(Undo):
            async with writer.transaction(stamp(5)):
                await writer.run(UPDATE)
                raise Undo
        await unstamped()
        with pytest.raises(Uncovered):
            async with writer.transaction(stamp(5)):
                await writer.run("UPDATE orders SET qty = 9 WHERE id = 43")
        await unstamped()
        for ending in ("COMMIT", "ROLLBACK"):
            with pytest.raises(Misuse, match="ended inside the guarded block"):
                async with writer.transaction(stamp(5)):
                    await writer.run(ending)
            await unstamped()
        with pytest.raises(Misuse, match="ended inside the guarded block"):
            async with writer.transaction(stamp(5)):
                await writer.run("COMMIT")
                await writer.run("START TRANSACTION")
        await unstamped()
        assert qty(db) == 1

    with_writer(driver, mariadb_server, database, story)


@every_driver
def test_a_refusal_that_the_program_catches(
    driver: str, mariadb_server: MariadbServer, database: str, db: Any
) -> None:
    """The server undoes the statement alone; the block then commits nothing."""

    async def story(writer: Writer) -> None:
        with pytest.raises(Misuse, match="nothing was committed"):
            async with writer.transaction(stamp(5)):
                await writer.run(UPDATE)
                with pytest.raises(Exception, match="not covered"):
                    await writer.run("UPDATE orders SET qty = 9 WHERE id = 43")
        assert (qty(db), qty(db, 43)) == (0, 0)

    with_writer(driver, mariadb_server, database, story)


@every_driver
def test_other_errors_are_the_programs_own(
    driver: str, mariadb_server: MariadbServer, database: str, db: Any
) -> None:
    async def story(writer: Writer) -> None:
        with pytest.raises(Exception, match="Duplicate entry") as error:
            async with writer.transaction(stamp(5)):
                await writer.run("UPDATE orders SET qty = 7 WHERE id = 42")
                await writer.run("UPDATE orders SET ref = 'b' WHERE id = 42")
        assert type(error.value).__name__ == "IntegrityError"
        assert refusal(error.value) is None
        assert qty(db) == 0
        async with writer.transaction(stamp(5)):
            await writer.run(UPDATE)
        assert qty(db) == 1

    with_writer(driver, mariadb_server, database, story)


@every_driver
def test_an_open_transaction_is_not_committed_by_the_way(
    driver: str, mariadb_server: MariadbServer, database: str, db: Any
) -> None:
    """START TRANSACTION would commit it."""

    async def story(writer: Writer) -> None:
        await writer.run("START TRANSACTION")
        await writer.run("INSERT INTO other VALUES (7)")
        with pytest.raises(Misuse, match="in a transaction"):
            async with writer.transaction(stamp(5)):
                raise AssertionError("the block must not run")
        await writer.run("ROLLBACK")
        assert query(db, "SELECT COUNT(*) FROM other") == ((0,),)

    query(db, "CREATE TABLE other (id int) ENGINE = InnoDB")
    with_writer(driver, mariadb_server, database, story)


@every_driver
def test_announcing_in_a_transaction_of_the_program(
    driver: str, mariadb_server: MariadbServer, database: str, db: Any
) -> None:
    async def story(writer: Writer) -> None:
        guard: Any = SUSPENDING if isinstance(writer, Suspending) else PLAIN

        async def done(result: Any) -> Any:
            return await result if isinstance(result, Coroutine) else result

        if ", " not in driver:
            with pytest.raises(Misuse, match="begin a transaction first"):
                await done(guard.announce_within(writer.connection, stamp(5)))
        await writer.run("START TRANSACTION")
        announced = await done(guard.announce_within(writer.connection, stamp(5)))
        await writer.run(UPDATE)
        with pytest.raises(Exception, match="not covered"):
            await writer.run("UPDATE orders SET qty = 9 WHERE id = 43")
        other = await done(guard.announce_within(writer.connection, stamp(6, 1, "orders/43")))
        await writer.run("UPDATE orders SET qty = 6 WHERE id = 43")
        await done(other.clear())
        await writer.run(UPDATE)
        await done(announced.clear())
        with pytest.raises(Exception, match="carries no stamp"):
            await writer.run(UPDATE)
        await writer.run("COMMIT")
        assert (qty(db), qty(db, 43)) == (2, 6)
        await writer.run("START TRANSACTION")
        with pytest.raises(StaleToken, match="token 4 is stale: 5 has been seen"):
            await done(guard.announce_within(writer.connection, stamp(4)))
        await writer.run("ROLLBACK")

    with_writer(driver, mariadb_server, database, story)


def test_a_plain_program_is_refused_with_its_drivers_error(database: str, db: Any) -> None:
    with pytest.raises(pymysql.InternalError) as error:
        query(db, UPDATE)
    assert error.value.args == (
        907,
        "fenced: orders/42: the write carries no stamp, and the mode is require",
    )
    assert isinstance(refusal(error.value), MissingStamp)
    assert refusal(pymysql.InternalError(907, "something else")) is None


def test_a_missing_installation_is_reported(mariadb_server: MariadbServer, database: str, db: Any) -> None:
    parts = Guard(table="parts", name="parts/{id}")
    with (
        pytest.raises(Misconfigured, match=r"no guard is installed for .*\.parts"),
        parts.transaction(db, stamp(5)),
    ):
        raise AssertionError("the block must not run")
    once = Guard(table="orders", name="orders/{id}", rule="once")
    says = r"rule retry.*this program says once"
    with pytest.raises(Misconfigured, match=says), once.transaction(db, stamp(5)):
        raise AssertionError("the block must not run")
    with pytest.raises(Unsupported, match="ENGINE = InnoDB"):
        query(db, "CREATE TABLE parts (id int PRIMARY KEY) ENGINE = MyISAM")
        parts.install(db)


def test_several_leases_and_several_names(database: str, db: Any) -> None:
    both = (stamp(5), stamp(6, 1, "orders/43"))
    with PLAIN.transaction(db, both):
        query(db, "UPDATE orders SET qty = qty + 1")
    pair: fenced.Stamp = stamp(7, 1, "orders/42", "orders/43")
    with PLAIN.transaction(db, pair):
        query(db, "UPDATE orders SET qty = qty + 1")
    with pytest.raises(StaleToken), PLAIN.transaction(db, both):
        raise AssertionError("the block must not run")
    assert (qty(db), qty(db, 43)) == (2, 2)
