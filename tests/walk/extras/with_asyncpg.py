# walk: './fenced[asyncpg]'
"""An asyncpg program with leases in PostgreSQL, and its operator: nothing else is installed."""

import asyncio
import os
import subprocess

import asyncpg

import fenced

URL = os.environ["DATABASE_URL"]


async def main() -> None:
    db = await asyncpg.connect(URL)
    await db.execute("CREATE TABLE orders (id int PRIMARY KEY, qty int); INSERT INTO orders VALUES (42, 10)")
    orders = fenced.sql.AsyncGuard(table="orders", name="orders/{id}")
    await orders.install(db, mode="require")
    leases = fenced.AsyncClient(URL)
    async with leases, leases.hold("orders/42") as lease, orders.transaction(db, lease) as tx:
        await tx.execute("UPDATE orders SET qty = 7 WHERE id = 42")
    assert await db.fetchval("SELECT qty FROM orders") == 7
    await db.close()


asyncio.run(main())
status = subprocess.run(["fenced", "guard", "status", URL], check=True, capture_output=True, text=True)
assert "require" in status.stdout
