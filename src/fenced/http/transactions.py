"""Atomic: the mark rises in the program's own database transaction, by the guard of its table."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from fenced.client.guarding import EnteredOnce
from fenced.errors import MissingStamp, Misuse
from fenced.guards.engine import TableGuard
from fenced.guards.kept_replies import ReplyTable
from fenced.http.kept import HAPPENED, LastOperation, reply_in
from fenced.http.receiving import Received, Replayed, received_by
from fenced.runtime.blocking import step
from fenced.sql import AsyncGuard, Guard
from fenced.values.decision import Mark
from fenced.values.model import Stamp

C = TypeVar("C")
R = TypeVar("R")


@overload
def atomic(
    guard: Guard, connection: C, request: Any, *names: str, replies: str | None = None
) -> Atomic[C]: ...
@overload
def atomic(
    guard: AsyncGuard, connection: C, request: Any, *names: str, replies: str | None = None
) -> AsyncAtomic[C]: ...
def atomic(
    guard: Guard | AsyncGuard, connection: Any, request: Any, *names: str, replies: str | None = None
) -> Any:
    """`with atomic(guard, connection, request):` announce the stamp of the request, run the block, commit.

    The database refuses a stale stamp at the announcement, at a statement or at COMMIT. A request without a stamp runs
    in a plain transaction, and the mode of the guard decides about its writes. Commit before you answer: in FastAPI a
    dependency that does this needs `Depends(..., scope="function")`.

    `replies`: the table in which `keep(response)` keeps replies (`replies_table` creates it), for rules `once` and
    `sequenced`. If the same operation comes again, the block raises Replayed before it begins.
    """
    kind = AsyncAtomic if isinstance(guard, AsyncGuard) else Atomic
    if replies is not None and guard.rule not in ("once", "sequenced"):
        raise Misuse(
            "replies are kept under rule once or sequenced, which the guard names: rule retry admits a repeat"
        )
    received = received_by(request)
    if received.fence is None and not guard._mandatory:
        # Without triggers nothing in the database would notice a write without a stamp.
        raise MissingStamp(f"a request that writes to {guard.table} needs a stamp")
    return kind(connection, _Work(guard._on(connection), received, names, replies))


def replies_table(table: str = "fenced_replies") -> str:
    """The statement that creates a table for kept replies, for the program's own migration."""
    return ReplyTable(table).creation


class _Work:
    """One request: begins, announces, looks for a kept reply, and commits or rolls back."""

    def __init__(
        self, table: TableGuard, received: Received, names: tuple[str, ...], replies: str | None
    ) -> None:
        self._table = table
        self._received = received
        self._credential = received.credential(names)
        stamp = received.stamp
        # An announcement and a bare stamp name no operation, so there is nothing that could be repeated.
        self._stamp = stamp if stamp is not None and stamp.seq else None
        self._replies = ReplyTable(replies) if replies is not None else None

    async def enter(self) -> None:
        await self._table.enter(self._credential)
        if self._replies is None or self._stamp is None:
            return
        try:
            # Safe: under these rules the announcement has locked the names, so the operation that is looked for has
            # been committed or never will be.
            await self._look(self._replies, self._stamp)
        except BaseException as error:
            await self._table.leave(error)
            raise

    async def _look(self, replies: ReplyTable, stamp: Stamp) -> None:
        found = await replies.find(self._table.run, stamp.names_text)
        if found is None:
            return
        last = LastOperation.unpacked(found)
        if last.is_of(stamp):
            reply = await last.reply_to(self._received.asked(), self._received.body)
            if reply is not None:
                raise Replayed(reply)

    async def leave(self, error: BaseException | None) -> None:
        await self._table.leave(error)

    async def keep(self, response: Any) -> None:
        if self._replies is None:
            raise Misuse("atomic(..., replies=TABLE) says where replies are kept")
        reply = reply_in(response)
        if (stamp := self._stamp) is None or reply is None or reply.status not in HAPPENED:
            return
        mark = Mark(stamp.token, stamp.grant, stamp.seq or 0)
        last = LastOperation(mark, self._received.asked()).answered(reply, self._received.body)
        await self._replies.keep(self._table.run, stamp.names_text, last.packed())


class _AtomicBase(Generic[C], EnteredOnce):
    def __init__(self, connection: C, work: _Work) -> None:
        self.connection = connection
        self._work = work


class AsyncAtomic(_AtomicBase[C]):
    """A request in its own transaction: `async with atomic(guard, connection, request) as operation:`."""

    async def __aenter__(self) -> AsyncAtomic[C]:
        self._enter()
        await self._work.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._work.leave(exc)

    async def keep(self, response: R) -> R:
        """Keep the reply in this transaction, and return it: one of 2xx and at most 64 KB that is not streamed, if the
        program has read the whole body of the request."""
        await self._work.keep(response)
        return response


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Atomic(_AtomicBase[C]):
    """A request in its own transaction: `with atomic(guard, connection, request) as operation:`."""

    def __enter__(self) -> Atomic[C]:
        self._enter()
        step(self._work.enter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        step(self._work.leave(exc))

    def keep(self, response: R) -> R:
        """Keep the reply in this transaction, and return it: one of 2xx and at most 64 KB that is not streamed, if the
        program has read the whole body of the request."""
        step(self._work.keep(response))
        return response


# end
