"""Guards for the program's own SQL tables, on the program's own connections.

    orders = fenced.sql.Guard(table="orders", name="orders/{id}")
    orders.install(connection, mode="enforce")
    with orders.transaction(connection, lease) as tx:
        tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 42")

The database itself refuses a stale holder's write, atomically with the write. The class of the connection determines
the engine: `sqlite3` and psycopg for Guard, `aiosqlite`, psycopg and asyncpg for AsyncGuard, and the classes that other
engines register under the entry point `fenced.engines`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from fenced.client import registry
from fenced.client.guarding import EnteredOnce, Fence, Fences, GuardOn, credential
from fenced.client.leases import LeaseBase
from fenced.errors import AlreadyApplied, Misuse, Refused
from fenced.guards.engine import TableGuard
from fenced.guards.spec import Spec
from fenced.runtime.blocking import step
from fenced.sql.clauses import AsyncClause, Clause
from fenced.sql.engines import OnConnection, on
from fenced.values import timing
from fenced.values.contracts import Colour
from fenced.values.decision import Mark, Rule
from fenced.values.model import Credential, Stamp, check_name
from fenced.values.timing import Seconds

if TYPE_CHECKING:
    from fenced.client.faces import AsyncClient, Client, ClientBase
    from fenced.client.leases import AsyncLease, Lease

__all__ = ["Announced", "AsyncAnnounced", "AsyncGuard", "AsyncTransaction", "Guard", "Transaction", "refusal"]

C = TypeVar("C")


def refusal(error: BaseException) -> Refused | AlreadyApplied | None:
    """The typed refusal behind a driver's error, for code outside a guarded transaction; None for other errors."""
    for engine in registry.engines():
        found = engine.refusal(error)
        if isinstance(found, Refused | AlreadyApplied):
            return found
    return None


class _GuardBase:
    """What both guards share: which table, which name, which rule."""

    _colour: ClassVar[Colour]

    def __init__(
        self,
        *,
        table: str,
        name: str,
        rule: Rule | None = None,
        mandatory: bool = True,
        epoch: str | None = None,
    ) -> None:
        self._spec = Spec(table, name, rule, epoch)
        self._mandatory = mandatory

    @property
    def table(self) -> str:
        """The table that it protects."""
        return self._spec.table

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in the template of its name."""
        return self._spec.columns

    @property
    def rule(self) -> Rule | None:
        """The rule that the program names. None: it takes that of the installed guard."""
        return self._spec.rule

    def on(self: Any, connection: Any) -> GuardOn:
        """This guard on this connection, for `hold(guards=[guard.on(connection)])`, which announces each new lease."""
        return GuardOn(self, connection)

    def name_for(self, **values: object) -> str:
        """The name to lease for the row with these values of the template's columns."""
        return self._spec.name_for(**values)

    def _leased(self, client: ClientBase, row: dict[str, object]) -> str:
        """The name of this row, for a client of the guard's own colour."""
        if client.colour != self._colour:
            raise Misuse(f"{type(self).__name__}.hold() is for {self._colour} clients")
        return self.name_for(**row)

    def _on(self, connection: object) -> TableGuard:
        return on(connection, self._colour).table(self._spec, self._mandatory)

    def _direct(self, found: OnConnection, fence: Fences, names: tuple[str, ...], still_held: bool) -> Any:
        """The transaction of a driver that needs no coroutines for it; None: it has none for such a fence."""
        if found.driver.direct is None or still_held or not isinstance(fence, LeaseBase | Stamp):
            return None
        source = fence._grant if isinstance(fence, LeaseBase) else fence
        seq = fence._grant.next_seq() if isinstance(fence, LeaseBase) else fence.seq
        covered = tuple(map(check_name, names)) or source.names
        return found.driver.direct(found.connection, self._spec, self._mandatory, source, seq, covered)


