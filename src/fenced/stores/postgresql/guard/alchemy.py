"""SQLAlchemy's sessions and connections, as a guard uses them.

Every statement goes through SQLAlchemy, so that its events, its flush and its pool see it. Asynchronous sessions run
the same code inside `run_sync`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, TextClause, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fenced.errors import Misuse
from fenced.stores.postgresql.guard.sessions import Aborted, State
from fenced.stores.postgresql.guard.tables import PostgresqlTable

if TYPE_CHECKING:  # importing it needs greenlet, which a blocking program need not have
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

T = TypeVar("T")

_IN_ERROR = 3
"""libpq's transaction status of a transaction that can only be rolled back."""
_FAILED = "fenced.failed"
_CONSTANT = re.compile(r"'((?:[^']|'')*)'|\b\d+\b")


class AlchemySession:
    """A Session, or a Connection without one."""

    def __init__(self, target: Session | Connection) -> None:
        self._target = target
        self._bind = target if isinstance(target, Connection) else target.get_bind()
        self._began: object = None
        self._used: Connection | None = None

    async def _do(self, work: Callable[[], T]) -> T:
        return work()

    def state(self) -> State:
        if isinstance(self._target, Connection) and self._target.closed:
            return "closed"
        if self._used is not None and self._used.invalidated:  # its driver has found it closed
            return "closed"
        outer = isinstance(self._bind, Connection) and self._bind.in_transaction()
        return "open" if outer or self._target.get_transaction() is not None else "idle"

    async def begin(self, announce: str) -> None:
        await self._do(lambda: self._begin(announce))

    def _begin(self, announce: str) -> None:
        self._target.begin()
        if isinstance(self._target, Session):
            self._target.expire_all()  # objects that were read before the announcement are not fenced
        self._used = self._connection()
        _execute(self._used, announce)
        self._began = self._target.get_transaction()

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return await self._do(lambda: self._run(sql, parameters))

    def _run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        if self.state() == "open":
            return _execute(self._connection(), sql, parameters)
        with self._own_connection() as connection, connection.begin():
            return _execute(connection, sql, parameters)

    def place(self, number: int) -> str:
        return f"${number}" if "asyncpg" in self._bind.dialect.driver else "%s"

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        return await self._do(lambda: self._records(sql, parameters))

    def _records(self, sql: str, parameters: Sequence[object]) -> list[dict[str, Any]]:
        if self.state() == "open":
            return _mappings(self._connection(), sql, parameters)
        with self._own_connection() as connection, connection.begin():
            return _mappings(connection, sql, parameters)

    async def notified(self, channel: str, payload: str, seconds: float) -> bool | None:
        return None

    def _connection(self) -> Connection:
        return self._target if isinstance(self._target, Connection) else self._target.connection()

    async def run_all(self, statements: Sequence[str]) -> None:
        await self._do(lambda: _run_script(self._connection(), statements))

    async def run_in_own_transaction(self, statements: Sequence[str]) -> None:
        await self._do(lambda: self._run_in_own_transaction(statements))

    async def rollback_and(self, statement: str) -> None:
        await self.rollback()
        await self.run_in_own_transaction([statement])

    def _run_in_own_transaction(self, statements: Sequence[str]) -> None:
        with self._own_connection() as connection, connection.begin():
            _run_script(connection, statements)

    @contextmanager
    def _own_connection(self) -> Iterator[Connection]:
        """A connection whose transactions are not the Session's: no flush, no events, nothing expires."""
        if isinstance(self._bind, Connection):
            yield self._bind
        else:
            with self._bind.connect() as connection:
                yield connection

    async def flush(self) -> None:
        """Send the changes that the Session has not sent yet."""
        if isinstance(self._target, Session) and self._target.is_active:
            await self._do(self._target.flush)

    async def commit(self) -> None:
        await self._do(self._commit)

    def _commit(self) -> None:
        transaction = self._target.get_transaction()
        if transaction is None or transaction is not self._began:
            raise Misuse(
                "the transaction was ended inside the guarded block; let the block commit or roll back"
            )
        try:
            if not (transaction if isinstance(self._target, Connection) else self._target).is_active:
                raise Aborted
            connection = self._connection()
            event.listen(connection, "commit", _refuse_failed)  # called directly before COMMIT
            try:
                self._target.commit()
            finally:
                event.remove(connection, "commit", _refuse_failed)
        except Aborted:
            self._target.rollback()
            raise

    async def rollback(self) -> None:
        await self._do(self._target.rollback)


