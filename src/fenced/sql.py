"""Guards for the program's own SQL tables, on the program's own connections.

    orders = fenced.sql.Guard(table="orders", name="orders/{id}")
    orders.install(connection, mode="enforce")
    with orders.transaction(connection, lease) as tx:
        tx.execute("UPDATE orders SET qty = qty + 1 WHERE id = 42")

The database itself refuses a stale holder's write, atomically with the write. SQLite is the engine here:
`sqlite3` connections for Guard, `aiosqlite` ones for AsyncGuard.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from fenced.client import Lease
from fenced.contracts import Trait
from fenced.decision import Mark, Mode, Rule, Verdict
from fenced.errors import (
    AlreadyApplied,
    Contended,
    Misconfigured,
    Misuse,
    Refused,
    Unsupported,
    shown,
)
from fenced.guarding import Fence, announcement, write_stamp
from fenced.guards.answers import error_for
from fenced.guards.sqlite import SqliteGuard, install, set_mode
from fenced.guards.sqlite.fencing import Fence as SqliteFence
from fenced.guards.sqlite.fencing import Guarded, Refusing, Session, covers, translate, verdict_in
from fenced.guards.sqlite.sessions import AioSession, PlainSession, Source, commit, reenter
from fenced.model import Stamp, check_name, check_realm
from fenced.runtime.blocking import step

C = TypeVar("C")

__all__ = ["AsyncGuard", "Guard", "refusal"]


def refusal(error: BaseException) -> Refused | AlreadyApplied | None:
    """The typed refusal behind a driver's error, for code outside a wrapper; None if it is none of ours."""
    raised = verdict_in(error)
    if raised is None:
        return None
    typed = error_for(raised[0], name=None, table=raised[1])
    return typed if isinstance(typed, Refused | AlreadyApplied) else None


class _GuardFace:
    """What both guards share: which table, which name, which rule."""

    traits: tuple[Trait, ...] = (
        Trait(
            "as-durable-as-you", "Marks are committed with your rows, as durably as your connection commits."
        ),
        *(trait for trait in SqliteGuard.traits if trait.key != "durable-marks"),
    )

    def __init__(self, *, table: str, name: str, rule: Rule = "retry", mandatory: bool = True) -> None:
        self._spec = install.Spec(table, name, rule)
        self._fence = SqliteFence(table, mandatory)

    @property
    def table(self) -> str:
        return self._spec.table

    def name_for(self, **values: object) -> str:
        """The name to lease for the row with these values of the template's columns."""
        return self._spec.name_for(**values)

    def _clause_parts(self, fence: Fence, column: str) -> tuple[Stamp, str]:
        if self._spec.rule == "sequenced":
            raise Unsupported("a clause knows the token alone; rule sequenced needs transaction()")
        return write_stamp(fence), install.check_identifier(column, "column")

    async def _statements(self, session: Session, mode: str | None) -> list[str]:
        parsed = Mode.parse(mode) if mode is not None else None
        try:
            return await install.script(self._spec, parsed, session.run, mandatory=self._fence.mandatory)
        except sqlite3.Error as error:
            raise translate(error) from error

    async def _install(self, session: Session, mode: str | None) -> None:
        await _in_transaction(session, await self._statements(session, mode))

    async def _script(self, session: Session, mode: str | None) -> str:
        statements = await self._statements(session, mode)
        return "BEGIN;\n\n" + "\n\n".join(f"{line.rstrip(';')};" for line in statements) + "\n\nCOMMIT;\n"

    async def _uninstall(self, session: Session) -> None:
        await _in_transaction(session, await install.uninstall(self._spec, session.run))

    async def _set_mode(self, session: Session, mode: str, pattern: str) -> None:
        parsed = Mode.parse(mode)
        _refuse_open_transaction(session)
        await self._fence.installed(session)
        try:
            await session.run("BEGIN IMMEDIATE")
            await set_mode(session.run, self.table, parsed, pattern)
            await session.run("COMMIT")
        except sqlite3.Error as error:
            await session.rollback()
            raise translate(error) from error

    async def _adopt(self, session: Session, realm: str) -> None:
        await _in_transaction(session, [f"UPDATE fenced_guard SET realm = '{check_realm(realm)}'"])

    async def _peek(self, session: Session, name: str, at_least: int) -> Mark | None:
        try:
            mark = await self._fence.mark(session, check_name(name))
        except sqlite3.Error as error:
            raise translate(error) from error
        if at_least and (mark is None or mark.token < at_least):
            raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
        return mark


