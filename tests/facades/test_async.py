"""AsyncClient: cancellation at every moment, loss that cancels the body, and nothing done by finalizers."""

import asyncio
import gc
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import aiosqlite
import pytest

import fenced
from fenced.sql import AsyncGuard
from fenced.testing.kit import stamp


def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/leases.db"


async def view(client: fenced.AsyncClient, name: str):  # type: ignore[no-untyped-def]
    await client._engine.standing()
    return await client._authority.observe(name)


async def test_cancelling_a_waiter_leaves_no_place_behind(tmp_path: Path) -> None:
    async with fenced.AsyncClient(url(tmp_path)) as one, fenced.AsyncClient(url(tmp_path)) as two:
        lease = await one.acquire("a")
        waiting = asyncio.create_task(two.acquire("a"))
        while not (await view(one, "a")).waiters:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await view(one, "a")).waiters == ()
        await lease.release()


async def test_cancelling_an_ask_on_its_way_leaves_no_ghost(tmp_path: Path) -> None:
    """Whatever moment the cancellation hits, the name is free afterwards."""
    async with fenced.AsyncClient(url(tmp_path)) as one, fenced.AsyncClient(url(tmp_path)) as two:
        await view(one, "a")
        for step in range(12):
            asking = asyncio.create_task(one.acquire("a"))
            for _ in range(step):
                await asyncio.sleep(0)
            asking.cancel()
            try:
                lease = await asking
            except asyncio.CancelledError:
                pass
            else:
                await lease.release()
            async with two.try_hold("a") as free:
                assert free is not None, step


async def test_cancelling_a_release_still_releases(tmp_path: Path) -> None:
    async with fenced.AsyncClient(url(tmp_path)) as one:
        for step in range(6):
            lease = await one.acquire("a")
            releasing = asyncio.create_task(lease.release())
            for _ in range(step):
                await asyncio.sleep(0)
            releasing.cancel()
            try:
                await releasing
            except asyncio.CancelledError:
                if step == 0:  # it had not begun
                    await lease.release()
            assert lease.state == "released", step
            assert (await view(one, "a")).held_by is None, step


async def test_loss_cancels_the_body(tmp_path: Path) -> None:
    async with fenced.AsyncClient(url(tmp_path)) as one, fenced.AsyncClient(url(tmp_path)) as two:
        reached: list[str] = []
        with pytest.raises(fenced.LeaseLost) as caught:
            async with one.hold("a", ttl=0.6) as lease:
                await view(two, "a")
                await two._authority.force_release("a", lease.token)
                try:
                    await asyncio.sleep(20)
                finally:
                    reached.append(str(lease.state))
        assert caught.value.reason == "revoked"
        assert reached == ["lost"]
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0, "the cancellation was ours, and is spent"
        await asyncio.sleep(0)


@pytest.mark.parametrize("where", ["body", "thread"])
async def test_a_loss_that_the_body_notices_itself(tmp_path: Path, where: str) -> None:
    """check() in the body, or in a worker thread of its own, ends as LeaseLost and nothing else."""

    def spin(lease: fenced.AsyncLease) -> None:
        while True:
            lease.check()

    asyncio.get_running_loop().set_debug(True)
    async with fenced.AsyncClient(url(tmp_path)) as one:
        with pytest.raises(fenced.LeaseLost):
            async with one.hold("a", ttl=0.3, max_hold=0.3) as lease:
                if where == "thread":
                    await asyncio.to_thread(spin, lease)
                else:
                    spin(lease)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        await asyncio.sleep(0.01)


def test_a_client_belongs_to_one_loop(tmp_path: Path) -> None:
    client = fenced.AsyncClient(url(tmp_path))

    async def hold() -> None:
        async with client.hold("a"):
            pass

    asyncio.run(hold())
    with pytest.raises(fenced.Misuse, match="another event loop"):
        asyncio.run(hold())
    client._authority._wakes.close()  # type: ignore[attr-defined]


async def test_an_outer_cancellation_stays_one(tmp_path: Path) -> None:
    async with fenced.AsyncClient(url(tmp_path)) as one:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), one.hold("a", ttl=5):
                await asyncio.sleep(20)
        assert (await view(one, "a")).held_by is None, "released on the way out"


async def test_the_end_of_the_block_raises_when_the_lease_did_not_last(tmp_path: Path) -> None:
    async with fenced.AsyncClient(url(tmp_path)) as one:
        with pytest.raises(fenced.LeaseLost):
            async with one.hold("a", ttl=5) as lease:
                await one._authority.force_release("a", lease.token)
        with pytest.raises(ZeroDivisionError):  # the body's own error comes first
            async with one.hold("a", ttl=5) as lease:
                await one._authority.force_release("a", lease.token)
                1 / 0  # noqa: B018


