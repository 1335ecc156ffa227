"""The guard on the program's own PostgreSQL connections, whichever driver they are of."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import asyncpg
import psycopg
import pytest

import fenced
from fenced.drills.relay import Fault, Proxy
from fenced.errors import Misconfigured, Misuse
from fenced.sql import AsyncGuard, Guard, refusal
from fenced.testing.kit import stamp
from fenced.values.decision import Mark
from fenced_testkit.servers import PostgresqlServer
from tests.conftest import NewDatabase

Db = psycopg.Connection[tuple[object, ...]]

PLAIN = Guard(table="orders", name="orders/{id}")
SUSPENDING = AsyncGuard(table="orders", name="orders/{id}")
TABLE = """
CREATE TABLE orders (id integer PRIMARY KEY, qty integer, ref text UNIQUE DEFERRABLE INITIALLY DEFERRED, epoch bigint);
INSERT INTO orders VALUES (42, 0, 'a'), (43, 0, 'b')"""
UPDATE = "UPDATE orders SET qty = qty + 1 WHERE id = 42"


class Writer(Protocol):
    """One connection of the program's own, and the guard on it."""

    connection: Any

    async def run(self, sql: str) -> list[tuple[Any, ...]]: ...
    def transaction(self, fence: Any, *names: str, **options: Any) -> AbstractAsyncContextManager[Any]: ...
    def idle(self) -> bool: ...
    async def close(self) -> None: ...


class Psycopg:
    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    async def run(self, sql: str) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []

    @asynccontextmanager
    async def transaction(self, fence: Any, *names: str, **options: Any) -> AsyncIterator[Any]:
        with PLAIN.transaction(self.connection, fence, *names, **options) as tx:
            assert tx is self.connection
            yield tx

    def idle(self) -> bool:
        return self.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

    async def close(self) -> None:
        self.connection.close()


class AsyncPsycopg:
    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection

    async def run(self, sql: str) -> list[tuple[Any, ...]]:
        cursor = await self.connection.execute(sql.encode())
        return await cursor.fetchall() if cursor.description else []

    def transaction(self, fence: Any, *names: str, **options: Any) -> AbstractAsyncContextManager[Any]:
        return SUSPENDING.transaction(self.connection, fence, *names, **options)

    def idle(self) -> bool:
        return self.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

    async def close(self) -> None:
        await self.connection.close()


class Asyncpg:
    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def run(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await self.connection.fetch(sql)]

    def transaction(self, fence: Any, *names: str, **options: Any) -> AbstractAsyncContextManager[Any]:
        return SUSPENDING.transaction(self.connection, fence, *names, **options)

    def idle(self) -> bool:
        return not self.connection.is_in_transaction()

    async def close(self) -> None:
        self.connection.terminate()


async def connect(driver: str, url: str, isolation: str | None = None) -> Writer:
    kind, _, begins = driver.partition(", ")
    level = psycopg.IsolationLevel[isolation.replace(" ", "_").upper()] if isolation else None
    if kind == "psycopg":
        plain = psycopg.connect(url, autocommit=not begins)
        plain.isolation_level = level
        return Psycopg(plain)
    if kind == "async psycopg":
        suspending = await psycopg.AsyncConnection.connect(url, autocommit=not begins)
        await suspending.set_isolation_level(level)
        return AsyncPsycopg(suspending)
    settings = {"default_transaction_isolation": isolation} if isolation else None
    return Asyncpg(await asyncpg.connect(url, server_settings=settings))


DRIVERS = ["psycopg", "psycopg, begins", "async psycopg", "async psycopg, begins", "asyncpg"]
every_driver = pytest.mark.parametrize("driver", DRIVERS)


def prepare(connection: Db) -> None:
    connection.execute(TABLE.encode())
    PLAIN.install(connection, mode="require")


@pytest.fixture
def postgresql_url(new_database: NewDatabase) -> str:
    return new_database(prepare)


