"""One guarded transaction on an SQLite connection. We begin it, announce in it, and end it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from fenced.errors import Misuse
from fenced.guards.answers import entered_again
from fenced.guards.engine import StampSource
from fenced.guards.spec import Spec
from fenced.runtime.blocking import step
from fenced.stores.sqlite.guard.marks import FOREIGN_KEYS, RefusalPending, SqliteMarks
from fenced.stores.sqlite.guard.refusals import translate
from fenced.stores.sqlite.guard.sessions import (
    READY,
    PlainSession,
    SqliteSession,
    TransactionEnded,
    commit,
    reenter,
)
from fenced.values.model import Stamp


class GuardedConnection:
    """One guarded transaction on a connection. We begin it, announce in it, and end it."""

    __slots__ = ("_marks", "_session", "_stamp", "_stamping", "names")

    def __init__(
        self,
        marks: SqliteMarks,
        session: SqliteSession,
        stamp: Stamp | None,
        names: Sequence[str],
        stamping: bool = True,
    ) -> None:
        self._marks = marks
        self._session = session
        self._stamp = stamp
        self.names = names
        self._stamping = stamping

    async def enter(self) -> None:
        """Begin and announce. A holder that announced before, and still has the newest mark, needs two statements."""
        self.refuse_nesting()
        stamp, session = self._stamp, self._session
        left: Sequence[str] = self.names
        try:
            if stamp is not None and self._stamping and self._may_reenter(stamp):
                left = await self._reenter(stamp)
            else:
                await self._marks.begin(session)
                if stamp is not None and self._stamping:
                    await self._marks.make_ready(session)
        except BaseException:
            await session.rollback()
            raise
        if left and (stamp is not None or not self._marks.mandatory):
            await self.announce(left)

    def refuse_nesting(self) -> None:
        if self._session.in_transaction:
            raise Misuse(
                "this connection is in a transaction already: commit it first, or use announce_within "
                "(a connection with autocommit=False is always in one, and can only use announce_within)"
            )

    def _may_reenter(self, stamp: Stamp) -> bool:
        return self._marks.may_be_retry and covers(stamp, self.names)

    async def _reenter(self, stamp: Stamp) -> Sequence[str]:
        try:
            return await self._session.reenter(self._marks.guard, stamp, self.names)
        except sqlite3.Error as error:
            return await self.recover(error)

    async def recover(self, error: sqlite3.Error) -> Sequence[str]:
        """After an error of `reenter`: make the connection ready if that was missing; return the names to announce."""
        try:
            if not str(error).startswith("no such"):
                raise translate(error) from error
            if READY in str(error):
                await self._marks.make_ready(self._session)
        except BaseException:
            await self._session.rollback()
            raise
        return self.names  # if no guard is installed, announcing raises that

    async def announce(self, names: Sequence[str]) -> None:
        try:
            if self._stamp is None:
                await self._marks.record_missing_stamp(self._session, names)
            else:
                await self._marks.announce(self._session, self._stamp, names, stamping=self._stamping)
        except BaseException as error:
            await self.leave(error)
            if isinstance(error, sqlite3.Error):
                raise translate(error) from error
            raise

    async def leave(self, error: BaseException | None) -> None:
        """Commit, or roll back after an error. A refusal is raised as its typed error; other errors are left alone."""
        if error is None:
            await self._commit()
            return
        committed = await self._is_commit(error)
        await self._session.rollback()
        if committed:
            raise Misuse(
                "COMMIT belongs to the block: it ends the guarded transaction; nothing was committed"
            ) from error
        refused = await self._marks.refusal(self._session, error, self._stamp, self.names)
        if refused is not None:
            raise refused from (None if isinstance(error, RefusalPending) else error)

    async def _is_commit(self, error: BaseException) -> bool:
        """Whether the program's own COMMIT failed, because a stamp is left: nothing else here has foreign keys."""
        if not isinstance(error, sqlite3.IntegrityError) or "FOREIGN KEY" not in str(error):
            return False
        return self._stamp is not None and not await self._session.run(FOREIGN_KEYS)

    async def _commit(self) -> None:
        stamped = self.names if self._stamp is not None and self._stamping else ()
        try:
            if not self._session.in_transaction:
                raise TransactionEnded
            await self._session.commit(stamped)
        except BaseException as error:  # noqa: BLE001 - raised again as a typed error
            await self.commit_failed(error)

    async def commit_failed(self, error: BaseException) -> NoReturn:
        """Roll back, delete the stamps, and raise the typed error."""
        await self._session.rollback()
        if isinstance(error, TransactionEnded):
            for statement in ("BEGIN IMMEDIATE", "DELETE FROM fenced_stamp", "COMMIT"):
                await self._session.run(statement)
            raise Misuse(
                "the transaction was ended inside the guarded block; let the block commit or roll back"
            ) from None
        if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.IntegrityError):
            raise translate(error) from error
        raise error  # a deferred constraint of the program's own tables, or a cancellation


class SqliteTransaction:
    """A guarded transaction on a connection of sqlite3, as a context manager.

    It does the same as `GuardedConnection`. The statements of nearly every transaction are called without coroutines,
    which would cost as much as the statements.
    """

    __slots__ = ("_connection", "_entered", "_marks", "_names", "_seq", "_source")

    def __init__(
        self,
        connection: sqlite3.Connection,
        spec: Spec,
        mandatory: bool,
        source: StampSource,
        seq: int | None,
        names: tuple[str, ...],
    ) -> None:
        self._marks = SqliteMarks(spec.table, mandatory, spec.rule)
        self._connection = connection
        self._source = source
        self._seq = seq
        self._names = names
        self._entered = False

    def __enter__(self) -> sqlite3.Connection:
        if self._entered:
            raise entered_again()
        self._entered = True
        connection, source, names = self._connection, self._source, self._names
        try:
            nested = connection.in_transaction
        except sqlite3.ProgrammingError as error:  # closed
            raise translate(error) from error
        if nested or not self._marks.may_be_retry or not covers(source, names):
            step(self._guarded().enter())
            return connection
        try:
            left = reenter(connection, self._marks.guard, source, self._seq, names)
        except sqlite3.Error as error:
            left = step(self._guarded().recover(error))
        except BaseException:  # Ctrl-C, after BEGIN
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
        except BaseException as error:  # noqa: BLE001 - raised again as a typed error
            step(self._guarded().commit_failed(error))

    def _guarded(self) -> GuardedConnection:
        source = self._source
        stamp = Stamp(source.realm, source.names, source.token, self._seq, source.grant)
        names = stamp.names if self._names is source.names else self._names
        return GuardedConnection(self._marks, PlainSession(self._connection), stamp, names)


def covers(source: StampSource, names: Sequence[str]) -> bool:
    """Whether `reenter` may be tried. It compares marks, and does not check which names a stamp covers."""
    return names is source.names or set(names) <= set(source.names)