class AsyncGuard(_GuardBase):
    """Guards one of the program's tables, for asyncio."""

    _colour = "asyncio"

    async def install(self, connection: Any, mode: str | None = None, *, replace: bool = False) -> None:
        """Create the marks and, if mandatory, the triggers. A new guard gets mode observe.

        If the connection is in a transaction, this is part of it, and you commit. Otherwise it is committed here.
        Installing the same guard again is harmless: the marks stay, and so does the mode unless one is given. If the
        installed guard has another name, rule, epoch column or `mandatory`: Misconfigured, unless `replace`.
        """
        await self._on(connection).install(mode, replace=replace)

    async def script(
        self, connection: Any, mode: str | None = None, *, replace: bool = False, transaction: bool = True
    ) -> str:
        """The SQL that `install` would run, for a migration.

        It must run in one transaction. `transaction=False` omits BEGIN and COMMIT, for tools that begin one themselves.
        """
        return await self._on(connection).script(mode, replace=replace, transaction=transaction)

    async def uninstall(self, connection: Any) -> None:
        """Restore the table. The marks stay: a guard that is installed later needs them to refuse old holders.

        If the connection is in a transaction, this is part of it, and you commit. Otherwise it is committed here.
        """
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
        """Trust only this authority (`lease.realm`) from now on. Raise its floor above the marks first."""
        await self._on(connection).adopt(realm)

    def transaction(
        self, connection: C, fence: Fences, *names: str, still_held: bool = False
    ) -> AbstractAsyncContextManager[C]:
        """`async with guard.transaction(connection, lease) as tx:` announce, run the block, commit.

        `still_held`: also ask the authority, which must be in the same database. LeaseLost if the lease is not held.
        """
        found = on(connection, self._colour)
        direct: AbstractAsyncContextManager[C] | None = self._direct(found, fence, names, still_held)
        if direct is not None:
            return direct
        carried = credential(fence, names, still_held=still_held)
        return AsyncTransaction(connection, found.table(self._spec, self._mandatory), carried)

    @asynccontextmanager
    async def hold(
        self,
        client: AsyncClient,
        connection: Any,
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        still_held: bool = False,
        **row: object,
    ) -> AsyncIterator[AsyncLease]:
        """`async with guard.hold(client, connection, id=42) as lease:` lease the row's name, and begin a transaction.

        `row`: the values of the template's columns. The transaction commits before the lease is released. The
        connection is idle while others have the lease: with few of them take `client.hold`, and a connection inside.
        """
        name = self._leased(client, row)
        leased = client.hold(name, ttl=ttl, wait=wait, max_hold=max_hold)
        async with leased as lease, self.transaction(connection, lease, still_held=still_held):
            yield lease

    async def announce(self, connection: Any, fence: Fences, *names: str) -> None:
        """Raise the marks in a transaction of its own, and commit it. Reads that begin afterwards are fenced."""
        await self._on(connection).announce(credential(fence, names, announcing=True))

    async def announce_within(
        self, connection: C, fence: Fences, *names: str, still_held: bool = False
    ) -> AsyncAnnounced[C]:
        """Announce in the transaction that the program has begun. Call `clear()` before its COMMIT."""
        carried = credential(fence, names, still_held=still_held)
        announced = AsyncAnnounced(connection, self._on(connection), carried)
        await announced._table.announce_within(carried)
        return announced

    async def peek(self, connection: Any, name: str, at_least: int = 0) -> Mark | None:
        """The mark of a name; Contended if it is below `at_least`.

        Later reads on this connection are at least as new as that mark.
        """
        return await self._on(connection).peek(name, at_least)

    def clause(self, connection: Any, fence: Fence, column: str = "epoch") -> AsyncClause:
        """SQL fragments that put the token into the program's own UPDATE, for a table with an epoch column."""
        return AsyncClause(on(connection, self._colour), self._spec, credential(fence), column)


class _Fenced(Generic[C]):
    """A credential, the guard that it is for, and the program's own connection."""

    def __init__(self, connection: C, table: TableGuard, credential: Credential) -> None:
        self._connection = connection
        self._table = table
        self._credential = credential


class AsyncTransaction(_Fenced[C], EnteredOnce):
    """A guarded transaction on the program's connection: begins, announces, and commits or rolls back."""

    async def __aenter__(self) -> C:
        self._enter()
        await self._table.enter(self._credential)
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._table.leave(exc)