@pytest.fixture
def db(postgresql_url: str) -> Iterator[Db]:
    """An onlooker's connection; what would wait fails, as nobody else runs while it does."""
    with psycopg.connect(postgresql_url, autocommit=True, options="-c lock_timeout=5s") as connection:
        yield connection


def qty(db: Db, row: int = 42) -> object:
    found = db.execute("SELECT qty FROM orders WHERE id = %s", (row,)).fetchone()
    assert found is not None
    return found[0]


@asynccontextmanager
async def writing(driver: str, url: str, isolation: str | None = None) -> AsyncIterator[Writer]:
    writer = await connect(driver, url, isolation)
    try:
        yield writer
    finally:
        await writer.close()


@every_driver
async def test_refusals_are_typed_and_recorded_in_full(db: Db, postgresql_url: str, driver: str) -> None:
    async with writing(driver, postgresql_url) as writer:
        async with writer.transaction(stamp(6)):
            await writer.run(UPDATE)
        with pytest.raises(fenced.StaleToken) as caught:
            async with writer.transaction(stamp(5)):
                raise AssertionError("announcing refuses it")
        error = caught.value
        assert (error.name, error.stamp, error.mark, error.holder) == (
            "orders/42",
            stamp(5),
            6,
            stamp(6).grant,
        )
        assert error.__cause__ is not None and error.__cause__.sqlstate == "ZF001"  # type: ignore[attr-defined]
        assert isinstance(refusal(error.__cause__), fenced.StaleToken)
        with pytest.raises(fenced.Uncovered) as missed:
            async with writer.transaction(stamp(6, 2)):
                await writer.run("UPDATE orders SET qty = 9")
        assert missed.value.name == "orders/43"
        assert writer.idle()
        found = db.execute(
            "SELECT name, stamp, token, verdict, mode FROM fenced_guard.record ORDER BY id"
        ).fetchall()
        assert found == [
            ("orders/42", str(stamp(5)), 6, "stale", "require"),
            ("orders/43", str(stamp(6, 2)), None, "uncovered", "require"),
        ]
        assert qty(db) == 1


@every_driver
async def test_the_programs_own_errors_pass_unchanged(db: Db, postgresql_url: str, driver: str) -> None:
    duplicate = asyncpg.UniqueViolationError if driver == "asyncpg" else psycopg.errors.UniqueViolation
    async with writing(driver, postgresql_url) as writer:
        for error, statement in (
            (duplicate, "INSERT INTO orders VALUES (42, 1)"),
            (duplicate, "UPDATE orders SET ref = 'b' WHERE id = 42"),  # only COMMIT says so
            (ZeroDivisionError, UPDATE),
        ):
            with pytest.raises(error) as caught:
                async with writer.transaction(stamp(5)):
                    await writer.run(statement)
                    if error is ZeroDivisionError:
                        1 / 0  # noqa: B018
            assert caught.type is error and refusal(caught.value) is None
            assert writer.idle()
        assert (qty(db), PLAIN.peek(db, "orders/42")) == (0, None), "what was rolled back announced nothing"


@every_driver
async def test_a_commit_or_swallowed_error_inside_the_block_is_misuse(
    db: Db, postgresql_url: str, driver: str
) -> None:
    """Nothing is claimed: not after an error that was swallowed, nor after a COMMIT or ROLLBACK of one's own."""
    async with writing(driver, postgresql_url) as writer:
        with pytest.raises(Misuse, match="caught its error"):
            async with writer.transaction(stamp(5)):
                with pytest.raises((psycopg.Error, asyncpg.PostgresError)):
                    await writer.run("SELECT nothing")
        assert writer.idle()
        for ending in ("COMMIT", "ROLLBACK"):
            with pytest.raises(Misuse, match="ended inside"):
                async with writer.transaction(stamp(5)):
                    await writer.run(ending)
            assert writer.idle()
        await writer.run("BEGIN")
        with pytest.raises(Misuse, match="already"):
            async with writer.transaction(stamp(5)):
                raise AssertionError
        await writer.run("ROLLBACK")

        async def begins_another() -> None:
            async with writer.transaction(stamp(5)):
                await writer.run("ROLLBACK")
                if "begins" not in driver:
                    await writer.run("BEGIN")
                await writer.run(UPDATE)

        with pytest.raises(fenced.MissingStamp):  # what follows carries no stamp
            await begins_another()
        # There it would be let through, and must not be committed as if announced.
        PLAIN.set_mode(db, "enforce")
        with pytest.raises(Misuse, match="another one began"):
            await begins_another()
        assert (qty(db), writer.idle()) == (0, True)


