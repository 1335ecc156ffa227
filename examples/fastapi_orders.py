"""A shop in FastAPI. Ten requests sell from one order at once; one is paused past its lease, and stores nothing.

python examples/fastapi_orders.py
"""

import asyncio
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import aiosqlite
import httpx
from fastapi import FastAPI, Request

import fenced
from fenced.fastapi import answers, guarded
from fenced.sql import AsyncGuard, Guard

FOLDER = Path(tempfile.mkdtemp(dir="/var/tmp"))  # not in memory: leases must survive a power cut
DATABASE = FOLDER / "shop.db"

orders = AsyncGuard(table="orders", name="orders/{id}")
leases = fenced.AsyncClient(f"sqlite:///{FOLDER}/leases.db")


@asynccontextmanager
async def connections() -> AsyncIterator[aiosqlite.Connection]:
    async with aiosqlite.connect(DATABASE, isolation_level=None) as db:
        yield db


app = FastAPI()
answers(app)
Guarded = guarded(orders, connections, leases, wait=30, max_hold=2, id=int)


@app.post("/orders/{id}/sell")
async def sell(
    id: int,  # noqa: A002
    request: Request,
    db: Annotated[aiosqlite.Connection, Guarded],
    pause: float = 0,
) -> dict[str, int]:
    async with db.execute("SELECT qty FROM orders WHERE id = ?", (id,)) as found:
        ((qty,),) = await found.fetchall()
    await asyncio.sleep(pause)  # longer than max_hold: the lease is lost, and this is cancelled
    await db.execute("UPDATE orders SET qty = ? WHERE id = ?", (qty - 1, id))
    return {"token": request.state.lease.token}


async def main() -> None:
    with sqlite3.connect(DATABASE, isolation_level=None) as db:
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
        db.execute("INSERT INTO orders VALUES (42, 10)")
        Guard(table="orders", name="orders/{id}").install(db, mode="require")
    transport = httpx.ASGITransport(app)
    async with leases, httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=60) as http:
        paused = asyncio.create_task(http.post("/orders/42/sell", params={"pause": 60}))
        answered = await asyncio.gather(*(http.post("/orders/42/sell") for _ in range(9)), paused)
    print("answers:", sorted(answer.status_code for answer in answered))
    print("left:", db.execute("SELECT qty FROM orders").fetchone()[0])
    db.close()


if __name__ == "__main__":
    asyncio.run(main())
