"""The outbox: a message is sent if its transaction was committed, and a relay that was overtaken removes nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest

import fenced
from fenced import cli, sql
from fenced.errors import LeaseLost, Misuse, StaleToken
from fenced.messages import AsyncOutbox, Outbox, OutboxMessage, fence_of
from fenced.runtime.blocking import step
from fenced.values.model import Stamp


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    connection: Any
    if request.param == "sqlite":
        connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    else:
        connection = psycopg.connect(request.getfixturevalue("postgresql_url"), autocommit=True)
    yield connection
    connection.close()


@pytest.fixture
def orders(db: Any) -> sql.Guard:
    guard = sql.Guard(table="orders", name="orders/{id}")
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
    db.execute("INSERT INTO orders VALUES (42, 1)")
    guard.install(db, "require")
    return guard


def test_a_message_is_sent_if_its_transaction_was_committed(db: Any, orders: sql.Guard) -> None:
    outbox = Outbox()
    for _ in range(2):  # installing it again is harmless
        outbox.install(db)
    body = bytes(range(256))
    with fenced.Client("memory:") as client:
        late = client.acquire("orders/42")
        stale = late.next_stamp()
        late.release()
        with client.hold("orders/42") as lease:
            with orders.transaction(db, lease) as tx:
                tx.execute("UPDATE orders SET qty = 7")
                outbox.put(tx, lease, "über'orders", body, headers={"content-type": "text/plain"})
                outbox.put(tx, lease, "orders", b"")
            with suppress(ZeroDivisionError), orders.transaction(db, lease) as tx:
                outbox.put(tx, lease, "orders", b"rolled back")
                raise ZeroDivisionError
            with pytest.raises(StaleToken), orders.transaction(db, stale) as tx:
                outbox.put(tx, stale, "orders", b"refused")
            with pytest.raises(Misuse):
                outbox.put(db, lease, "orders", "a text")  # type: ignore[arg-type]
        sent: list[OutboxMessage] = []
        with client.hold(outbox.name) as relay:
            assert outbox.relay(db, relay, sent.append, batch=1) == 1
            assert outbox.relay(db, relay, sent.append) == 1
            assert outbox.relay(db, relay, sent.append) == 0
    assert [(one.topic, one.body) for one in sent] == [("über'orders", body), ("orders", b"")]
    assert sent[0].headers["content-type"] == "text/plain"
    stamps = [fence_of(one.headers) for one in sent]
    assert [(one.token, one.names) for one in stamps if isinstance(one, Stamp)] == [
        (lease.token, lease.names)
    ] * 2
    assert sent[0].id < sent[1].id


def test_a_relay_that_was_overtaken_removes_nothing(db: Any, orders: sql.Guard) -> None:
    """It sends once more what it has already read, and that is all it can do."""
    outbox = Outbox()
    outbox.install(db)
    with fenced.Client("memory:") as client, client.hold("orders/42") as lease:
        for number in range(3):
            with orders.transaction(db, lease) as tx:
                outbox.put(tx, lease, "orders", b"%d" % number)
        overtaken = client.acquire(outbox.name)
        sent: list[bytes] = []

        def publish(message: OutboxMessage) -> None:
            sent.append(message.body)
            if len(sent) == 1:  # somebody else takes over meanwhile, and its broker fails after one message
                step(client._authority.force_release(outbox.name, overtaken.token))
                with fenced.Client("memory:").hold(outbox.name) as newer, pytest.raises(ConnectionError):
                    outbox.relay(db, newer, publish)
            elif len(sent) == 3:
                raise ConnectionError

        with pytest.raises((StaleToken, LeaseLost)):
            outbox.relay(db, overtaken, publish)
        assert sent[:3] == [b"0", b"0", b"1"]
        left: list[bytes] = []
        with fenced.Client("memory:").hold(outbox.name) as last:
            outbox.relay(db, last, lambda message: left.append(message.body))
        assert left == [b"1", b"2"], "what was confirmed by the newer relay was removed, and nothing else"


def test_a_move_names_what_waits_before_it_begins(
    db: Any,
    orders: sql.Guard,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """The guards of the consumers would refuse the stamps of the old authority."""
    is_file = isinstance(db, sqlite3.Connection)
    url = f"sqlite:///{tmp_path}/shop.db" if is_file else request.getfixturevalue("postgresql_url")
    old, new = (f"sqlite:///{tmp_path}/{name}.db" for name in ("old", "new"))
    outbox = Outbox("sales" if is_file else "public.sales")
    outbox.install(db)

    def move(*options: str) -> tuple[int, str]:
        code = cli._guarded(["authority", "move", old, new, "--guards", url, *options])
        return code, capsys.readouterr().err

    with fenced.Client(old) as client:
        with client.hold("orders/42") as lease, orders.transaction(db, lease) as tx:
            for body in (b"1", b"2"):
                outbox.put(tx, lease, "orders", body)
        code, said = move()
        assert code != 0 and "2 in " in said and "relay what waits" in said
        with client.hold("orders/42") as lease, orders.transaction(db, lease):
            pass  # nothing has moved
        with client.hold(outbox.name) as relay:
            outbox.relay(db, relay, lambda message: None, batch=1)
        assert "1 in " in move()[1]
        with client.hold(outbox.name) as relay:
            outbox.relay(db, relay, lambda message: None)
    assert move() == (0, "")
    assert move("--leave-messages") == (0, "")


@pytest.mark.parametrize("driver", ["aiosqlite", "asyncpg"])
def test_asyncio(driver: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async def main() -> None:
        connection: Any
        if driver == "aiosqlite":
            connection = await aiosqlite.connect(tmp_path / "shop.db", isolation_level=None)
        else:
            connection = await asyncpg.connect(request.getfixturevalue("postgresql_url"))
        outbox = AsyncOutbox("shop_outbox")
        await outbox.install(connection)
        sent: list[OutboxMessage] = []

        async def publish(message: OutboxMessage) -> None:
            sent.append(message)

        async with fenced.AsyncClient("memory:") as client, client.hold(outbox.name) as relay:
            async with client.hold("orders/42") as lease:
                await outbox.put(connection, lease, "orders", b"\0body")
            assert await outbox.relay(connection, relay, publish) == 1
            assert await outbox.relay(connection, relay, publish) == 0
        await connection.close()
        assert [(one.topic, one.body) for one in sent] == [("orders", b"\0body")]
        assert fence_of(sent[0].headers) is not None

    asyncio.run(main())