def _refuse_open_transaction(session: Session) -> None:
    if session.in_transaction:
        raise Misuse("this connection is in a transaction; commit or roll back first")


async def _in_transaction(session: Session, statements: Sequence[str]) -> None:
    _refuse_open_transaction(session)
    try:
        await session.run("BEGIN IMMEDIATE")
        for statement in statements:
            await session.run(statement)
        await session.run("COMMIT")
    except sqlite3.Error as error:
        raise translate(error) from error
    finally:
        if session.in_transaction:
            await session.rollback()


class Clause:
    """Fragments for the program's own UPDATE: `SET ..., {assign} WHERE ... AND {where}`.

    Tells tokens apart, not grants, and fences no read: announce first, or use `transaction`.
    """

    def __init__(self, stamp: Stamp, table: str, column: str, rule: Rule) -> None:
        below = "<" if rule == "once" else "<="
        self.assign = f'"{column}" = {stamp.token}'
        self.where = f'coalesce("{column}", 0) {below} {stamp.token}'
        self._stamp = stamp
        self._rule = rule
        self._table = table
        self._select = f'SELECT "{column}" FROM "{table}" WHERE '

    async def _admitted(
        self, session: Session, rowcount: int, row: str, parameters: Sequence[object]
    ) -> bool:
        if rowcount > 0:
            return True
        rows = await session.run(self._select + row, parameters)
        if not rows:
            return False
        mark = Mark(int(rows[0][0]), "", 0) if rows[0][0] else None
        if mark is None or mark.token < self._stamp.token + (self._rule != "once"):
            return False  # something else in the WHERE kept the row out
        verdict = Verdict.STALE if mark.token > self._stamp.token else Verdict.DUPLICATE
        raise error_for(verdict, name=None, stamp=self._stamp, mark=mark, table=self._table)


class PlainClause(Clause):
    def admitted(
        self, connection: sqlite3.Connection, rowcount: int, row: str, parameters: Sequence[object] = ()
    ) -> bool:
        """What a rowcount means: True changed, False no such row; StaleToken when a newer holder was there.

        `row` is the condition that picks the row, without the clause. Call it in the same transaction, for a
        statement that picks one row; after RETURNING, fetch before you read the rowcount.
        """
        return step(self._admitted(_plain(connection), rowcount, row, parameters))


class AioClause(Clause):
    async def admitted(
        self, connection: Any, rowcount: int, row: str, parameters: Sequence[object] = ()
    ) -> bool:
        """What a rowcount means: True changed, False no such row; StaleToken when a newer holder was there.

        `row` is the condition that picks the row, without the clause. Call it in the same transaction, for a
        statement that picks one row; after RETURNING, fetch before you read the rowcount.
        """
        return await self._admitted(_aio(connection), rowcount, row, parameters)


