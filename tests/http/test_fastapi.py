"""A dependency of FastAPI that leases the row of a request, and answers for what can go wrong."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiosqlite
import httpx
import pytest
from fastapi import FastAPI, Request

import fenced
from fenced.fastapi import answers, guarded
from fenced.sql import AsyncGuard, Guard

ORDERS = AsyncGuard(table="orders", name="orders/{id}")


@dataclass
class Shop:
    """An application, and what is in its database."""

    folder: Path
    leases: fenced.AsyncClient
    inside: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    open: int = 0
    """How many connections are taken."""
    open_at_answer: int | None = None

    @property
    def path(self) -> Path:
        return self.folder / "shop.db"

    def install(self) -> None:
        with sqlite3.connect(self.path, isolation_level=None) as db:
            db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
            db.execute("INSERT INTO orders VALUES (42, 10), (43, 10)")
            Guard(table="orders", name="orders/{id}").install(db, mode="require")
        db.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[aiosqlite.Connection]:
        async with aiosqlite.connect(self.path, isolation_level=None) as db:
            self.open += 1
            try:
                yield db
            finally:
                self.open -= 1

    def qty(self) -> int:
        db = sqlite3.connect(self.path)
        (found,) = db.execute("SELECT qty FROM orders WHERE id = 42").fetchone()
        db.close()
        return int(found)

    def app(self, **options: Any) -> FastAPI:
        app = FastAPI()
        answers(app)
        dependency = guarded(ORDERS, self.connection, lambda: self.leases, id=int, **options)

        @app.post("/orders/{id}/sell")
        async def sell(
            request: Request, db: Annotated[aiosqlite.Connection, dependency], row: int = 42
        ) -> dict[str, int]:
            await db.execute("UPDATE orders SET qty = qty - 1 WHERE id = ?", (row,))
            self.inside.set()
            if request.headers.get("x-slow"):
                await self.goes_on.wait()
            return {"token": request.state.lease.token}

        return app


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    made = Shop(tmp_path, fenced.AsyncClient(f"sqlite:///{tmp_path}/leases.db"))
    made.install()
    return made


@asynccontextmanager
async def caller(shop: Shop, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = shop.app(**options)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def sends(message: Any) -> None:
            if message["type"] == "http.response.start":
                shop.open_at_answer = shop.open
            await send(message)

        await app(scope, receive, sends)

    transport = httpx.ASGITransport(watched)
    async with shop.leases, httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        yield http


async def test_a_request_is_done_under_a_lease_and_committed_before_its_answer(shop: Shop) -> None:
    async with caller(shop) as http:
        done = await http.post("/orders/42/sell")
        assert (done.status_code, done.json(), shop.qty()) == (200, {"token": 1}, 9)
        assert (shop.open_at_answer, shop.open) == (0, 0)
        assert await shop.leases.holder("orders/42") is None


async def test_a_name_that_is_not_granted_in_time_is_503(shop: Shop) -> None:
    """Who waits has no connection, and the answer does not tell who holds it."""
    async with caller(shop, wait=0.2) as http, fenced.AsyncClient(shop.leases._given_url) as other:
        async with other.hold("orders/42"):
            busy = await http.post("/orders/42/sell")
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        assert busy.json()["retry"] == "later" and "pid" not in busy.text
    assert shop.open == 0 and shop.qty() == 10


async def test_a_write_to_another_row_is_403(shop: Shop) -> None:
    async with caller(shop) as http:
        refused = await http.post("/orders/42/sell", params={"row": 43})
    assert (refused.status_code, shop.qty(), shop.open) == (403, 10, 0)


async def test_a_lost_lease_cancels_the_handler_and_is_412(shop: Shop) -> None:
    async with caller(shop, max_hold=0.3) as http:
        lost = await http.post("/orders/42/sell", headers={"x-slow": "1"})
    assert (lost.status_code, lost.json()["reason"]) == (412, "max_hold")
    assert shop.qty() == 10 and shop.open == 0


async def test_an_overtaken_request_is_412(shop: Shop) -> None:
    async with caller(shop) as http:
        async with shop.leases.hold("orders/42") as lease, shop.connection() as db:
            await ORDERS.announce(db, lease.announcement()._replace(token=99, grant="f" * 32))
        stale = await http.post("/orders/42/sell")
    assert (stale.status_code, stale.json()["mark"], shop.qty()) == (412, 99, 10)


async def test_an_authority_that_cannot_be_reached_is_503(shop: Shop) -> None:
    shop.leases = fenced.AsyncClient("redis://127.0.0.1:1")
    async with caller(shop) as http:
        assert (await http.post("/orders/42/sell")).status_code == 503


async def test_a_path_without_a_row_is_422(shop: Shop) -> None:
    async with caller(shop) as http:
        assert (await http.post("/orders/forty-two/sell")).status_code == 422


def test_the_arguments_are_checked_when_the_program_starts(shop: Shop) -> None:
    with pytest.raises(fenced.Misuse, match="AsyncGuard"):
        guarded(Guard(table="orders", name="orders/{id}"), shop.connection, shop.leases)  # type: ignore[arg-type]
    with pytest.raises(fenced.Misuse, match="no column order"):
        guarded(ORDERS, shop.connection, shop.leases, order=int)
