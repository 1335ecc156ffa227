"""A consumer on a real NATS JetStream: what is applied, and what is never delivered again."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

from fenced import messages, sql
from fenced.errors import Contended
from fenced.values.model import Stamp
from fenced_testkit.servers import NatsServer


def stamp(token: int, seq: int) -> Stamp:
    return Stamp("00000000000000aa", ("orders/42",), token, seq, f"{token:032x}")


def test_every_outcome(nats_server: NatsServer, tmp_path: Path) -> None:
    import nats
    from nats.js.api import AckPolicy, ConsumerConfig

    db = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, applied TEXT)")
    db.execute("INSERT INTO orders VALUES (42, '')")
    guard = sql.Guard(table="orders", name="orders/{id}", rule="sequenced")
    guard.install(db, "require")
    deliveries: list[bytes] = []

    async def apply(fence: Any, message: Any) -> None:
        deliveries.append(message.data)
        if message.data == b"c" and deliveries.count(b"c") == 1:
            raise Contended("busy")
        with guard.transaction(db, fence) as tx:
            tx.execute("UPDATE orders SET applied = applied || ? WHERE id = 42", (message.data.decode(),))

    async def main() -> None:
        client = await nats.connect(nats_server.url())
        stream = client.jetstream()
        await stream.add_stream(name="shop", subjects=["orders"])
        wire = [
            (b"a", (5, 1)),
            (b"a", (5, 1)),
            (b"b", (6, 1)),
            (b"s", (5, 2)),
            (b"c", (6, 2)),
            (b".", (6, 3)),
        ]
        for body, at in wire:
            await stream.publish("orders", body, headers=messages.headers(stamp(*at)))
        await stream.publish("orders", b"m")
        handle = messages.on_nats(apply, delay=0.05)
        config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=1, ack_wait=60)
        subscription = await stream.subscribe("orders", cb=handle, manual_ack=True, config=config)
        async with asyncio.timeout(120):
            while (await subscription.consumer_info()).num_pending or subscription.pending_msgs:
                await asyncio.sleep(0.02)
            while (await subscription.consumer_info()).num_ack_pending:
                await asyncio.sleep(0.02)
        await client.close()

    asyncio.run(main())
    assert db.execute("SELECT applied FROM orders").fetchone() == ("abc.",)
    assert deliveries == [b"a", b"a", b"b", b"s", b"c", b"c", b"."], (
        "the one without a stamp is never applied"
    )
