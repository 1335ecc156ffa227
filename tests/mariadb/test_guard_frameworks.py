"""The MariaDB guard through SQLAlchemy in both colours, on each driver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InternalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import QueuePool

from fenced.errors import Misuse, StaleToken, Uncovered
from fenced.sql import AsyncGuard, Guard
from fenced.testing.kit import stamp
from fenced_testkit.servers import MariadbServer

ORDERS = Guard(table="orders", name="orders/{id}")
SUSPENDING = AsyncGuard(table="orders", name="orders/{id}")
UPDATE = text("UPDATE orders SET qty = qty + 1 WHERE id = 42")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    qty: Mapped[int]


@pytest.fixture
def database(mariadb_server: MariadbServer) -> str:
    return mariadb_server.create_database()


@pytest.fixture
def db(mariadb_server: MariadbServer, database: str) -> Iterator[Any]:
    connection = pymysql.connect(
        host=mariadb_server.host, port=mariadb_server.port, user="root", database=database, autocommit=True
    )
    with connection:
        query(connection, "CREATE TABLE orders (id int PRIMARY KEY, qty int NOT NULL) ENGINE = InnoDB")
        query(connection, "INSERT INTO orders VALUES (42, 0), (43, 0)")
        ORDERS.install(connection, mode="require")
        yield connection


def query(db: Any, sql: str) -> Any:
    with db.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()


def qty(db: Any, row: int = 42) -> Any:
    return query(db, f"SELECT qty FROM orders WHERE id = {row}")[0][0]


def url(server: MariadbServer, database: str, driver: str) -> str:
    return f"mysql+{driver}://root@{server.host}:{server.port}/{database}"


@pytest.fixture(params=["pymysql", "mysqldb"])
def engine(request: pytest.FixtureRequest, mariadb_server: MariadbServer, database: str) -> Iterator[Any]:
    """With one connection, so that the next user of the pool gets the one that the guard has used."""
    made = create_engine(
        url(mariadb_server, database, request.param), poolclass=QueuePool, pool_size=1, max_overflow=0
    )
    yield made
    made.dispose()


def is_clean(engine: Any) -> None:
    """The next user of the pooled connection has no stamp."""
    with engine.connect() as connection, pytest.raises(InternalError, match="carries no stamp"):
        connection.execute(UPDATE)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT @fenced_lines, @fenced_ok")).all() == [(None, None)]


def test_a_session(engine: Any, db: Any) -> None:
    with Session(engine) as session:
        for seq in (1, 2):
            with ORDERS.transaction(session, stamp(5, seq)):
                order = session.get_one(Order, 42)
                order.qty += 1  # flushed at the end of the block
    assert qty(db) == 2
    is_clean(engine)
    with Session(engine) as session:
        with pytest.raises(Uncovered, match="orders/43"), ORDERS.transaction(session, stamp(5, 3)):
            session.get_one(Order, 43).qty = 9
        assert session.get_one(Order, 43).qty == 0
        session.rollback()
        with pytest.raises(StaleToken, match="4 is stale: 5"), ORDERS.transaction(session, stamp(4)):
            raise AssertionError("the block must not run")
    is_clean(engine)


def test_a_connection(engine: Any, db: Any) -> None:
    with engine.connect() as connection:
        with ORDERS.transaction(connection, stamp(5)):
            connection.execute(UPDATE)
        with pytest.raises(Uncovered), ORDERS.transaction(connection, stamp(5)):
            connection.execute(text("UPDATE orders SET qty = 9 WHERE id = 43"))
        connection.execute(text("SELECT 1"))
        with pytest.raises(Misuse, match="in a transaction"), ORDERS.transaction(connection, stamp(5)):
            raise AssertionError("the block must not run")
    assert (qty(db), qty(db, 43)) == (1, 0)
    is_clean(engine)


def test_a_block_that_ends_its_transaction(engine: Any, db: Any) -> None:
    for ending in ("commit", "rollback"):
        with (
            Session(engine) as session,
            pytest.raises(Misuse, match="ended inside the guarded block"),
            ORDERS.transaction(session, stamp(5)),
        ):
            getattr(session, ending)()
        is_clean(engine)


def test_other_errors_are_the_programs_own(engine: Any, db: Any) -> None:
    with Session(engine) as session:
        with pytest.raises(IntegrityError), ORDERS.transaction(session, stamp(5)):
            session.add(Order(id=43, qty=1))
        session.rollback()
        with pytest.raises(ZeroDivisionError), ORDERS.transaction(session, stamp(5)):
            session.execute(UPDATE)
            raise ZeroDivisionError
    assert qty(db) == 0
    is_clean(engine)


def test_announcing_in_a_transaction_of_the_program(engine: Any, db: Any) -> None:
    """A stamp that nobody has cleared is forgotten when the connection returns to its pool."""
    with Session(engine) as session, session.begin():
        with ORDERS.announce_within(session, stamp(5)):
            session.execute(UPDATE)
        with pytest.raises(DBAPIError, match="carries no stamp"):
            session.execute(UPDATE)
    assert qty(db) == 1
    with Session(engine) as session, session.begin():
        ORDERS.announce_within(session, stamp(5))
        session.execute(UPDATE)
    assert qty(db) == 2
    is_clean(engine)


def test_a_connection_that_commits_every_statement(engine: Any, db: Any) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(Misuse, match="AUTOCOMMIT"),
        ORDERS.transaction(connection, stamp(5)),
    ):
        raise AssertionError("the block must not run")


def test_installing_and_changing_modes(engine: Any, db: Any) -> None:
    with engine.connect() as connection:
        ORDERS.uninstall(connection)
        ORDERS.install(connection, mode="enforce")
        ORDERS.set_mode(connection, "require")
        ORDERS.announce(connection, stamp(5))
        found = ORDERS.peek(connection, "orders/42")
        assert found is not None and found.token == 5
    with pytest.raises(pymysql.InternalError, match="carries no stamp"):
        query(db, "UPDATE orders SET qty = 1 WHERE id = 42")


def test_asyncio(mariadb_server: MariadbServer, database: str, db: Any) -> None:
    async def story() -> None:
        engine = create_async_engine(url(mariadb_server, database, "asyncmy"), pool_size=1, max_overflow=0)
        async with AsyncSession(engine) as session:
            for seq in (1, 2):
                async with SUSPENDING.transaction(session, stamp(5, seq)):
                    (await session.get_one(Order, 42)).qty += 1
            with pytest.raises(Uncovered, match="orders/43"):
                async with SUSPENDING.transaction(session, stamp(5, 3)):
                    (await session.get_one(Order, 43)).qty = 9
            with pytest.raises(StaleToken):
                async with SUSPENDING.transaction(session, stamp(4)):
                    raise AssertionError("the block must not run")
        async with engine.connect() as connection:
            async with SUSPENDING.transaction(connection, stamp(6)):
                await connection.execute(UPDATE)
            with pytest.raises(InternalError, match="carries no stamp"):
                await connection.execute(UPDATE)
            await connection.rollback()
            await connection.execute(text("START TRANSACTION"))
            await SUSPENDING.announce_within(connection, stamp(6))
        async with engine.connect() as connection:
            assert (await connection.execute(text("SELECT @fenced_lines"))).all() == [(None,)]
        await engine.dispose()

    asyncio.run(story())
    assert (qty(db), qty(db, 43)) == (3, 0)