class Guard(_GuardFace):
    """Guards one table of the program's own. `connect` is needed for `announce` alone."""

    def __init__(
        self,
        *,
        table: str,
        name: str,
        rule: Rule = "retry",
        mandatory: bool = True,
        connect: Callable[[], sqlite3.Connection] | None = None,
    ) -> None:
        super().__init__(table=table, name=name, rule=rule, mandatory=mandatory)
        self._connect = connect

    def install(self, connection: sqlite3.Connection, mode: str | None = None) -> None:
        """Create the marks and, if mandatory, the triggers. A new guard observes.

        Again is harmless: the marks stay, and so does the mode unless one is given.
        """
        step(self._install(_plain(connection), mode))

    def script(self, connection: sqlite3.Connection, mode: str | None = None) -> str:
        """The SQL that `install` would run, for a migration."""
        return step(self._script(_plain(connection), mode))

    def uninstall(self, connection: sqlite3.Connection) -> None:
        """Leave the table as it was. The marks stay, so that a later guard does not forget them."""
        step(self._uninstall(_plain(connection)))

    def set_mode(self, connection: sqlite3.Connection, mode: str, pattern: str = "*") -> None:
        """Switch the stage of the rollout for the names that match."""
        step(self._set_mode(_plain(connection), mode, pattern))

    def adopt(self, connection: sqlite3.Connection, realm: str) -> None:
        """Trust this authority (`lease.realm`) from now on, and no other; after a move, and after its `raise`."""
        step(self._adopt(_plain(connection), realm))

    def transaction(self, connection: sqlite3.Connection, fence: Fence, *names: str) -> Transaction:
        """`with guard.transaction(connection, lease) as tx:` announced first, then yours, then committed."""
        if not isinstance(connection, sqlite3.Connection):
            raise _unsupported(connection)
        if isinstance(fence, Lease):
            hold = fence._hold
            covered = _named(names) if names else hold.names
            return Transaction(self._fence, connection, hold, hold.next_seq(), covered)
        stamp = write_stamp(fence)
        return Transaction(self._fence, connection, stamp, stamp.seq, _named(names) or stamp.names)

    def announce(self, fence: Fence, *names: str) -> None:
        """Raise the marks on a connection of its own, and commit: reads that follow are fenced."""
        if self._connect is None:
            raise Misuse("announce() needs Guard(connect=...): a function that opens a connection")
        connection = self._connect()
        try:
            stamp = announcement(fence)
            guarded = Guarded(self._fence, _plain(connection), stamp, names or stamp.names, stamping=False)
            step(guarded.enter())
            step(guarded.leave(None))
        finally:
            connection.close()

    def announce_on(self, connection: sqlite3.Connection, fence: Fence, *names: str) -> Announced:
        """Announce in the transaction that the program began itself; `clear()` before its COMMIT."""
        stamp, session = write_stamp(fence), _plain(connection)
        covered = _named(names) or stamp.names
        step(_announce_on(self._fence, session, stamp, covered))
        return Announced(session, covered)

    def peek(self, connection: sqlite3.Connection, name: str, at_least: int = 0) -> Mark | None:
        """The mark of a name; Contended while no token as high as `at_least` has been seen.

        What is read afterwards on this connection is at least as new.
        """
        return step(self._peek(_plain(connection), name, at_least))

    def clause(self, fence: Fence, column: str = "epoch") -> PlainClause:
        """Fragments that put the token into the program's own UPDATE, for a table with an epoch column."""
        stamp, checked = self._clause_parts(fence, column)
        return PlainClause(stamp, self.table, checked, self._spec.rule)