class AsyncAlchemySession(AlchemySession):
    """An AsyncSession, or an AsyncConnection without one."""

    def __init__(self, outer: AsyncSession | AsyncConnection) -> None:
        target = getattr(outer, "sync_session", None) or getattr(outer, "sync_connection", None)
        if target is None:
            raise Misuse("this connection is not open yet: enter it, or await its start()")
        super().__init__(target)
        self._outer = outer

    async def _do(self, work: Callable[[], T]) -> T:
        return await self._outer.run_sync(lambda _: work())


class AlchemyTable(PostgresqlTable):
    """A guard on a table, through SQLAlchemy."""

    _session: AlchemySession

    async def leave(self, error: BaseException | None) -> None:
        if error is None:
            try:
                await self._session.flush()
            except BaseException as failed:
                await super().leave(failed)  # as for an error of any other statement of the program
                raise
        await super().leave(error)


def _run_script(connection: Connection, statements: Sequence[str]) -> None:
    script = ";\n".join(statements)
    adapted: Any = connection.connection.dbapi_connection
    if hasattr(adapted, "run_async"):  # asyncpg's cursors take one statement at a time
        adapted.run_async(lambda driver: driver.execute(script))
    else:
        connection.exec_driver_sql(script, execution_options={"no_parameters": True})


def _execute(connection: Connection, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    if sql.startswith("SELECT fenced_guard.announce("):
        _expect_failures(connection)
        call, values = _bound(sql)
        result = connection.execute(_text(call), values)
    elif parameters:
        result = connection.exec_driver_sql(sql, tuple(parameters))
    else:
        result = connection.exec_driver_sql(sql, execution_options={"no_parameters": True})
    return [tuple(row) for row in result] if result.returns_rows else []


def _mappings(connection: Connection, sql: str, parameters: Sequence[object]) -> list[dict[str, Any]]:
    options = {} if parameters else {"execution_options": {"no_parameters": True}}
    result = connection.exec_driver_sql(sql, tuple(parameters) or None, **options)
    return [dict(row) for row in result.mappings()] if result.returns_rows else []


@lru_cache(maxsize=64)
def _text(call: str) -> TextClause:
    return text(call)


def _bound(call: str) -> tuple[str, dict[str, object]]:
    """The call with its constants as parameters: one text for all leases, so that drivers prepare it once."""
    values: dict[str, object] = {}

    def take(found: re.Match[str]) -> str:
        key = f"p{len(values)}"
        values[key] = int(found[0]) if found[1] is None else found[1].replace("''", "'")
        return f":{key}"

    return _CONSTANT.sub(take, call), values


def _expect_failures(connection: Connection) -> None:
    """Listen for failed statements, for drivers that do not report the state of the transaction."""
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise Misuse("this connection commits every statement (AUTOCOMMIT); a guard needs a transaction")
    connection.info.pop(_FAILED, None)
    if not event.contains(connection.engine, "handle_error", _note_failure):
        event.listen(connection.engine, "handle_error", _note_failure)


def _note_failure(context: ExceptionContext) -> None:
    if context.connection is not None and not context.connection.invalidated:
        context.connection.info[_FAILED] = True


def _refuse_failed(connection: Connection) -> None:
    """Roll back and raise Aborted, if the server would answer COMMIT with a rollback."""
    info = getattr(connection.connection.driver_connection, "info", None)
    status = getattr(info, "transaction_status", None)
    if status is None and connection.info.get(_FAILED):
        try:
            connection.exec_driver_sql("SELECT 1")
        except DBAPIError:
            status = _IN_ERROR
    if status == _IN_ERROR:
        connection.connection.rollback()
        raise Aborted