@pytest.mark.parametrize("driver", ["async psycopg", "async psycopg, begins", "asyncpg"])
async def test_a_cancelled_transaction_leaves_nothing_open(db: Db, postgresql_url: str, driver: str) -> None:
    """Loss of the lease cancels the body by design: whatever hop that hits, the connection is idle and usable."""
    async with writing(driver, postgresql_url) as writer:

        async def guarded(seq: int) -> None:
            async with writer.transaction(stamp(5, seq)):
                await writer.run("UPDATE orders SET qty = -1 WHERE id = 42")
                await writer.run("SELECT pg_sleep(20)")

        for hops in (0, 1, 2, 3, 5, 8, 13, 21, 34):
            task = asyncio.create_task(guarded(hops + 1))
            for _ in range(hops):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert writer.idle(), hops
        task = asyncio.create_task(guarded(99))
        asleep = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"
        while not task.done() and not db.execute(asleep).fetchall():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with PLAIN.transaction(db, stamp(6)) as tx:  # the successor is not kept waiting
            tx.execute(UPDATE)
        async with writer.transaction(stamp(6, 2)):
            await writer.run(UPDATE)
        assert qty(db) == 2


@every_driver
async def test_a_connection_that_is_lost(
    db: Db, postgresql_url: str, postgresql_server: PostgresqlServer, driver: str, lost_lease: fenced.Lease
) -> None:
    """Before COMMIT nothing happened. While it commits nobody knows: it says so, and here it has happened. A holder
    whose lease is over as well is told that."""
    gone = (psycopg.OperationalError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)
    killed = (*gone, psycopg.errors.AdminShutdown, asyncpg.AdminShutdownError)

    async def kill(writer: Writer) -> None:
        ((pid,),) = await writer.run("SELECT pg_backend_pid()")
        db.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    for late in (False, True):
        async with writing(driver, postgresql_url) as writer:
            with pytest.raises((fenced.Unavailable, fenced.Indeterminate) if late else killed):
                async with writer.transaction(stamp(5)):
                    await writer.run(UPDATE)
                    await kill(writer)
                    if not late:
                        await writer.run(UPDATE)
    assert qty(db) == 0

    with Proxy(postgresql_server.host, postgresql_server.port) as proxy:
        behind = postgresql_url.replace(f":{postgresql_server.port}/", f":{proxy.port}/")
        async with writing(driver, f"{behind}?sslmode=disable") as writer:
            trigger = proxy.on(b"COMMIT", Fault.LOSE_REPLY)
            with pytest.raises(fenced.Indeterminate):
                async with writer.transaction(stamp(5)):
                    await writer.run(UPDATE)
            trigger.wait()
    assert qty(db) == 1

    PLAIN.adopt(db, lost_lease.realm)
    async with writing(driver, postgresql_url) as writer:
        with pytest.raises(fenced.LeaseLost, match="nothing of the transaction was committed") as caught:
            async with writer.transaction(lost_lease):
                await writer.run("INSERT INTO orders VALUES (44, 1)")
                await kill(writer)
                await writer.run(UPDATE)
    assert caught.value.reason == "max_hold" and isinstance(caught.value.__cause__, killed)
    async with writing(driver, postgresql_url) as writer:
        with pytest.raises(FileNotFoundError):  # the program's own error, although the lease is over
            async with writer.transaction(lost_lease):
                raise FileNotFoundError
    assert db.execute("SELECT count(*) FROM orders WHERE id = 44").fetchone() == (0,)