class AsyncAnnounced(_Fenced[C]):
    """The stamps of an announcement in a transaction that the program itself commits."""

    async def clear(self) -> None:
        """Delete the stamps of this announcement. SQLite's COMMIT fails while they exist."""
        await self._table.clear(self._credential)

    async def __aenter__(self) -> C:
        return self._connection

    async def __aexit__(self, *exc: object) -> None:
        await self.clear()


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Guard(_GuardBase):
    """Guards one of the program's tables."""

    _colour = "blocking"

    def install(self, connection: Any, mode: str | None = None, *, replace: bool = False) -> None:
        """Create the marks and, if mandatory, the triggers. A new guard gets mode observe.

        If the connection is in a transaction, this is part of it, and you commit. Otherwise it is committed here.
        Installing the same guard again is harmless: the marks stay, and so does the mode unless one is given. If the
        installed guard has another name, rule, epoch column or `mandatory`: Misconfigured, unless `replace`.
        """
        step(self._on(connection).install(mode, replace=replace))

    def script(
        self, connection: Any, mode: str | None = None, *, replace: bool = False, transaction: bool = True
    ) -> str:
        """The SQL that `install` would run, for a migration.

        It must run in one transaction. `transaction=False` omits BEGIN and COMMIT, for tools that begin one themselves.
        """
        return step(self._on(connection).script(mode, replace=replace, transaction=transaction))

    def uninstall(self, connection: Any) -> None:
        """Restore the table. The marks stay: a guard that is installed later needs them to refuse old holders.

        If the connection is in a transaction, this is part of it, and you commit. Otherwise it is committed here.
        """
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
        """Trust only this authority (`lease.realm`) from now on. Raise its floor above the marks first."""
        step(self._on(connection).adopt(realm))

    def transaction(
        self, connection: C, fence: Fences, *names: str, still_held: bool = False
    ) -> AbstractContextManager[C]:
        """`with guard.transaction(connection, lease) as tx:` announce, run the block, commit.

        `still_held`: also ask the authority, which must be in the same database. LeaseLost if the lease is not held.
        """
        found = on(connection, self._colour)
        direct: AbstractContextManager[C] | None = self._direct(found, fence, names, still_held)
        if direct is not None:
            return direct
        carried = credential(fence, names, still_held=still_held)
        return Transaction(connection, found.table(self._spec, self._mandatory), carried)

    @contextmanager
    def hold(
        self,
        client: Client,
        connection: Any,
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        still_held: bool = False,
        **row: object,
    ) -> Iterator[Lease]:
        """`with guard.hold(client, connection, id=42) as lease:` lease the row's name, and begin a transaction.

        `row`: the values of the template's columns. The transaction commits before the lease is released. The
        connection is idle while others have the lease: with few of them take `client.hold`, and a connection inside.
        """
        name = self._leased(client, row)
        leased = client.hold(name, ttl=ttl, wait=wait, max_hold=max_hold)
        with leased as lease, self.transaction(connection, lease, still_held=still_held):
            yield lease

    def announce(self, connection: Any, fence: Fences, *names: str) -> None:
        """Raise the marks in a transaction of its own, and commit it. Reads that begin afterwards are fenced."""
        step(self._on(connection).announce(credential(fence, names, announcing=True)))

    def announce_within(
        self, connection: C, fence: Fences, *names: str, still_held: bool = False
    ) -> Announced[C]:
        """Announce in the transaction that the program has begun. Call `clear()` before its COMMIT."""
        carried = credential(fence, names, still_held=still_held)
        announced = Announced(connection, self._on(connection), carried)
        step(announced._table.announce_within(carried))
        return announced

    def peek(self, connection: Any, name: str, at_least: int = 0) -> Mark | None:
        """The mark of a name; Contended if it is below `at_least`.

        Later reads on this connection are at least as new as that mark.
        """
        return step(self._on(connection).peek(name, at_least))

    def clause(self, connection: Any, fence: Fence, column: str = "epoch") -> Clause:
        """SQL fragments that put the token into the program's own UPDATE, for a table with an epoch column."""
        return Clause(on(connection, self._colour), self._spec, credential(fence), column)


class Transaction(_Fenced[C], EnteredOnce):
    """A guarded transaction on the program's connection: begins, announces, and commits or rolls back."""

    def __enter__(self) -> C:
        self._enter()
        step(self._table.enter(self._credential))
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        step(self._table.leave(exc))


class Announced(_Fenced[C]):
    """The stamps of an announcement in a transaction that the program itself commits."""

    def clear(self) -> None:
        """Delete the stamps of this announcement. SQLite's COMMIT fails while they exist."""
        step(self._table.clear(self._credential))

    def __enter__(self) -> C:
        return self._connection

    def __exit__(self, *exc: object) -> None:
        self.clear()


# end


def __dir__() -> list[str]:
    return __all__
