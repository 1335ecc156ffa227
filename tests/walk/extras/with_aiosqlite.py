# walk: './fenced[aiosqlite]'
"""An aiosqlite program."""

import asyncio

import aiosqlite

import fenced


async def main() -> None:
    orders = fenced.sql.AsyncGuard(table="orders", name="orders/{id}")
    async with aiosqlite.connect("shop.db", isolation_level=None) as db:
        await db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
        await orders.install(db, mode="require")
        leases = fenced.AsyncClient("sqlite:///leases.db")
        async with leases, leases.hold("orders/42") as lease, orders.transaction(db, lease) as tx:
            await tx.execute("INSERT INTO orders VALUES (42, 7)")


asyncio.run(main())