@every_driver
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_the_connections_own_isolation(
    db: Db, postgresql_url: str, driver: str, isolation: str
) -> None:
    """It is kept, and what the last holder committed is seen, whichever token comes."""
    async with writing(driver, postgresql_url, isolation) as writer:
        for token in (5, 5, 6):
            async with writer.transaction(stamp(token)):
                assert await writer.run("SHOW transaction_isolation") == [(isolation,)]
                await writer.run(UPDATE)
        with PLAIN.transaction(db, stamp(7)) as tx:
            tx.execute(UPDATE)
        with pytest.raises(fenced.StaleToken):
            async with writer.transaction(stamp(6, 2)):
                raise AssertionError
        with pytest.raises(fenced.Conflict) as caught:
            async with writer.transaction(stamp(8)):
                await writer.run("SELECT 1")
                db.execute("BEGIN")
                db.execute("SET LOCAL session_replication_role = replica")  # somebody who goes round
                db.execute(UPDATE)
                db.execute("COMMIT")
                await writer.run(UPDATE)
        assert caught.value.retry == "transaction"
        assert (qty(db), writer.idle()) == (5, True)


@every_driver
async def test_a_part_of_the_lease(db: Db, postgresql_url: str, driver: str) -> None:
    """Only the names that are given are locked, and only they can be written."""
    async with writing(driver, postgresql_url) as writer:
        both = stamp(5, 1, "orders/42", "orders/43")
        PLAIN.adopt(db, both.realm)  # the first announcement of all would be waited for
        async with writer.transaction(both, "orders/42"):
            await writer.run(UPDATE)
            with PLAIN.transaction(db, stamp(6, 1, "orders/43")) as tx:
                tx.execute("UPDATE orders SET qty = 6 WHERE id = 43")
        with pytest.raises(fenced.StaleToken):
            async with writer.transaction(both, "orders/43"):
                raise AssertionError
        with pytest.raises(fenced.Uncovered, match="not announced in this transaction; announce it too"):
            async with writer.transaction(stamp(7, 1, "orders/42", "orders/43"), "orders/42"):
                await writer.run("UPDATE orders SET qty = 7 WHERE id = 43")
        with pytest.raises(fenced.Uncovered):
            async with writer.transaction(both, "orders/44"):
                raise AssertionError
        assert (qty(db, 42), qty(db, 43), writer.idle()) == (1, 6, True)


@pytest.mark.parametrize("driver", ["psycopg", "async psycopg", "asyncpg"])
async def test_in_the_programs_own_transaction(db: Db, postgresql_url: str, driver: str) -> None:
    """Inner stamps are taken out, and no others; an error inside leaves as it is."""
    async with writing(driver, postgresql_url) as writer:
        guard: Any = PLAIN if driver == "psycopg" else SUSPENDING

        async def announced(fence: fenced.Stamp) -> Any:
            made = guard.announce_within(writer.connection, fence)
            return made if driver == "psycopg" else await made

        async def clear(made: Any) -> None:
            done = made.clear()
            await done if done is not None else None

        with pytest.raises(Misuse, match="begin"):
            await announced(stamp(5))
        with pytest.raises(fenced.Uncovered) as caught:
            async with writer.transaction(stamp(5)):
                inner = await announced(stamp(6, 1, "orders/43"))
                await writer.run("UPDATE orders SET qty = 1")
                await clear(inner)
                await writer.run(UPDATE)
                await clear(await announced(stamp(5, 2)))
                await writer.run(UPDATE)
                await writer.run("UPDATE orders SET qty = 1")
        assert caught.value.name == "orders/43"
        await writer.run("BEGIN")
        await clear(await announced(stamp(5)))
        with pytest.raises((psycopg.DatabaseError, asyncpg.PostgresError), match="no stamp"):
            await writer.run(UPDATE)
        await writer.run("ROLLBACK")
        await writer.run("BEGIN")
        outer = await announced(stamp(7))
        with pytest.raises((psycopg.errors.UndefinedColumn, asyncpg.UndefinedColumnError)):
            await writer.run("SELECT nothing")
        await clear(outer)
        await writer.run("ROLLBACK")
        await writer.run("BEGIN")
        await announced(stamp(7))
        await writer.run(UPDATE)
        await writer.run("COMMIT")
        await writer.run("BEGIN")
        with pytest.raises(fenced.StaleToken):
            await announced(stamp(6, 2))
        await writer.run("ROLLBACK")
        assert qty(db) == 1


