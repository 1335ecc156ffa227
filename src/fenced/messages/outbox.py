"""An outbox: messages that are committed in the transaction of the writes that they report, and a relay for them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from fenced import sql
from fenced.client.guarding import Fence
from fenced.client.leases import AsyncLease, Lease
from fenced.errors import Misuse, shown
from fenced.guards.engine import TableGuard
from fenced.guards.spec import Spec
from fenced.messages.outcomes import headers as fence_headers
from fenced.runtime.blocking import step
from fenced.sql.engines import on
from fenced.values.contracts import Colour

BATCH = 100


class OutboxMessage(NamedTuple):
    """A message on its way from the outbox to the broker."""

    id: int
    topic: str
    """What the producer gave: a queue, a routing key, a subject."""
    body: bytes
    headers: dict[str, str]
    """With the stamp. They are published as they are."""


class _OutboxBase:
    """What both outboxes share: the table, the name of the relay's lease, and the statements."""

    _colour: ClassVar[Colour]

    def __init__(self, table: str = "outbox", *, name: str | None = None) -> None:
        self.name = name or f"relay/{table}"
        """The name that a relay leases."""
        self._spec = Spec(table, self.name)

    def _on(self, connection: object) -> tuple[TableGuard, Mapping[str, str]]:
        found = on(connection, self._colour)
        return found.table(self._spec, False), found.engine.outbox()

    async def _create(self, connection: object) -> None:
        table, statements = self._on(connection)
        await table.run(statements["create"].format(table=self._spec.table))

    async def _put(
        self, connection: object, fence: Fence, topic: str, body: bytes, extra: Mapping[str, str] | None
    ) -> None:
        if not isinstance(body, bytes):
            raise Misuse(f"a body is bytes, such as text.encode(), not {shown(body)}")
        headers = json.dumps({**(extra or {}), **fence_headers(fence)})
        table, statements = self._on(connection)
        texts = {"headers": headers.encode().hex(), "topic": topic.encode().hex(), "body": body.hex()}
        await table.run(statements["put"].format(table=self._spec.table, **texts))

    async def _take(self, connection: object, count: int) -> list[OutboxMessage]:
        table, statements = self._on(connection)
        rows = await table.run(statements["take"].format(table=self._spec.table, count=int(count)))
        return [
            OutboxMessage(id_, topic, bytes(body), json.loads(headers)) for id_, headers, topic, body in rows
        ]

    async def _remove(self, connection: object, ids: Sequence[int]) -> None:
        table, statements = self._on(connection)
        await table.run(statements["remove"].format(table=self._spec.table, ids=", ".join(map(str, ids))))


class AsyncOutbox(_OutboxBase):
    """Messages that are sent if, and only if, the transaction that put them here commits.

    outbox = AsyncOutbox()
    async with orders.transaction(db, lease) as tx:
        await tx.execute("UPDATE orders SET qty = 7 WHERE id = 42")
        await outbox.put(tx, lease, "orders", b'{"id": 42, "qty": 7}')

    async with client.hold(outbox.name) as mine:  # the relay, in any process
        while await outbox.relay(db, mine, publish):
            ...
    """

    _colour = "asyncio"

    def __init__(self, table: str = "outbox", *, name: str | None = None) -> None:
        super().__init__(table, name=name)
        self._guard = sql.AsyncGuard(table=table, name=self.name, mandatory=False)

    async def install(self, connection: Any) -> None:
        """Create the table, and the guard that relays are judged by. Installing it again is harmless."""
        await self._create(connection)
        await self._guard.install(connection, "enforce")

    async def put(
        self, tx: Any, fence: Fence, topic: str, body: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Add a message to the guarded transaction `tx`, with a stamp from the lease that the transaction is under."""
        await self._put(tx, fence, topic, body, headers)

    async def relay(
        self,
        connection: Any,
        lease: AsyncLease,
        publish: Callable[[OutboxMessage], Awaitable[object]],
        *,
        batch: int = BATCH,
    ) -> int:
        """Publish the oldest messages in order, and remove them; returns how many. StaleToken if overtaken.

        `publish` returns when the broker has confirmed the message. If it fails, that message and later ones stay.
        """
        async with self._guard.transaction(connection, lease) as tx:
            messages = await self._take(tx, batch)
        sent: list[int] = []
        try:
            for message in messages:
                lease.check()
                await publish(message)
                sent.append(message.id)
        finally:
            if sent:
                async with self._guard.transaction(connection, lease) as tx:
                    await self._remove(tx, sent)
        return len(sent)


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Outbox(_OutboxBase):
    """Messages that are sent if, and only if, the transaction that put them here commits.

    outbox = Outbox()
    with orders.transaction(db, lease) as tx:
        tx.execute("UPDATE orders SET qty = 7 WHERE id = 42")
        outbox.put(tx, lease, "orders", b'{"id": 42, "qty": 7}')

    with client.hold(outbox.name) as mine:  # the relay, in any process
        while outbox.relay(db, mine, publish):
            ...
    """

    _colour = "blocking"

    def __init__(self, table: str = "outbox", *, name: str | None = None) -> None:
        super().__init__(table, name=name)
        self._guard = sql.Guard(table=table, name=self.name, mandatory=False)

    def install(self, connection: Any) -> None:
        """Create the table, and the guard that relays are judged by. Installing it again is harmless."""
        step(self._create(connection))
        self._guard.install(connection, "enforce")

    def put(
        self, tx: Any, fence: Fence, topic: str, body: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Add a message to the guarded transaction `tx`, with a stamp from the lease that the transaction is under."""
        step(self._put(tx, fence, topic, body, headers))

    def relay(
        self,
        connection: Any,
        lease: Lease,
        publish: Callable[[OutboxMessage], object],
        *,
        batch: int = BATCH,
    ) -> int:
        """Publish the oldest messages in order, and remove them; returns how many. StaleToken if overtaken.

        `publish` returns when the broker has confirmed the message. If it fails, that message and later ones stay.
        """
        with self._guard.transaction(connection, lease) as tx:
            messages = step(self._take(tx, batch))
        sent: list[int] = []
        try:
            for message in messages:
                lease.check()
                publish(message)
                sent.append(message.id)
        finally:
            if sent:
                with self._guard.transaction(connection, lease) as tx:
                    step(self._remove(tx, sent))
        return len(sent)


# end
