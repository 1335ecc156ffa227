"""A guard on one of the program's tables, over one of the program's SQLite connections."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from fenced.errors import Contended, Misconfigured, Misuse
from fenced.guards.answers import one_stamp
from fenced.guards.engine import Registered
from fenced.guards.spec import Spec, as_script
from fenced.stores.sqlite.guard import install
from fenced.stores.sqlite.guard.marks import RefusalPending, SqliteMarks
from fenced.stores.sqlite.guard.refusals import translate
from fenced.stores.sqlite.guard.sessions import SqliteSession
from fenced.stores.sqlite.guard.transactions import GuardedConnection
from fenced.values.decision import Mark, Mode
from fenced.values.model import Credential, Stamp, check_name, check_realm


class SqliteTable:
    """The operations of a guard on a table, over one connection."""

    def __init__(self, spec: Spec, session: SqliteSession, mandatory: bool) -> None:
        self._spec = spec
        self._session = session
        self._marks = SqliteMarks(spec.table, mandatory, spec.rule)
        self._guarded: GuardedConnection | None = None

    @classmethod
    def of_program(cls, spec: Spec, session: SqliteSession, mandatory: bool) -> Self:
        """The guard of a program's own table."""
        install.check_table(spec)
        return cls(spec, session, mandatory)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return await self._session.run(sql, parameters)

    async def install(self, mode: str | None, *, replace: bool = False) -> None:
        await self._change(lambda: self.statements(mode, replace=replace))

    async def script(self, mode: str | None, *, replace: bool = False, transaction: bool = True) -> str:
        return as_script(await self.statements(mode, replace=replace), transaction=transaction)

    async def statements(self, mode: str | None, *, replace: bool = False) -> list[str]:
        parsed = Mode.parse(mode) if mode is not None else None
        try:
            return await install.script(
                self._spec, parsed, self._session.run, mandatory=self._marks.mandatory, replace=replace
            )
        except sqlite3.Error as error:
            raise translate(error) from error

    async def uninstall(self) -> None:
        await self._change(self.removal)

    async def removal(self) -> list[str]:
        try:
            return await install.uninstall(self._spec, self._session.run)
        except sqlite3.Error as error:
            raise translate(error) from error

    async def registered(self) -> list[Registered]:
        return await install.registered(self._session.run)

    def is_own(self, schema: str | None, table: str) -> bool:
        return table.startswith("fenced_")

    async def set_mode(self, mode: str, pattern: str, wait: float = 0.0) -> tuple[str, ...]:
        """Returns nothing: the change takes the one write lock, so no writing transaction is older than the change."""
        parsed, session = Mode.parse(mode), self._session
        _refuse_open_transaction(session)
        await self._marks.installed(session)
        try:
            await session.run("BEGIN IMMEDIATE")
            await install.set_mode(session.run, self._spec.table, parsed, pattern)
            await session.commit(())
        except sqlite3.Error as error:
            await session.rollback()
            raise translate(error) from error
        return ()

    async def adopt(self, realm: str) -> None:
        _refuse_open_transaction(self._session)
        change = f"UPDATE fenced_guard SET realm = '{check_realm(realm)}'"

        async def look() -> list[str]:
            return [change]

        await self._change(look)

    async def peek(self, name: str, at_least: int) -> Mark | None:
        try:
            mark = await self._marks.mark(self._session, check_name(name))
        except sqlite3.Error as error:
            raise translate(error) from error
        if at_least and (mark is None or mark.token < at_least):
            raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
        return mark

    async def enter(self, credential: Credential | None) -> None:
        stamp, names = _one(credential) if credential is not None else (None, ())
        self._guarded = GuardedConnection(self._marks, self._session, stamp, names)
        await self._guarded.enter()

    async def leave(self, error: BaseException | None) -> None:
        if self._guarded is not None:
            await self._guarded.leave(error)

    async def announce(self, credential: Credential) -> None:
        """Announce in a separate transaction and commit it: reads that begin afterwards are fenced."""
        stamp, names = _one(credential)
        guarded = GuardedConnection(self._marks, self._session, stamp, names, stamping=False)
        await guarded.enter()
        await guarded.leave(None)

    async def announce_within(self, credential: Credential) -> None:
        """Announce in the transaction that the program has begun: all names, or none."""
        stamp, names = _one(credential)
        session = self._session
        if not session.in_transaction:
            raise Misuse("begin a transaction first (BEGIN IMMEDIATE), or use transaction()")
        if await session.run("PRAGMA foreign_keys") == [(0,)]:
            raise Misconfigured("run PRAGMA foreign_keys = ON when you connect; a stamp needs it")
        try:
            await session.run("SAVEPOINT fenced_announce")
            try:
                for name in names:
                    if await session.run("SELECT 1 FROM fenced_stamp WHERE name = ?", (name,)):
                        raise Misuse(f"{name} has already been announced in this transaction")
                await self._marks.announce(session, stamp, names, stamping=True)
            except BaseException:
                await session.run("ROLLBACK TO fenced_announce")
                raise
            finally:
                await session.run("RELEASE fenced_announce")
        except sqlite3.Error as error:
            raise translate(error) from error
        except RefusalPending as refusing:
            raise refusing.error from None

    async def clear(self, credential: Credential) -> None:
        """Delete the stamps; COMMIT fails while they are there."""
        _, names = _one(credential)
        if self._session.in_transaction:
            for name in names:
                await self._session.run("DELETE FROM fenced_stamp WHERE name = ?", (name,))

    async def _change(self, look: Callable[[], Awaitable[Sequence[str]]]) -> None:
        """Run the statements that `look` returns, in the caller's transaction or else in a separate one.

        `look` runs under the write lock, so that nobody changes what it has read. In the caller's transaction a failure
        undoes only these statements.
        """
        session, joins = self._session, False
        try:
            joins = await session.join()
            await session.run("SAVEPOINT fenced_part" if joins else "BEGIN IMMEDIATE")
            for statement in await look():
                await session.run(statement)
            if joins:
                await session.run("RELEASE fenced_part")
            else:
                await session.commit(())
        except BaseException as error:
            with suppress(sqlite3.Error):  # some errors have already rolled back everything
                if joins:
                    await session.run("ROLLBACK TO fenced_part")
                    await session.run("RELEASE fenced_part")
                else:
                    await session.rollback()
            if isinstance(error, sqlite3.Error):
                raise translate(error) from error
            raise


def _one(credential: Credential) -> tuple[Stamp, tuple[str, ...]]:
    stamp = one_stamp(credential, "an SQLite guard")
    return stamp, credential.names or stamp.names


def _refuse_open_transaction(session: SqliteSession) -> None:
    if session.in_transaction:
        raise Misuse("this connection is in a transaction; commit or roll back first")