async def test_an_abandoned_generator_releases_nothing(tmp_path: Path) -> None:
    """What the collector finds is not an orderly end: the lease lapses, nobody gives it back."""
    async with fenced.AsyncClient(url(tmp_path)) as one:

        async def items() -> AsyncIterator[int]:
            async with one.hold("a", ttl=5):
                yield 1
                yield 2

        generator = items()
        assert await anext(generator) == 1
        del generator
        gc.collect()
        await asyncio.sleep(0.05)
        assert (await view(one, "a")).held_by is not None


async def test_decorator_and_several_names(tmp_path: Path) -> None:
    async with fenced.AsyncClient(url(tmp_path)) as one:

        @one.held("job")
        async def job(lease: fenced.AsyncLease, factor: int) -> int:
            assert lease.name == "job"
            return factor * 2

        assert await job(21) == 42
        async with one.hold_all(["b", "a"]) as lease:
            assert lease.names == ("a", "b")
            with pytest.raises(fenced.Misuse):
                _ = lease.name


async def test_a_guard_is_told_at_grant_time(tmp_path: Path) -> None:
    guard = fenced.AsyncValues(f"sqlite:///{tmp_path}/values.db")
    async with fenced.AsyncClient(url(tmp_path)) as one:
        await (await one.acquire("first")).release()
        async with one.hold("a", guards=[guard]) as lease:
            with pytest.raises(fenced.StaleToken):
                await guard.write(lease.next_stamp()._replace(token=lease.token - 1), "a", b"old")
            found = await guard.read(lease, "a")
            version = await guard.write(lease, "a", b"new", expect=found.version)
            assert (await guard.peek("a", at_least=lease.token)).version == version
        newer = stamp(lease.token + 1, 0, "a", realm=lease_realm(lease))
        await guard.announce(newer)
        with pytest.raises(fenced.StaleToken):
            async with one.hold("a", guards=[_Fixed(guard, newer)]):
                raise AssertionError("not reached")
        assert (await view(one, "a")).held_by is None, "refused at the door, and given back"
    await guard.close()


def lease_realm(lease: fenced.AsyncLease) -> str:
    return lease._grant.realm


class _Fixed:
    """A guard that is always announced the same old stamp."""

    def __init__(self, guard: fenced.AsyncValues, newer: fenced.Stamp) -> None:
        self._guard, self._newer = guard, newer

    async def announce(self, fence: object, *names: str) -> None:
        await self._guard.announce(self._newer._replace(token=self._newer.token - 1))


async def test_the_guard_on_aiosqlite(tmp_path: Path) -> None:
    """The same guard in the other colour, on the program's own aiosqlite connection."""
    path = tmp_path / "app.db"
    orders = AsyncGuard(table="orders", name="orders/{id}")
    async with aiosqlite.connect(path, isolation_level=None) as db:
        await db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER, epoch INTEGER)")
        await db.execute("INSERT INTO orders VALUES (42, 0, NULL)")
        await orders.install(db, mode="require")
        with pytest.raises(sqlite3.IntegrityError, match="fenced:missing"):
            await db.execute("UPDATE orders SET qty = 1")
        for seq in (1, 2):
            async with orders.transaction(db, stamp(5, seq)) as tx:
                await tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 42")
        await orders.announce(db, stamp(6, 0))
        with pytest.raises(fenced.StaleToken):
            async with orders.transaction(db, stamp(5, 3)) as tx:
                await tx.execute("UPDATE orders SET qty = 99 WHERE id = 42")
        with pytest.raises(fenced.Uncovered):
            async with orders.transaction(db, stamp(6, 1)) as tx:
                await tx.execute("INSERT INTO orders VALUES (43, 0, NULL)")
        await orders.set_mode(db, "enforce")
        clause = orders.clause(db, stamp(6, 2))
        cursor = await db.execute(f"UPDATE orders SET {clause.assign} WHERE id = 42 AND {clause.where}")
        assert await clause.admitted(cursor.rowcount, "id = ?", (42,))
        await db.execute("BEGIN IMMEDIATE")
        async with await orders.announce_within(db, stamp(6, 3)) as tx:
            await tx.execute("UPDATE orders SET qty = qty + 10 WHERE id = 42")
        await db.execute("COMMIT")
        mark = await orders.peek(db, "orders/42", at_least=6)
        assert mark is not None and mark.token == 6
        assert await (await db.execute("SELECT qty FROM orders")).fetchone() == (12,)
        assert "CREATE TRIGGER" in await orders.script(db)
        await orders.uninstall(db)
        await db.execute("UPDATE orders SET qty = 0")
    with pytest.raises(fenced.Unsupported):
        await orders.install(sqlite3.connect(path))
