"""Guards for the program's own SQL tables, on the program's own connections.

    orders = fenced.sql.Guard(table="orders", name="orders/{id}")
    orders.install(connection, mode="enforce")
    with orders.transaction(connection, lease) as tx:
        tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 42")

The database itself refuses a stale holder's write, atomically with the write. The connection says which database
it is: `sqlite3` and psycopg for Guard, `aiosqlite`, psycopg and asyncpg for AsyncGuard.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from fenced.client import Lease
from fenced.decision import Mark, Rule
from fenced.errors import AlreadyApplied, Misuse, Refused, Unsupported
from fenced.guarding import Fence, Fences, credential
from fenced.guards.postgresql.refusals import refusal_in
from fenced.guards.shared.answers import error_for
from fenced.guards.shared.spec import Spec, check_identifier
from fenced.guards.sqlite.fencing import GuardedConnection, SqliteFence, covers, translate, verdict_in
from fenced.guards.sqlite.sessions import PlainSession, Source, commit, reenter
from fenced.model import Credential, Stamp, check_name
from fenced.proofs import Proof
from fenced.runtime.blocking import step
from fenced.sql.clauses import AsyncClause, PlainClause
from fenced.sql.engines import BLOCKING, SUSPENDING, TableGuard, table_on

C = TypeVar("C")

__all__ = ["AsyncGuard", "Guard", "refusal"]


def refusal(error: BaseException) -> Refused | AlreadyApplied | None:
    """The typed refusal behind a driver's error, for code outside a wrapper; None if it is none of ours."""
    raised = verdict_in(error)
    found = refusal_in(error) if raised is None else error_for(raised[0], name=None, table=raised[1])
    return found if isinstance(found, Refused | AlreadyApplied) else None


class _GuardBase:
    """What both guards share: which table, which name, which rule."""

    def __init__(
        self, *, table: str, name: str, rule: Rule = "retry", mandatory: bool = True, epoch: str | None = None
    ) -> None:
        self._spec = Spec(table, name, rule, epoch)
        self._mandatory = mandatory

    @property
    def table(self) -> str:
        return self._spec.table

    def name_for(self, **values: object) -> str:
        """The name to lease for the row with these values of the template's columns."""
        return self._spec.name_for(**values)

    def _clause_parts(self, fence: Fence, column: str) -> tuple[Stamp, Spec, str]:
        if self._spec.rule == "sequenced":
            raise Unsupported("a clause knows the token alone; rule sequenced needs transaction()")
        carried = credential(fence)
        if carried.proofs or len(carried.stamps) != 1:
            raise Unsupported("a clause carries the token of one lease and no proof; use transaction()")
        return carried.stamps[0], self._spec, check_identifier(column, "column")