async def test_announcing_alone_and_looking_on(db: Db, postgresql_url: str) -> None:
    guard = Guard(table="orders", name="orders/{id}")
    guard.announce(db, stamp(6, 0))
    with pytest.raises(fenced.StaleToken):
        guard.announce(db, stamp(5, 0))
    mark = guard.peek(db, "orders/42", at_least=6)
    assert mark is not None and (mark.token, mark.grant) == (6, stamp(6).grant)
    with pytest.raises(fenced.Contended):
        guard.peek(db, "orders/42", at_least=7)
    assert guard.peek(db, "orders/7") is None
    with pytest.raises(Misuse, match="in a transaction already"), db.transaction():
        guard.announce(db, stamp(6, 0))
    with psycopg.connect(postgresql_url) as manual:  # it begins by itself: announced, committed, idle
        guard.announce(manual, stamp(6, 0))
        assert manual.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    async with writing("asyncpg", postgresql_url) as writer:
        suspending = AsyncGuard(table="orders", name="orders/{id}")
        await suspending.announce(writer.connection, stamp(7, 0))
        assert (await suspending.peek(writer.connection, "orders/42", at_least=7)) is not None


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_clause(db: Db, postgresql_url: str, driver: str) -> None:
    """Pattern A: the token in the program's own UPDATE. "0 rows" is told apart: stale, or no such row."""
    PLAIN.uninstall(db)
    async with writing(driver, postgresql_url) as writer:

        async def update(token: int, row: int) -> bool:
            if driver == "psycopg":
                plain = PLAIN.clause(writer.connection, stamp(token))
                text = f"UPDATE orders SET qty = qty + 1, {plain.assign} WHERE id = %s AND {plain.where}"
                done = writer.connection.execute(text, (row,))
                return plain.admitted(done.rowcount, "id = %s", (row,))
            clause = SUSPENDING.clause(writer.connection, stamp(token))
            text = f"UPDATE orders SET qty = qty + 1, {clause.assign} WHERE id = $1 AND {clause.where}"
            tag = await writer.connection.execute(text, row)
            return await clause.admitted(int(tag.split()[1]), "id = $1", (row,))

        assert await update(5, 42)
        assert await update(5, 42)
        assert await update(6, 42)
        with pytest.raises(fenced.StaleToken):
            await update(5, 42)
        assert await update(5, 1000) is False
        assert qty(db) == 3


# With real leases, of the authority in the same database.


# proves guard postgresql: bounded-pause
def test_a_holder_that_stops_inside_its_transaction_is_ended_by_its_successor(
    db: Db, postgresql_url: str
) -> None:
    db.execute("UPDATE fenced_guard.trust SET patience = 0.2")
    zombie, successor = fenced.Client(postgresql_url), fenced.Client(postgresql_url)
    lease = zombie.acquire("orders/42", ttl=1)
    with (
        psycopg.connect(postgresql_url, autocommit=True) as held,
        pytest.raises((fenced.Unavailable, fenced.Indeterminate)),
        PLAIN.transaction(held, lease) as tx,
    ):
        tx.execute(UPDATE)
        zombie._engine.keeper.drop(lease._grant.secret)  # a paused process renews nothing, and sends nothing
        with successor.hold("orders/42", ttl=10) as newer, PLAIN.transaction(db, newer) as mine:
            mine.execute("UPDATE orders SET qty = 10 WHERE id = 42")
    assert qty(db) == 10
    zombie.close()
    successor.close()


