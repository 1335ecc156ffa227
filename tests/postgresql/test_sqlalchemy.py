"""The program's own SQLAlchemy session or connection, in both colours and over both drivers."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import fenced
from fenced import sql
from fenced.values.model import Stamp
from tests.conftest import NewDatabase

KINDS = (
    "Session-psycopg",
    "Connection-psycopg",
    "AsyncSession-psycopg",
    "AsyncSession-asyncpg",
    "AsyncConnection-asyncpg",
)
SESSIONS = tuple(kind for kind in KINDS if "Session" in kind)
WRITE = "UPDATE orders SET qty = qty - 1 WHERE id = {}"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    qty: Mapped[int]


def stamp(token: int, *names: str) -> Stamp:
    return Stamp("ab" * 8, names or ("orders/42",), token, 1, f"{token:032x}")


async def now(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def entered(block: Any) -> AsyncIterator[Any]:
    """A block of either colour."""
    if hasattr(block, "__aenter__"):
        async with block as inner:
            yield inner
    else:
        with block as inner:
            yield inner


class GuardedDatabase:
    """A target of one kind, its guard, and an onlooker's connection."""

    def __init__(self, url: str, kind: str, **options: Any) -> None:
        self.kind, _, driver = kind.partition("-")
        address = url.replace("postgresql:", f"postgresql+{driver}:")
        suspends = self.kind.startswith("Async")
        self.engine: Any = (create_async_engine if suspends else sa.create_engine)(address, **options)
        self.guard: Any = (sql.AsyncGuard if suspends else sql.Guard)(table="orders", name="orders/{id}")
        self.onlooker = psycopg.connect(url, autocommit=True)

    @property
    def events(self) -> sa.Engine:
        return self.engine.sync_engine if isinstance(self.engine, AsyncEngine) else self.engine

    @asynccontextmanager
    async def target(self, **options: Any) -> AsyncIterator[Any]:
        makers = {"Session": Session, "AsyncSession": AsyncSession}
        made = makers[self.kind](self.engine, **options) if self.kind in makers else self.engine.connect()
        async with entered(made) as target:
            yield target

    def qty(self, row: int = 42) -> int:
        found = self.onlooker.execute("SELECT qty FROM orders WHERE id = %s", (row,)).fetchone()
        assert found is not None
        return int(found[0])

    def raise_mark(self, token: int) -> None:
        self.onlooker.execute("SELECT fenced_guard.announce_alone(%s)", (str(stamp(token)),))

    async def write(self, target: Any, row: int = 42) -> None:
        await now(target.execute(sa.text(WRITE.format(row))))