class Transaction:
    """A guarded transaction on the program's own connection.

    It goes the way of `Guarded`; what nearly every transaction needs is called without coroutines.
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

    def _guarded(self) -> Guarded:
        source = self._source
        stamp = Stamp(source.realm, source.names, source.token, self._seq, source.grant)
        names = stamp.names if self._names is source.names else self._names
        return Guarded(self._fence, _plain(self._connection), stamp, names)


class Announced:
    """Stamps in a transaction that the program commits itself."""

    def __init__(self, session: PlainSession, names: Sequence[str]) -> None:
        self._session = session
        self._names = names

    def clear(self) -> None:
        """Take its stamps out; COMMIT fails while they are in."""
        step(_clear(self._session, self._names))

    def __enter__(self) -> sqlite3.Connection:
        return self._session.connection

    def __exit__(self, *exc: object) -> None:
        self.clear()


class AsyncGuard(_GuardFace):
    """Guards one table of the program's own, for asyncio. `connect` is needed for `announce` alone."""

    def __init__(
        self,
        *,
        table: str,
        name: str,
        rule: Rule = "retry",
        mandatory: bool = True,
        connect: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        super().__init__(table=table, name=name, rule=rule, mandatory=mandatory)
        self._connect = connect

    async def install(self, connection: Any, mode: str | None = None) -> None:
        """Create the marks and, if mandatory, the triggers. A new guard observes.

        Again is harmless: the marks stay, and so does the mode unless one is given.
        """
        await self._install(_aio(connection), mode)

    async def script(self, connection: Any, mode: str | None = None) -> str:
        """The SQL that `install` would run, for a migration."""
        return await self._script(_aio(connection), mode)

    async def uninstall(self, connection: Any) -> None:
        """Leave the table as it was. The marks stay, so that a later guard does not forget them."""
        await self._uninstall(_aio(connection))

    async def set_mode(self, connection: Any, mode: str, pattern: str = "*") -> None:
        """Switch the stage of the rollout for the names that match."""
        await self._set_mode(_aio(connection), mode, pattern)

    async def adopt(self, connection: Any, realm: str) -> None:
        """Trust this authority (`lease.realm`) from now on, and no other; after a move, and after its `raise`."""
        await self._adopt(_aio(connection), realm)

    def transaction(self, connection: C, fence: Fence, *names: str) -> AsyncTransaction[C]:
        """`async with guard.transaction(connection, lease) as tx:` announced first, then yours."""
        stamp = write_stamp(fence)
        return AsyncTransaction(
            connection, Guarded(self._fence, _aio(connection), stamp, names or stamp.names)
        )

    async def announce(self, fence: Fence, *names: str) -> None:
        """Raise the marks on a connection of its own, and commit: reads that follow are fenced."""
        if self._connect is None:
            raise Misuse("announce() needs AsyncGuard(connect=...): a coroutine function that connects")
        connection = await self._connect()
        try:
            stamp = announcement(fence)
            guarded = Guarded(self._fence, _aio(connection), stamp, names or stamp.names, stamping=False)
            await guarded.enter()
            await guarded.leave(None)
        finally:
            await connection.close()

    async def announce_on(self, connection: Any, fence: Fence, *names: str) -> AsyncAnnounced:
        """Announce in the transaction that the program began itself; `clear()` before its COMMIT."""
        stamp, session = write_stamp(fence), _aio(connection)
        covered = _named(names) or stamp.names
        await _announce_on(self._fence, session, stamp, covered)
        return AsyncAnnounced(session, covered)

    async def peek(self, connection: Any, name: str, at_least: int = 0) -> Mark | None:
        """The mark of a name; Contended while no token as high as `at_least` has been seen.

        What is read afterwards on this connection is at least as new.
        """
        return await self._peek(_aio(connection), name, at_least)

    def clause(self, fence: Fence, column: str = "epoch") -> AioClause:
        """Fragments that put the token into the program's own UPDATE, for a table with an epoch column."""
        stamp, checked = self._clause_parts(fence, column)
        return AioClause(stamp, self.table, checked, self._spec.rule)


class AsyncTransaction(Generic[C]):
    """A guarded transaction on the program's own connection."""

    def __init__(self, connection: C, guarded: Guarded) -> None:
        self._connection = connection
        self._guarded = guarded

    async def __aenter__(self) -> C:
        await self._guarded.enter()
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._guarded.leave(exc)


class AsyncAnnounced:
    """Stamps in a transaction that the program commits itself."""

    def __init__(self, session: AioSession, names: Sequence[str]) -> None:
        self._session = session
        self._names = names

    async def clear(self) -> None:
        """Take its stamps out; COMMIT fails while they are in."""
        await _clear(self._session, self._names)

    async def __aenter__(self) -> Any:
        return self._session.connection

    async def __aexit__(self, *exc: object) -> None:
        await self.clear()


def _named(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(check_name(name) for name in names)


async def _announce_on(fence: SqliteFence, session: Session, stamp: Stamp, names: Sequence[str]) -> None:
    """Announce in an open transaction: all names, or none of them."""
    if not session.in_transaction:
        raise Misuse("begin a transaction first (BEGIN IMMEDIATE), or use transaction()")
    if await session.run("PRAGMA foreign_keys") == [(0,)]:
        raise Misconfigured("run PRAGMA foreign_keys = ON when you connect; a stamp needs it")
    try:
        await session.run("SAVEPOINT fenced_announce")
        try:
            for name in names:
                if await session.run("SELECT 1 FROM fenced_stamp WHERE name = ?", (name,)):
                    raise Misuse(f"{name} is stamped in this transaction already")
            await fence.announce(session, stamp, names, stamping=True)
        except BaseException:
            await session.run("ROLLBACK TO fenced_announce")
            raise
        finally:
            await session.run("RELEASE fenced_announce")
    except sqlite3.Error as error:
        raise translate(error) from error
    except Refusing as refusing:
        raise refusing.error from None


async def _clear(session: Session, names: Sequence[str]) -> None:
    if session.in_transaction:
        for name in names:
            await session.run("DELETE FROM fenced_stamp WHERE name = ?", (name,))


def _plain(connection: object) -> PlainSession:
    if isinstance(connection, sqlite3.Connection):
        return PlainSession(connection)
    raise _unsupported(connection)


def _unsupported(connection: object) -> Unsupported:
    return Unsupported(f"a guard works on sqlite3 connections, not on {shown(type(connection))}")


def _aio(connection: object) -> AioSession:
    if type(connection).__module__.partition(".")[0] == "aiosqlite":
        return AioSession(connection)
    raise Unsupported(f"an async guard works on aiosqlite connections, not on {shown(type(connection))}")