class Guard(_GuardBase):
    """Guards one table of the program's own. `connect` is needed for `announce` alone."""

    def __init__(
        self,
        *,
        table: str,
        name: str,
        rule: Rule = "retry",
        mandatory: bool = True,
        epoch: str | None = None,
        connect: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(table=table, name=name, rule=rule, mandatory=mandatory, epoch=epoch)
        self._connect = connect

    def _on(self, connection: object) -> TableGuard:
        return table_on(connection, self._spec, self._mandatory, BLOCKING)

    def install(self, connection: Any, mode: str | None = None) -> None:
        """Create the marks and, if mandatory, the triggers. A new guard observes.

        Again is harmless: the marks stay, and so does the mode unless one is given.
        """
        step(self._on(connection).install(mode))

    def script(self, connection: Any, mode: str | None = None) -> str:
        """The SQL that `install` would run, for a migration."""
        return step(self._on(connection).script(mode))

    def uninstall(self, connection: Any) -> None:
        """Restore the table. The marks stay: a guard that is installed later needs them to refuse old holders."""
        step(self._on(connection).uninstall())

    def set_mode(
        self, connection: Any, mode: str, pattern: str = "*", *, wait: float = 10.0
    ) -> tuple[str, ...]:
        """Set the mode, the stage of the rollout, of the names that match.

        Waits for the transactions that began before the change, which does not bind them. Returns those that still
        run after `wait` seconds. Empty: from now on no transaction can commit a write that the new mode refuses.
        """
        return step(self._on(connection).set_mode(mode, pattern, wait))

    def adopt(self, connection: Any, realm: str) -> None:
        """Trust this authority (`lease.realm`) from now on, and no other; after a move, and after its `raise`."""
        step(self._on(connection).adopt(realm))

    def transaction(
        self, connection: C, fence: Fences, *names: str, still_held: bool = False
    ) -> AbstractContextManager[C]:
        """`with guard.transaction(connection, lease) as tx:` announced first, then yours, then committed.

        `still_held`: refused unless the authority, in the same database, says that the lease is held.
        """
        if (
            isinstance(connection, sqlite3.Connection)
            and not still_held
            and not isinstance(fence, list | Proof)
        ):
            return self._sqlite_transaction(connection, fence, names)  # type: ignore[return-value]
        carried = credential(fence, names, still_held=still_held)
        return Transaction(connection, self._on(connection), carried)

    def _sqlite_transaction(
        self, connection: sqlite3.Connection, fence: Fences, names: tuple[str, ...]
    ) -> SqliteTransaction:
        guard = SqliteFence(self.table, self._mandatory)
        if isinstance(fence, Lease):
            hold = fence._hold
            covered = tuple(check_name(name) for name in names) if names else hold.names
            return SqliteTransaction(guard, connection, hold, hold.next_seq(), covered)
        carried = credential(fence, names)
        (stamp,) = carried.stamps
        return SqliteTransaction(guard, connection, stamp, stamp.seq, carried.names or stamp.names)

    def announce(self, fence: Fences, *names: str) -> None:
        """Raise the marks on a connection of its own, and commit: reads that follow are fenced."""
        if self._connect is None:
            raise Misuse("announce() needs Guard(connect=...): a function that opens a connection")
        connection = self._connect()
        try:
            step(self._on(connection).announce(credential(fence, names, announcing=True)))
        finally:
            connection.close()

    def announce_on(
        self, connection: C, fence: Fences, *names: str, still_held: bool = False
    ) -> Announced[C]:
        """Announce in the transaction that the program began itself; `clear()` before its COMMIT."""
        table, carried = self._on(connection), credential(fence, names, still_held=still_held)
        step(table.announce_on(carried))
        return Announced(connection, table, carried)

    def peek(self, connection: Any, name: str, at_least: int = 0) -> Mark | None:
        """The mark of a name; Contended while no token as high as `at_least` has been seen.

        What is read afterwards on this connection is at least as new.
        """
        return step(self._on(connection).peek(name, at_least))

    def clause(self, fence: Fence, column: str = "epoch") -> PlainClause:
        """Fragments that put the token into the program's own UPDATE, for a table with an epoch column."""
        return PlainClause(*self._clause_parts(fence, column))


class Transaction(Generic[C]):
    """A guarded transaction on the program's own connection."""

    def __init__(self, connection: C, table: TableGuard, credential: Credential) -> None:
        self._connection = connection
        self._table = table
        self._credential = credential

    def __enter__(self) -> C:
        step(self._table.enter(self._credential))
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        step(self._table.leave(exc))


class SqliteTransaction:
    """A guarded transaction on an SQLite connection.

    It goes the way of `GuardedConnection`; what nearly every transaction needs is called without coroutines.
    """

    __slots__ = ("_connection", "_fence", "_names", "_seq", "_source")

    def __init__(
        self,
        fence: SqliteFence,
        connection: sqlite3.Connection,
        source: Source,
        seq: int | None,
        names: tuple[str, ...],
    ) -> None:
        self._fence = fence
        self._connection = connection
        self._source = source
        self._seq = seq
        self._names = names

    def __enter__(self) -> sqlite3.Connection:
        connection, source, names = self._connection, self._source, self._names
        try:
            nested = connection.in_transaction
        except sqlite3.ProgrammingError as error:  # closed
            raise translate(error) from error
        if nested or not (names is source.names or covers(source, names)):
            step(self._guarded().enter())
            return connection
        try:
            left = reenter(connection, self._fence.guard, source, self._seq, names)
        except sqlite3.Error as error:
            left = step(self._guarded().recover(error))
        except BaseException:  # Ctrl-C, between BEGIN and here
            connection.rollback()
            raise
        if left:
            step(self._guarded().announce(left))
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None or not self._connection.in_transaction:
            step(self._guarded().leave(exc))
            return
        try:
            commit(self._connection, self._names)
        except BaseException as error:  # noqa: BLE001 - raised again, as what it means
            step(self._guarded().commit_failed(error))

    def _guarded(self) -> GuardedConnection:
        source = self._source
        stamp = Stamp(source.realm, source.names, source.token, self._seq, source.grant)
        names = stamp.names if self._names is source.names else self._names
        return GuardedConnection(self._fence, PlainSession(self._connection), stamp, names)


class Announced(Generic[C]):
    """Stamps in a transaction that the program commits itself."""

    def __init__(self, connection: C, table: TableGuard, credential: Credential) -> None:
        self._connection = connection
        self._table = table
        self._credential = credential

    def clear(self) -> None:
        """Take its stamps out; SQLite's COMMIT fails while they are in."""
        step(self._table.clear(self._credential))

    def __enter__(self) -> C:
        return self._connection

    def __exit__(self, *exc: object) -> None:
        self.clear()


class AsyncGuard(_GuardBase):
    """Guards one table of the program's own, for asyncio. `connect` is needed for `announce` alone."""

    def __init__(
        self,
        *,
        table: str,
        name: str,
        rule: Rule = "retry",
        mandatory: bool = True,
        epoch: str | None = None,
        connect: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        super().__init__(table=table, name=name, rule=rule, mandatory=mandatory, epoch=epoch)
        self._connect = connect

    def _on(self, connection: object) -> TableGuard:
        return table_on(connection, self._spec, self._mandatory, SUSPENDING)

    async def install(self, connection: Any, mode: str | None = None) -> None:
        """Create the marks and, if mandatory, the triggers. A new guard observes.

        Again is harmless: the marks stay, and so does the mode unless one is given.
        """
        await self._on(connection).install(mode)

    async def script(self, connection: Any, mode: str | None = None) -> str:
        """The SQL that `install` would run, for a migration."""
        return await self._on(connection).script(mode)

    async def uninstall(self, connection: Any) -> None:
        """Restore the table. The marks stay: a guard that is installed later needs them to refuse old holders."""
        await self._on(connection).uninstall()

    async def set_mode(
        self, connection: Any, mode: str, pattern: str = "*", *, wait: float = 10.0
    ) -> tuple[str, ...]:
        """Set the mode, the stage of the rollout, of the names that match.

        Waits for the transactions that began before the change, which does not bind them. Returns those that still
        run after `wait` seconds. Empty: from now on no transaction can commit a write that the new mode refuses.
        """
        return await self._on(connection).set_mode(mode, pattern, wait)

    async def adopt(self, connection: Any, realm: str) -> None:
        """Trust this authority (`lease.realm`) from now on, and no other; after a move, and after its `raise`."""
        await self._on(connection).adopt(realm)

    def transaction(
        self, connection: C, fence: Fences, *names: str, still_held: bool = False
    ) -> AsyncTransaction[C]:
        """`async with guard.transaction(connection, lease) as tx:` announced first, then yours.

        `still_held`: refused unless the authority, in the same database, says that the lease is held.
        """
        carried = credential(fence, names, still_held=still_held)
        return AsyncTransaction(connection, self._on(connection), carried)

    async def announce(self, fence: Fences, *names: str) -> None:
        """Raise the marks on a connection of its own, and commit: reads that follow are fenced."""
        if self._connect is None:
            raise Misuse("announce() needs AsyncGuard(connect=...): a coroutine function that connects")
        connection = await self._connect()
        try:
            await self._on(connection).announce(credential(fence, names, announcing=True))
        finally:
            await connection.close()

    async def announce_on(
        self, connection: C, fence: Fences, *names: str, still_held: bool = False
    ) -> AsyncAnnounced[C]:
        """Announce in the transaction that the program began itself; `clear()` before its COMMIT."""
        table, carried = self._on(connection), credential(fence, names, still_held=still_held)
        await table.announce_on(carried)
        return AsyncAnnounced(connection, table, carried)

    async def peek(self, connection: Any, name: str, at_least: int = 0) -> Mark | None:
        """The mark of a name; Contended while no token as high as `at_least` has been seen.

        What is read afterwards on this connection is at least as new.
        """
        return await self._on(connection).peek(name, at_least)

    def clause(self, fence: Fence, column: str = "epoch") -> AsyncClause:
        """Fragments that put the token into the program's own UPDATE, for a table with an epoch column."""
        return AsyncClause(*self._clause_parts(fence, column))


class AsyncTransaction(Generic[C]):
    """A guarded transaction on the program's own connection."""

    def __init__(self, connection: C, table: TableGuard, credential: Credential) -> None:
        self._connection = connection
        self._table = table
        self._credential = credential

    async def __aenter__(self) -> C:
        await self._table.enter(self._credential)
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._table.leave(exc)


class AsyncAnnounced(Generic[C]):
    """Stamps in a transaction that the program commits itself."""

    def __init__(self, connection: C, table: TableGuard, credential: Credential) -> None:
        self._connection = connection
        self._table = table
        self._credential = credential

    async def clear(self) -> None:
        """Take its stamps out; SQLite's COMMIT fails while they are in."""
        await self._table.clear(self._credential)

    async def __aenter__(self) -> C:
        return self._connection

    async def __aexit__(self, *exc: object) -> None:
        await self.clear()
