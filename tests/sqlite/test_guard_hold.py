"""`guard.hold(client, connection, id=42)`: the guard leases the name of a row, and enters the transaction under it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import aiosqlite
import pytest

import fenced
from fenced.sql import AsyncGuard, Guard

ORDERS = Guard(table="orders", name="orders/{id}")
ASYNC_ORDERS = AsyncGuard(table="orders", name="orders/{id}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/leases.db"


@pytest.fixture
def db(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
    connection.execute("INSERT INTO orders VALUES (42, 10), (43, 10)")
    ORDERS.install(connection, mode="require")
    yield connection
    connection.close()


def qty(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT qty FROM orders WHERE id = 42").fetchone()[0])


def test_one_block_leases_announces_and_commits(db: sqlite3.Connection, url: str) -> None:
    with fenced.Client(url) as leases:
        with ORDERS.hold(leases, db, id=42, ttl=5, wait=1) as lease:
            assert lease.name == "orders/42" and leases.holder("orders/42") is not None
            db.execute("UPDATE orders SET qty = 9 WHERE id = 42")
            with pytest.raises(fenced.NotGranted), ORDERS.hold(fenced.Client(url), db, id=42, wait=0):
                pytest.fail("it is held")
        assert leases.holder("orders/42") is None and qty(db) == 9


def test_a_block_that_raises_is_rolled_back_and_frees_the_name(db: sqlite3.Connection, url: str) -> None:
    with fenced.Client(url) as leases:
        with pytest.raises(ZeroDivisionError), ORDERS.hold(leases, db, id=42):
            db.execute("UPDATE orders SET qty = 9 WHERE id = 42")
            raise ZeroDivisionError
        with pytest.raises(fenced.Uncovered), ORDERS.hold(leases, db, id=42):
            db.execute("UPDATE orders SET qty = 9 WHERE id = 43")
        assert leases.holder("orders/42") is None and qty(db) == 10


def test_the_transaction_ends_before_the_lease(
    db: sqlite3.Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next holder could begin before this one has committed."""
    with fenced.Client(url) as leases:
        released: list[bool] = []
        release = leases._engine.authority.release

        async def watched(*words: object, **options: object) -> object:
            released.append(db.in_transaction)
            return await release(*words, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(leases._engine.authority, "release", watched)
        with ORDERS.hold(leases, db, id=42):
            db.execute("UPDATE orders SET qty = 9 WHERE id = 42")
        assert released == [False]


def test_an_overtaken_holder_is_refused_and_gives_its_lease_back(db: sqlite3.Connection, url: str) -> None:
    with fenced.Client(url) as leases:
        with leases.hold("orders/42") as lease:
            newer = lease.announcement()._replace(token=99, grant="f" * 32)
        ORDERS.announce(db, newer)
        with pytest.raises(fenced.StaleToken), ORDERS.hold(leases, db, id=42):
            pytest.fail("it is late")
        assert leases.holder("orders/42") is None and not db.in_transaction
        with pytest.raises(fenced.LeaseLost), ORDERS.hold(leases, db, id=43) as lease:
            lease._grant.lose("expired")


def test_the_values_are_those_of_the_template(db: sqlite3.Connection, url: str) -> None:
    with fenced.Client(url) as leases:
        for row in ({}, {"order": 42}, {"id": None}, {"id": 1.5}):
            with pytest.raises(fenced.Misuse), ORDERS.hold(leases, db, **row):
                pytest.fail("there is no such name")
        whole = Guard(table="orders", name="orders")
        whole.install(db, replace=True)
        with whole.hold(leases, db) as lease:
            assert lease.name == "orders"


async def test_in_asyncio_a_lost_lease_cancels_the_body_and_rolls_back(
    db: sqlite3.Connection, path: Path, url: str
) -> None:
    async with fenced.AsyncClient(url) as leases, aiosqlite.connect(path, isolation_level=None) as own:
        async with ASYNC_ORDERS.hold(leases, own, id=42, ttl=5):
            await own.execute("UPDATE orders SET qty = 9 WHERE id = 42")
        assert qty(db) == 9
        with pytest.raises(fenced.LeaseLost):
            async with ASYNC_ORDERS.hold(leases, own, id=42, ttl=5, max_hold=0.5):
                await own.execute("UPDATE orders SET qty = 8 WHERE id = 42")
                await asyncio.sleep(60)
        assert qty(db) == 9 and not own.in_transaction


async def test_the_other_kind_of_client_is_misuse(db: sqlite3.Connection, url: str) -> None:
    async with fenced.AsyncClient(url) as leases:
        with pytest.raises(fenced.Misuse, match="blocking"), ORDERS.hold(leases, db, id=42):  # type: ignore[arg-type]
            pytest.fail("entered")
    with fenced.Client(url) as blocking, pytest.raises(fenced.Misuse, match="asyncio"):
        async with ASYNC_ORDERS.hold(blocking, db, id=42):  # type: ignore[arg-type]
            pytest.fail("entered")