@every_driver
async def test_an_older_transaction_is_ended_through_every_driver(
    db: Db, postgresql_url: str, driver: str
) -> None:
    db.execute("UPDATE fenced_guard.trust SET patience = 0.2")
    async with writing(driver, postgresql_url) as writer:
        async with writer.transaction(stamp(5)):
            await writer.run(UPDATE)
        db.execute("BEGIN")
        PLAIN.announce_within(db, stamp(5, 2))
        async with writer.transaction(stamp(6)):
            await writer.run(UPDATE)
        with pytest.raises(psycopg.OperationalError):
            db.execute(UPDATE)
        assert await writer.run("SELECT qty FROM orders WHERE id = 42") == [(2,)]


def test_still_held(db: Db, postgresql_url: str) -> None:
    """Asked of the authority in the transaction itself; renewals go on meanwhile."""
    with (
        pytest.raises(Misconfigured, match="same database"),
        PLAIN.transaction(db, stamp(5), still_held=True),
    ):
        pass
    with fenced.Client(postgresql_url) as client:
        lease = client.acquire("orders/42", ttl=0.6)
        with PLAIN.transaction(db, lease, still_held=True) as tx:
            tx.execute(UPDATE)
            for _ in range(5):
                tx.execute("SELECT pg_sleep(0.25)")  # twice its ttl; renewed meanwhile
        lease.check()
        stamped = lease.next_stamp()
        lease.release()
        with pytest.raises(fenced.LeaseLost), PLAIN.transaction(db, stamped, still_held=True):
            pass
        with PLAIN.transaction(
            db, stamped
        ) as tx:  # over, and nobody has come since: the fence alone admits it
            tx.execute(UPDATE)
    assert qty(db) == 2


# What the program has set on its connection.

ODD = "orders/gr\u00f6\u00dfe \u2713 \U0001f512"


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "EUC_JP"])
def test_a_refusal_arrives_in_every_encoding(postgresql_url: str, encoding: str) -> None:
    """A name that the client's encoding cannot carry: the server sent an error about that, and it was Unavailable."""
    guard, suspending = Guard(table="t", name="{name}"), AsyncGuard(table="t", name="{name}")
    late, update = stamp(5, 1, ODD), "UPDATE t SET name = name"

    async def on_asyncpg() -> tuple[Any, ...]:
        connection = await asyncpg.connect(postgresql_url, server_settings={"client_encoding": encoding})
        try:
            with pytest.raises(fenced.StaleToken) as stale:
                async with suspending.transaction(connection, late):
                    raise AssertionError("announced")
            with pytest.raises(asyncpg.PostgresError) as unstamped:
                await connection.execute(update)
            return stale.value, unstamped.value, await suspending.peek(connection, ODD)
        finally:
            await connection.close()

    def on_psycopg() -> tuple[Any, ...]:
        with psycopg.connect(postgresql_url, autocommit=True, client_encoding=encoding) as connection:
            with pytest.raises(fenced.StaleToken) as stale, guard.transaction(connection, late):
                raise AssertionError("announced")
            with pytest.raises(psycopg.DatabaseError) as unstamped:
                connection.execute(update.encode())
            return stale.value, unstamped.value, guard.peek(connection, ODD)

    with psycopg.connect(postgresql_url, autocommit=True) as db:
        db.execute("CREATE TABLE t (name text PRIMARY KEY)")
        guard.install(db, mode="require")
        with guard.transaction(db, stamp(6, 1, ODD)) as tx:
            tx.execute("INSERT INTO t VALUES (%s)", [ODD])
        for stale, unstamped, mark in (on_psycopg(), asyncio.run(on_asyncpg())):
            missing = refusal(unstamped)
            assert isinstance(missing, fenced.MissingStamp)
            assert (stale.name, stale.mark, missing.name, mark.token) == (ODD, 6, ODD, 6)
        recorded = db.execute("SELECT name FROM fenced_guard.record WHERE verdict = 'stale'").fetchall()
        assert recorded == [(ODD,)] * 2