def prepare(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TABLE orders (id int PRIMARY KEY, qty int NOT NULL CHECK (qty >= 0))")
    connection.execute("INSERT INTO orders VALUES (42, 10), (43, 10)")
    sql.Guard(table="orders", name="orders/{id}").install(connection, mode="enforce")


@pytest.fixture
def url(new_database: NewDatabase) -> str:
    return new_database(prepare)


@asynccontextmanager
async def guarded(url: str, kind: str, **options: Any) -> AsyncIterator[GuardedDatabase]:
    db = GuardedDatabase(url, kind, **options)
    try:
        yield db
    finally:
        db.onlooker.close()
        await now(db.engine.dispose())


@pytest.mark.parametrize("kind", KINDS)
async def test_an_older_transaction_is_ended(url: str, kind: str) -> None:
    async with guarded(url, kind) as db:
        db.onlooker.execute("UPDATE fenced_guard.trust SET patience = 0.2")
        with psycopg.connect(url) as old:
            old.execute("SELECT fenced_guard.announce(%s)", (str(stamp(5)),))
            async with db.target() as target, entered(db.guard.transaction(target, stamp(6))) as tx:
                await db.write(tx)
            with pytest.raises(psycopg.OperationalError):
                old.execute("SELECT 1")
        assert db.qty() == 9


@pytest.mark.parametrize("kind", KINDS)
async def test_a_block_is_announced_by_one_statement_more_and_committed(url: str, kind: str) -> None:
    """And by one text for all leases, or a driver that prepares would spend a round trip on each."""
    async with guarded(url, kind) as db:
        sent: list[str] = []
        sa.event.listen(db.events, "before_cursor_execute", lambda *seen: sent.append(seen[2]))
        sa.event.listen(db.events, "commit", lambda _: sent.append("COMMIT"))
        async with db.target() as target:
            for token in range(5, 13):
                sent.clear()
                async with entered(db.guard.transaction(target, stamp(token))) as tx:
                    assert tx is target
                    await db.write(tx)
                announce, *plain = sent
                assert "fenced_guard.announce(" in announce and plain == [WRITE.format(42), "COMMIT"]
            async with entered(db.guard.transaction(target, stamp(12))) as tx:
                prepared = "SELECT 1 FROM pg_prepared_statements WHERE statement LIKE 'SELECT fenced%'"
                assert len((await now(tx.execute(sa.text(prepared)))).fetchall()) == 1
        assert db.qty() == 2
        # One listener, whatever the number of blocks.
        assert len(db.events.dialect.dispatch.handle_error) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refusal_leaves_as_itself_and_the_target_can_be_used_again(url: str, kind: str) -> None:
    async with guarded(url, kind) as db:
        db.raise_mark(7)
        async with db.target() as target:
            with pytest.raises(fenced.StaleToken) as stale:
                async with entered(db.guard.transaction(target, stamp(6))):
                    raise AssertionError
            assert isinstance(stale.value.__cause__, DBAPIError) and stale.value.mark == 7
            with pytest.raises(fenced.Uncovered) as uncovered:
                async with entered(db.guard.transaction(target, stamp(7))):
                    await db.write(target)
                    await db.write(target, 43)
            assert isinstance(uncovered.value.__cause__, DBAPIError) and uncovered.value.name == "orders/43"
            with pytest.raises(IntegrityError):  # the program's own
                async with entered(db.guard.transaction(target, stamp(7))):
                    await now(target.execute(sa.text("UPDATE orders SET qty = -1 WHERE id = 42")))
            async with entered(db.guard.transaction(target, stamp(7))):
                await db.write(target)
        assert (db.qty(42), db.qty(43)) == (9, 10)
        recorded = db.onlooker.execute("SELECT verdict FROM fenced_guard.record ORDER BY id").fetchall()
        assert recorded == [("stale",), ("uncovered",)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_swallowed_error_is_not_taken_for_a_commit(url: str, kind: str) -> None:
    async with guarded(url, kind) as db:
        async with db.target() as target:
            with pytest.raises(fenced.Misuse, match="nothing was committed"):
                async with entered(db.guard.transaction(target, stamp(5))):
                    await db.write(target)
                    with pytest.raises(DBAPIError):
                        await now(target.execute(sa.text("SELECT 1/0")))
            async with entered(db.guard.transaction(target, stamp(5))):
                await db.write(target)
                with pytest.raises(DBAPIError):  # undone by its savepoint: this one is a commit
                    async with entered(await now(target.begin_nested())):
                        await now(target.execute(sa.text("SELECT 1/0")))
        assert db.qty() == 9


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refusal_at_commit_is_typed(url: str, kind: str) -> None:
    async with guarded(url, kind) as db:
        db.onlooker.execute(
            "CREATE TABLE note (id int); CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$BEGIN {WRITE.format(43)}; RETURN NULL; END$$; CREATE CONSTRAINT TRIGGER late AFTER INSERT "
            "ON note DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late()"
        )
        async with db.target() as target:
            with pytest.raises(fenced.Uncovered):
                async with entered(db.guard.transaction(target, stamp(5))):
                    await db.write(target)
                    await now(target.execute(sa.text("INSERT INTO note VALUES (1)")))
            async with entered(db.guard.transaction(target, stamp(5))):
                await db.write(target)
        assert (db.qty(42), db.qty(43)) == (9, 10)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_begun_transaction_is_announced_on(url: str, kind: str) -> None:
    async with guarded(url, kind) as db:
        async with db.target() as target:
            await now(target.begin())
            with pytest.raises(fenced.Misuse, match="announce_within"):
                async with entered(db.guard.transaction(target, stamp(5))):
                    raise AssertionError
            async with entered(await now(db.guard.announce_within(target, stamp(5)))):
                await db.write(target)
            await now(target.commit())
            with pytest.raises(fenced.Misuse, match="ended inside"):
                async with entered(db.guard.transaction(target, stamp(5))):
                    await now(target.commit())
                    await db.write(target)  # begins another one, which carries no stamp
        assert db.qty() == 9


@pytest.mark.parametrize("kind", KINDS)
async def test_a_newer_commit_during_the_announcement_repeats_it(url: str, kind: str) -> None:
    """The announcement waits for another holder's, meets its commit (40001), and goes on: on its own first, then
    in the transaction, which sees what that holder wrote."""
    async with guarded(url, kind, isolation_level="REPEATABLE READ") as db:
        db.raise_mark(4)
        other = psycopg.connect(url)
        other.execute("SELECT fenced_guard.announce(%s)", (str(stamp(5)),))
        other.execute(WRITE.format(42))

        def commit() -> None:
            waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
            deadline = time.monotonic() + 90
            while not db.onlooker.execute(waiting).fetchone() and time.monotonic() < deadline:
                time.sleep(0.01)
            other.commit()
            other.close()

        committing = threading.Thread(target=commit)
        committing.start()
        async with db.target() as target:
            async with entered(db.guard.transaction(target, stamp(6))):
                found = await now(target.execute(sa.text("SELECT qty FROM orders WHERE id = 42")))
                assert found.scalar() == 9
                await db.write(target)
            assert db.qty() == 8
        committing.join()


@pytest.mark.parametrize("kind", SESSIONS)
async def test_the_orm_flushes_at_the_end_and_reads_nothing_from_before(url: str, kind: str) -> None:
    async with guarded(url, kind) as db:
        async with db.target(expire_on_commit=False, autobegin=False) as session:
            await now(session.begin())
            order = await now(session.get(Order, 42))
            await now(session.commit())
            db.raise_mark(5)
            db.onlooker.execute(WRITE.format(42))
            async with entered(db.guard.transaction(session, stamp(6))):
                fresh = await now(session.get(Order, 42))
                assert fresh is order and order.qty == 9
                order.qty -= 1
            assert db.qty() == 8
            with pytest.raises(fenced.Uncovered):  # by the flush
                async with entered(db.guard.transaction(session, stamp(6))):
                    session.add(Order(id=44, qty=1))
            async with entered(db.guard.transaction(session, stamp(6))):
                (await now(session.get(Order, 42))).qty -= 1
        assert db.qty() == 7


@pytest.mark.parametrize("kind", SESSIONS)
async def test_the_errors_of_hooks_and_a_lost_connection(
    url: str, kind: str, lost_lease: fenced.Lease
) -> None:
    async with guarded(url, kind) as db:
        async with db.target() as session:
            inner = getattr(session, "sync_session", session)

            def fail(_: object) -> None:
                raise KeyError("mine")

            def kill(connection: sa.Connection) -> None:
                pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
                db.onlooker.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))

            for hook in ("before_commit", "after_commit"):
                sa.event.listen(inner, hook, fail, once=True)
                with pytest.raises(KeyError, match="mine"):
                    async with entered(db.guard.transaction(session, stamp(5))):
                        await db.write(session)
            assert db.qty() == 9  # the second one was committed when its hook failed
            await now(session.close())  # as SQLAlchemy wants it after such a hook

            async def killed(fence: object) -> None:
                async with entered(db.guard.transaction(session, fence)):
                    session.add(Order(id=44, qty=1))
                    if inner is session:
                        kill(session.connection())
                    else:
                        await session.run_sync(lambda plain: kill(plain.connection()))

            with pytest.raises(DBAPIError):  # nothing can have been committed: the program's own error
                await killed(stamp(5))
            sa.event.listen(db.events, "commit", kill, once=True)
            with pytest.raises(fenced.Indeterminate):
                async with entered(db.guard.transaction(session, stamp(5))):
                    await db.write(session)
            async with entered(db.guard.transaction(session, stamp(5))):
                await db.write(session)
            db.onlooker.execute("SELECT fenced_guard.adopt(%s)", (lost_lease.realm,))
            with pytest.raises(fenced.LeaseLost, match="max_hold") as caught:
                await killed(lost_lease)
            assert isinstance(caught.value.__cause__, DBAPIError)
        assert db.qty() == 8


