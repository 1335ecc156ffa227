"""The program's own connections, as a guard uses them: PyMySQL's, mysqlclient's and asyncmy's, and those of our values.

Each method is a coroutine so that one implementation of the guard serves all; the blocking ones never suspend.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from typing import Any, Literal, Protocol, TypeVar

from fenced.net.pool import ConnectionBroken
from fenced.stores.mariadb.wire.connection import MariadbConnection, literal
from fenced.stores.mariadb.wire.failures import ServerRefusal
from fenced.values import timing
from fenced.values.contracts import Runtime

T = TypeVar("T")
State = Literal["idle", "open", "unknown", "closed"]
_IN_TRANSACTION = 1
"""The bit of the status that the server sends with each answer."""
LEAVE = "CALL fenced_guard.leave()"
UNDO = "CALL fenced_guard.undo()"
TOLD = "SELECT @fenced_refused"
"""The details of the last refusal on this connection."""


class MariadbSession(Protocol):
    """A connection on which we may run our own statements."""

    def state(self) -> State: ...

    async def begin(self, statement: str) -> None:
        """Run the statement that begins a transaction."""

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows."""

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The same as `run`, with the names of the columns."""

    async def change(self, sql: str, parameters: Sequence[object] = ()) -> int:
        """Run an UPDATE, and return how many rows it has changed; with some drivers, how many it has found."""

    async def together(self, work: Callable[[MariadbSession], Coroutine[Any, Any, T]]) -> T:
        """Do work of several statements on one connection, outside of a transaction of the program."""

    async def told(self) -> object:
        """The details of the last refusal on this connection."""

    async def leave(self, statement: str) -> None:
        """Commit, by `LEAVE` if the transaction was announced."""

    async def undo(self, statement: str) -> None:
        """Roll back, by `UNDO` or a plain ROLLBACK."""


class CursorSession:
    """A blocking connection, by its cursors."""

    __slots__ = ("connection",)

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def _cursor(self, kind: str) -> Any:
        return self.connection.cursor()

    async def begin(self, statement: str) -> None:
        await self.run(statement)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with closing(self._cursor("Cursor")) as cursor:
            cursor.execute(sql, parameters or None)
            return list(cursor.fetchall()) if cursor.description else []

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        with closing(self._cursor("Cursor")) as cursor:
            cursor.execute(sql, parameters or None)
            return named(cursor)

    async def change(self, sql: str, parameters: Sequence[object] = ()) -> int:
        with closing(self._cursor("Cursor")) as cursor:
            cursor.execute(sql, parameters or None)
            return int(cursor.rowcount)

    async def together(self, work: Callable[[MariadbSession], Coroutine[Any, Any, T]]) -> T:
        return await work(self)

    async def told(self) -> object:
        ((found,),) = await self.run(TOLD)
        return found

    async def leave(self, statement: str) -> None:
        await self.run(statement)

    async def undo(self, statement: str) -> None:
        await self.run(statement)

    def state(self) -> State:
        raise NotImplementedError


class PymysqlSession(CursorSession):
    """A PyMySQL connection. With autocommit off, its first statement begins a transaction: announce before that."""

    __slots__ = ()

    def _cursor(self, kind: str) -> Any:
        from pymysql import cursors

        return self.connection.cursor(getattr(cursors, kind))

    def state(self) -> State:
        if not self.connection.open:
            return "closed"
        if self.connection.server_status & _IN_TRANSACTION:
            return "open"
        # It does not read the status after a SELECT, which begins a transaction if autocommit is off.
        return "idle" if self.connection.get_autocommit() else "unknown"

    async def begin(self, statement: str) -> None:
        self.connection.query(statement)  # without a cursor, which costs as much as the statement

    async def leave(self, statement: str) -> None:
        self.connection.query(statement)


class MysqldbSession(CursorSession):
    """A connection of mysqlclient, which does not tell whether a transaction is open: the server checks."""

    __slots__ = ()

    def _cursor(self, kind: str) -> Any:
        from MySQLdb import cursors

        return self.connection.cursor(getattr(cursors, kind))

    def state(self) -> State:
        return "unknown" if self.connection.open else "closed"


class MariadbAsyncSession:
    """An asyncmy connection, or one from its pool."""

    __slots__ = ("connection",)

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def state(self) -> State:
        if not self.connection.connected:
            return "closed"
        # If autocommit is off, it does not note that a SELECT has begun a transaction, and that one has ended.
        idle = self.connection.get_autocommit() and not self.connection.get_transaction_status()
        return "idle" if idle else "unknown"

    async def begin(self, statement: str) -> None:
        await self.connection.query(statement)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        from asyncmy.cursors import Cursor

        async with self.connection.cursor(Cursor) as cursor:
            await cursor.execute(sql, tuple(parameters) or None)
            return list(await cursor.fetchall() or ()) if cursor.description else []

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        from asyncmy.cursors import DictCursor

        async with self.connection.cursor(DictCursor) as cursor:
            await cursor.execute(sql, tuple(parameters) or None)
            return list(await cursor.fetchall() or ()) if cursor.description else []

    async def change(self, sql: str, parameters: Sequence[object] = ()) -> int:
        from asyncmy.cursors import Cursor

        async with self.connection.cursor(Cursor) as cursor:
            await cursor.execute(sql, tuple(parameters) or None)
            return int(cursor.rowcount)

    async def together(self, work: Callable[[MariadbSession], Coroutine[Any, Any, T]]) -> T:
        return await work(self)

    async def told(self) -> object:
        ((found,),) = await self.run(TOLD)
        return found

    async def leave(self, statement: str) -> None:
        await self.connection.query(statement)

    async def undo(self, statement: str) -> None:
        with suppress(AttributeError):  # a cancelled statement has closed it: the server rolls back
            await self.connection.query(statement)


class WireSession:
    """A connection of our own values, with a deadline for each statement."""

    def __init__(self, connection: MariadbConnection, runtime: Runtime) -> None:
        self._connection = connection
        self._runtime = runtime
        self._state: State = "idle"

    def state(self) -> State:
        return self._state

    async def begin(self, statement: str) -> None:
        self._state = "open"
        await self.run(statement)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        sql = sql % tuple(map(_constant, parameters)) if parameters else sql
        try:
            results = await self._connection.run([sql], timing.call_until(self._runtime.now(), None))
        except ServerRefusal:
            raise
        except BaseException:
            self.close()  # its answer may still come
            raise
        return [tuple(row) for row in results[0].rows] if results else []

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def change(self, sql: str, parameters: Sequence[object] = ()) -> int:
        raise NotImplementedError

    async def together(self, work: Callable[[MariadbSession], Coroutine[Any, Any, T]]) -> T:
        return await work(self)

    async def told(self) -> object:
        ((found,),) = await self.run(TOLD)
        return found

    async def leave(self, statement: str) -> None:
        await self.run(statement)
        self._state = "idle"

    async def undo(self, statement: str) -> None:
        if self._state == "closed":
            return
        with suppress(ConnectionBroken):
            await self.run(statement)
            self._state = "idle"

    def close(self) -> None:
        self._state = "closed"
        self._connection.close()


def named(cursor: Any) -> list[dict[str, Any]]:
    """The rows of a cursor, with the names of the columns."""
    if not cursor.description:
        return []
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _constant(value: object) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return literal(value) if isinstance(value, str) else str(value)