@pytest.mark.parametrize("rule", ["retry", "sequenced"])
def test_backslashes_mean_the_same_under_every_setting(new_database: NewDatabase, rule: Any) -> None:
    """`standard_conforming_strings = off`, as some old programs set it: honest leases were refused."""
    guard = Guard(table="orders", name="orders/{ref}", rule=rule)
    loose = "-c standard_conforming_strings=off -c escape_string_warning=off"
    with psycopg.connect(new_database(), autocommit=True, options=loose) as db:
        db.execute(TABLE.encode())
        guard.install(db, mode="require")
        db.execute(guard.script(db, "canary(12.5%)").encode())
        guard.set_mode(db, "require", "orders/a_%*")
        guard.set_mode(db, "require")
        for token, seq in ((5, 1), (5, 2), (6, 1)):
            fence = stamp(token, seq, "orders/a", "orders/b c", "orders/d.e", "orders/f\\g")
            with guard.transaction(db, fence) as tx:
                tx.execute("UPDATE orders SET qty = 1 WHERE ref = 'a'")
        with pytest.raises(fenced.StaleToken), guard.transaction(db, stamp(5, 3, "orders/a")):
            raise AssertionError("announced")
        assert db.execute("SELECT likes FROM fenced_guard.mode WHERE pattern <> '*'").fetchone() == (
            "orders/a\\_\\%%",
        )


@every_driver
async def test_a_rule_that_is_not_installed(db: Db, postgresql_url: str, driver: str) -> None:
    """Misconfigured at the first operation, on every connection, and nothing is written."""
    options: dict[str, Any] = {"table": "orders", "name": "orders/{id}"}
    async with writing(driver, postgresql_url) as writer:
        async with writer.transaction(stamp(6)):
            await writer.run(UPDATE)
        for rule in ("sequenced", "once"):
            plain, suspending = Guard(**options, rule=rule), AsyncGuard(**options, rule=rule)
            with pytest.raises(Misconfigured, match=f"installed with rule retry.* says {rule}"):
                if isinstance(writer, Psycopg):
                    with plain.transaction(writer.connection, stamp(6)):
                        raise AssertionError
                async with suspending.transaction(writer.connection, stamp(6)):
                    raise AssertionError
            assert writer.idle()
        assert qty(db) == 1
    wrong = Guard(**options, rule="once")
    with pytest.raises(Misconfigured, match="says once"):
        wrong.announce(db, stamp(7, 0))
    with pytest.raises(Misconfigured, match="says once"), db.transaction():
        wrong.announce_within(db, stamp(7))
    assert PLAIN.peek(db, "orders/42") == Mark(6, stamp(6).grant, 0)


def test_a_program_that_names_no_rule_gets_the_installed_one(db: Db, postgresql_url: str) -> None:
    """Also if its lease covers names of a guard with rule `retry`, under which a second transaction would go ahead."""
    db.execute("CREATE TABLE payments (id integer PRIMARY KEY, qty integer)")
    Guard(table="payments", name="payments/{id}", rule="sequenced").install(db, mode="require")
    payments = Guard(table="payments", name="payments/{id}")
    names = ("orders/42", "payments/1")
    with PLAIN.transaction(db, stamp(6, 1, *names)) as tx:
        tx.execute(UPDATE)
    with psycopg.connect(postgresql_url, autocommit=True, options="-c lock_timeout=100ms") as other:
        with payments.transaction(db, stamp(6, 2, *names)) as tx:
            with pytest.raises(fenced.Contended), payments.transaction(other, stamp(6, 3, *names)):
                raise AssertionError("one operation of a lease at a time")
            tx.execute("INSERT INTO payments VALUES (1, 1)")
        with pytest.raises(fenced.AlreadyApplied), payments.transaction(other, stamp(6, 2, *names)) as tx:
            tx.execute("UPDATE payments SET qty = 2")