@pytest.mark.parametrize("kind", ["Session-psycopg", "AsyncConnection-asyncpg"])
async def test_autocommit_is_refused(url: str, kind: str) -> None:
    async with guarded(url, kind, isolation_level="AUTOCOMMIT") as db, db.target() as target:
        with pytest.raises(fenced.Misuse, match="AUTOCOMMIT"):
            async with entered(db.guard.transaction(target, stamp(5))):
                raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
async def test_the_guard_is_installed_and_looked_at_through_sqlalchemy(
    postgresql_url: str, kind: str
) -> None:
    async with guarded(postgresql_url, kind) as db:
        db.onlooker.execute("CREATE TABLE orders (id int PRIMARY KEY, qty int)")
        db.onlooker.execute("INSERT INTO orders VALUES (42, 10)")
        async with db.target() as target:
            await now(db.guard.install(target, mode="require"))
            with pytest.raises(psycopg.DatabaseError, match="no stamp"):
                db.onlooker.execute(WRITE.format(42))
            async with entered(db.guard.transaction(target, stamp(5))):
                await db.write(target)
            assert (await now(db.guard.peek(target, "orders/42"))).token == 5
            await now(db.guard.uninstall(target))
        db.onlooker.execute(WRITE.format(42))
        assert db.qty() == 8


