"""Transactions of your own boto3 or aiobotocore client on DynamoDB, behind a fence."""

from __future__ import annotations

import weakref
from typing import Any, Self

from fenced.client.guarding import ClientGuard, CollectsWrites, Fences, credential
from fenced.errors import Misuse, Unsupported, shown
from fenced.guards.answers import one_stamp
from fenced.guards.boto import BotoClient
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.dynamodb.guard.cells import TRAITS, DynamoCells, DynamoMarks, Writes
from fenced.values.contracts import MANY_NAMES, Runtime
from fenced.values.decision import Rule
from fenced.values.model import Credential

__all__ = ["AsyncDynamoGuard", "AsyncDynamoTransaction", "DynamoGuard", "DynamoTransaction"]


class _Collected(CollectsWrites):
    """Writes that are sent at the end of the block."""

    def __init__(self, client: Any, marks: _Marks, fence: Fences, names: tuple[str, ...]) -> None:
        self._client = client  # the marks do not keep it
        self._marks = marks
        self._fence = fence
        self._names = names
        self._writes: Writes = []

    async def _begin(self) -> None:
        self._enter()
        await self._marks.begin(credential(self._fence, self._names, announcing=True))

    async def _end(self) -> None:
        if self._writes:
            await self._marks.end(credential(self._fence, self._names), self._writes)

    def put(self, **request: Any) -> None:
        """Put an item at the end of the block."""
        self._add("Put", request)

    def update(self, **request: Any) -> None:
        """Update an item at the end of the block."""
        self._add("Update", request)

    def delete(self, **request: Any) -> None:
        """Delete an item at the end of the block."""
        self._add("Delete", request)

    def check(self, **request: Any) -> None:
        """Conflict at the end of the block, unless the item meets the condition."""
        self._add("ConditionCheck", request)

    def _add(self, kind: str, request: dict[str, Any]) -> None:
        if request.get("TableName") == self._marks.cells.table:
            raise Misuse(f"the table {self._marks.cells.table} belongs to the guard")
        self._writes.append({kind: request})


class AsyncDynamoTransaction(_Collected):
    """Writes that are sent at the end of the `async with` block in one TransactWriteItems, all of them or none.

    The arguments of each method are those that boto3 has for the same thing: `TableName`, `Key`, `Item`, and so on.
    """

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._end()

    async def get(self, **request: Any) -> dict[str, Any] | None:
        """Read an item now, consistently. The token was announced before. None: there is no such item."""
        return await self._marks.cells.item(request)


class _Marks(DynamoMarks):
    """The marks of a DynamoGuard. The caller's items are in tables of their own."""

    async def announce(self, credential: Credential) -> None:
        await self.ready()
        await super().announce(credential)

    async def begin(self, carried: Credential) -> None:
        """Announce before anything is read, unless that was done before."""
        await self.ready()
        if MANY_NAMES not in self.traits:
            raise Unsupported(
                "this server has no TransactWriteItems: keep values under names, with fenced.Values, or use another"
            )
        stamp = one_stamp(carried, self.kind)
        if not self.has_announced(stamp.grant, carried.names or stamp.names):
            await self.announce(carried)

    async def end(self, carried: Credential, writes: Writes) -> None:
        stamp = one_stamp(carried, self.kind)
        await self._operate(stamp, dict.fromkeys(carried.names or stamp.names), writes=writes)


class _OnDynamo(ClientGuard[_Marks]):
    """What both guards share: where the marks are, and their options."""

    traits = TRAITS

    def __init__(
        self, table: str, *, prefix: str = "", rule: Rule | None = None, mode: str = "enforce"
    ) -> None:
        super().__init__()
        self._table = table
        self._below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._rule = rule
        self._mode = mode

    def _new_runtime(self) -> Runtime:
        raise NotImplementedError

    def _made(self, client: Any) -> _Marks:
        if not hasattr(client, "transact_write_items"):
            raise Misuse(
                f'give the guard boto3.client("dynamodb") or a client of aiobotocore, not {shown(client)}'
            )
        runtime, table, below = self._new_runtime(), self._table, self._below
        boto = BotoClient(weakref.proxy(client), runtime, "AsyncDynamoGuard")
        cells = DynamoCells(boto, table, below, runtime)
        return _Marks(
            cells, runtime, f"dynamodb://{table}/{below}", rule=self._rule, mode=self._mode, own_client=True
        )


class AsyncDynamoGuard(_OnDynamo):
    """Transactions on DynamoDB behind a fence. The marks are in a table of their own, below `prefix`.

        guard = AsyncDynamoGuard("fenced")
        async with client.hold("stock/42") as lease:
            async with guard.transaction(dynamodb, lease, "stock/42") as tx:
                item = await tx.get(TableName="stock", Key={"id": {"S": "42"}})
                tx.put(TableName="stock", Item={"id": {"S": "42"}, "count": {"N": "7"}})

    The client is one of boto3, under asyncio also of aiobotocore or aioboto3; there calls of boto3 run in threads. A
    stale holder's block raises StaleToken, and nothing of it was written. Tasks may share a guard.
    """

    def _new_runtime(self) -> Runtime:
        return AioRuntime()

    async def announce(self, client: Any, fence: Fences, *names: str) -> None:
        """Raise the marks, before anything is read: an older holder's transaction is refused from now on."""
        await self._of(client).announce(credential(fence, names, announcing=True))

    def transaction(self, client: Any, fence: Fences, *names: str) -> AsyncDynamoTransaction:
        """Announce; then collect writes, and send them at the end of the block, behind the fence.

        Without `names`, all names of the lease. Conflict: a condition of the block's own writes does not hold.
        """
        return AsyncDynamoTransaction(client, self._of(client), fence, names)


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class DynamoTransaction(_Collected):
    """Writes that are sent at the end of the `with` block in one TransactWriteItems, all of them or none.

    The arguments of each method are those that boto3 has for the same thing: `TableName`, `Key`, `Item`, and so on.
    """

    def __enter__(self) -> Self:
        step(self._begin())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            step(self._end())

    def get(self, **request: Any) -> dict[str, Any] | None:
        """Read an item now, consistently. The token was announced before. None: there is no such item."""
        return step(self._marks.cells.item(request))


class DynamoGuard(_OnDynamo):
    """Transactions on DynamoDB behind a fence. The marks are in a table of their own, below `prefix`.

        guard = DynamoGuard("fenced")
        with client.hold("stock/42") as lease:
            with guard.transaction(dynamodb, lease, "stock/42") as tx:
                item = tx.get(TableName="stock", Key={"id": {"S": "42"}})
                tx.put(TableName="stock", Item={"id": {"S": "42"}, "count": {"N": "7"}})

    The client is one of boto3, under asyncio also of aiobotocore or aioboto3; there calls of boto3 run in threads. A
    stale holder's block raises StaleToken, and nothing of it was written. Threads may share a guard.
    """

    def _new_runtime(self) -> Runtime:
        return BlockingRuntime()

    def announce(self, client: Any, fence: Fences, *names: str) -> None:
        """Raise the marks, before anything is read: an older holder's transaction is refused from now on."""
        step(self._of(client).announce(credential(fence, names, announcing=True)))

    def transaction(self, client: Any, fence: Fences, *names: str) -> DynamoTransaction:
        """Announce; then collect writes, and send them at the end of the block, behind the fence.

        Without `names`, all names of the lease. Conflict: a condition of the block's own writes does not hold.
        """
        return DynamoTransaction(client, self._of(client), fence, names)


# end


def __dir__() -> list[str]:
    return __all__
