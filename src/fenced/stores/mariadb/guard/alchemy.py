"""SQLAlchemy's sessions and connections, as a guard uses them.

The statements of a transaction go through SQLAlchemy, so that its events, its flush and its pool see them. Asynchronous
sessions run the same code inside `run_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, CursorResult, event
from sqlalchemy.orm import Session

from fenced.errors import Misuse
from fenced.runtime.blocking import step
from fenced.stores.mariadb.guard.sessions import LEAVE, TOLD, UNDO, CursorSession, MariadbSession, State
from fenced.stores.mariadb.guard.tables import MariadbTable

if TYPE_CHECKING:  # importing it needs greenlet, which a blocking program need not have
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

T = TypeVar("T")

_FINISH = "CALL fenced_guard.finish()"
_STAMPED = "fenced.stamped"
ENDED = "the transaction was ended inside the guarded block; let the block commit or roll back"


class MariadbAlchemySession:
    """A Session, or a Connection without one."""

    def __init__(self, target: Session | Connection) -> None:
        self._target = target
        self._bind = target if isinstance(target, Connection) else target.get_bind()
        self._began: object = None
        self._used: Connection | None = None
        self._raw: Any = None

    async def _do(self, work: Callable[[], T]) -> T:
        return work()

    def state(self) -> State:
        if isinstance(self._target, Connection) and self._target.closed:
            return "closed"
        if self._used is not None and self._used.invalidated:  # its driver has found it closed
            return "closed"
        outer = isinstance(self._bind, Connection) and self._bind.in_transaction()
        return "open" if outer or self._target.get_transaction() is not None else "idle"

    async def begin(self, statement: str) -> None:
        await self._do(lambda: self._begin(statement))

    def _begin(self, statement: str) -> None:
        self._target.begin()
        if isinstance(self._target, Session):
            self._target.expire_all()  # objects that were read before the announcement are not fenced
        self._used = self._connection()
        _refuse_autocommit(self._used)
        self._raw = self._used.connection.dbapi_connection
        _clear_when_returned(self._used)
        _execute(self._used, statement)
        self._began = self._target.get_transaction()

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return await self._do(lambda: self._run(sql, parameters))

    def _run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        if self.state() == "open":
            connection = self._connection()
            if sql.startswith("CALL fenced_guard.announce_within"):
                _refuse_autocommit(connection)
                _clear_when_returned(connection)
            return _execute(connection, sql, parameters)
        with self._own_connection() as connection, connection.begin():
            return _execute(connection, sql, parameters)

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        return await self._do(lambda: self._records(sql, parameters))

    def _records(self, sql: str, parameters: Sequence[object]) -> list[dict[str, Any]]:
        if self.state() == "open":
            return _mappings(self._connection(), sql, parameters)
        with self._own_connection() as connection, connection.begin():
            return _mappings(connection, sql, parameters)

    async def change(self, sql: str, parameters: Sequence[object] = ()) -> int:
        return await self._do(lambda: self._change(sql, parameters))

    def _change(self, sql: str, parameters: Sequence[object]) -> int:
        if self.state() == "open":
            return _sent(self._connection(), sql, parameters).rowcount
        with self._own_connection() as connection, connection.begin():
            return _sent(connection, sql, parameters).rowcount

    async def together(self, work: Callable[[MariadbSession], Coroutine[Any, Any, T]]) -> T:
        return await self._do(lambda: self._together(work))

    def _together(self, work: Callable[[MariadbSession], Coroutine[Any, Any, T]]) -> T:
        with self._own_connection() as connection:
            return step(work(_DriverSession(connection.connection.dbapi_connection)))

    def _connection(self) -> Connection:
        return self._target if isinstance(self._target, Connection) else self._target.connection()

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

    async def told(self) -> object:
        """On the connection of the block, although the transaction may be over."""
        return await self._do(self._told)

    def _told(self) -> object:
        if self._raw is None:
            ((found,),) = self._run(TOLD)
            return found
        cursor = self._raw.cursor()
        cursor.execute(TOLD)
        (found,) = cursor.fetchone()
        cursor.close()
        return found

    async def leave(self, statement: str) -> None:
        await self._do(lambda: self._leave(statement))

    def _leave(self, statement: str) -> None:
        transaction = self._target.get_transaction()
        if transaction is None or transaction is not self._began:
            raise Misuse(ENDED)
        if not (transaction if isinstance(self._target, Connection) else self._target).is_active:
            raise Misuse("nothing was committed: a statement failed inside the block; roll back")
        connection = self._connection()
        if statement != LEAVE:
            self._target.commit()
            return
        event.listen(connection, "commit", _finish)  # called directly before COMMIT
        try:
            self._target.commit()
        finally:
            event.remove(connection, "commit", _finish)

    async def undo(self, statement: str) -> None:
        await self._do(lambda: self._undo(statement))

    def _undo(self, statement: str) -> None:
        # The variables are the connection's, which the rollback gives back to the pool. So the statement comes first.
        try:
            if self._used is not None and not self._used.closed and not self._used.invalidated:
                _on_driver(self._raw, statement)
                self._used.info.pop(_STAMPED, None)
        finally:
            self._target.rollback()


class _DriverSession(CursorSession):
    """The connection of the driver, below SQLAlchemy, which would begin transactions on it."""

    def state(self) -> State:
        return "unknown"


class MariadbAsyncAlchemySession(MariadbAlchemySession):
    """An AsyncSession, or an AsyncConnection without one."""

    def __init__(self, outer: AsyncSession | AsyncConnection) -> None:
        target = getattr(outer, "sync_session", None) or getattr(outer, "sync_connection", None)
        if target is None:
            raise Misuse("this connection is not open yet: enter it, or await its start()")
        super().__init__(target)
        self._outer = outer

    async def _do(self, work: Callable[[], T]) -> T:
        return await self._outer.run_sync(lambda _: work())


class MariadbAlchemyTable(MariadbTable):
    """A guard on a table, through SQLAlchemy."""

    _session: MariadbAlchemySession

    async def leave(self, error: BaseException | None) -> None:
        if error is None:
            try:
                await self._session.flush()
            except BaseException as failed:
                await super().leave(failed)  # as for an error of any other statement of the program
                raise
        await super().leave(error)


def _sent(connection: Connection, sql: str, parameters: Sequence[object]) -> CursorResult[Any]:
    if parameters:
        return connection.exec_driver_sql(sql, tuple(parameters))
    return connection.exec_driver_sql(sql, execution_options={"no_parameters": True})


def _execute(connection: Connection, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    result = _sent(connection, sql, parameters)
    return [tuple(row) for row in result] if result.returns_rows else []


def _mappings(connection: Connection, sql: str, parameters: Sequence[object]) -> list[dict[str, Any]]:
    result = _sent(connection, sql, parameters)
    return [dict(row) for row in result.mappings()] if result.returns_rows else []


def _on_driver(raw: Any, statement: str) -> None:
    cursor = raw.cursor()
    cursor.execute(statement)
    cursor.close()


def _refuse_autocommit(connection: Connection) -> None:
    """SQLAlchemy would not send the COMMIT of a connection that commits every statement."""
    driver: Any = connection.connection.driver_connection
    if driver.get_autocommit():
        raise Misuse("this connection commits every statement (AUTOCOMMIT); a guard needs a transaction")


def _clear_when_returned(connection: Connection) -> None:
    """A stamp does not outlive its transaction: forget it when the connection goes back to its pool, in any way."""
    connection.info[_STAMPED] = True
    pool = connection.engine.pool
    if not event.contains(pool, "reset", _returned):
        event.listen(pool, "reset", _returned)


def _returned(dbapi_connection: Any, record: Any, state: Any) -> None:
    if record.info.pop(_STAMPED, None) and not state.terminate_only:
        with suppress(Exception):  # broken: the pool finds that out, and its variables are gone
            _on_driver(dbapi_connection, UNDO)


def _finish(connection: Connection) -> None:
    connection.exec_driver_sql(_FINISH, execution_options={"no_parameters": True})
    connection.info.pop(_STAMPED, None)