def test_a_session_bound_to_a_connection_is_in_its_transaction(url: str) -> None:
    """What such a session commits inside another transaction is not committed."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    guard = sql.Guard(table="orders", name="orders/{id}")
    with engine.connect() as connection, Session(connection) as session:
        with connection.begin(), pytest.raises(fenced.Misuse), guard.transaction(session, stamp(5)):
            raise AssertionError
        assert guard.peek(session, "orders/42") is None and not connection.in_transaction()
        with guard.transaction(session, stamp(5)):
            session.get_one(Order, 42).qty -= 1
        with engine.connect() as other:
            assert other.scalar(sa.select(Order.qty).where(Order.id == 42)) == 9
    engine.dispose()


def test_scoped_sessions_are_their_sessions(url: str) -> None:
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    scoped = scoped_session(sessionmaker(engine))
    guard = sql.Guard(table="orders", name="orders/{id}")
    with guard.transaction(scoped, stamp(5)) as tx:
        assert tx is scoped
        tx.get_one(Order, 42).qty -= 1
    assert scoped.get_one(Order, 42).qty == 9
    scoped.remove()
    engine.dispose()


async def test_async_scoped_sessions_are_their_sessions(url: str) -> None:
    async with guarded(url, "AsyncSession-asyncpg") as db:
        scoped = async_scoped_session(async_sessionmaker(db.engine), scopefunc=asyncio.current_task)
        async with db.guard.transaction(scoped, stamp(5)) as tx:
            assert tx is scoped
            await db.write(tx)
        assert db.qty() == 9
        await scoped.remove()


def test_another_database_is_unsupported() -> None:
    guard = sql.Guard(table="orders", name="orders/{id}")
    with Session(sa.create_engine("sqlite://")) as session, pytest.raises(fenced.Unsupported, match="sqlite"):
        guard.transaction(session, stamp(5))
    with Session() as session, pytest.raises(fenced.Misuse, match="no single bind"):
        guard.transaction(session, stamp(5))


def test_nobody_loads_sqlalchemy_or_django_without_them() -> None:
    script = "import sys, fenced.sql, fenced.stores.postgresql.guard.tables; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"sqlalchemy", "django", "asyncpg", "psycopg"} & set(done.stdout.split())
