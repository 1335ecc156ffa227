"""The program's own connections, as a guard uses them: psycopg's in both colours, and asyncpg's.

Each method is a coroutine so that one implementation of the fence serves all; the blocking ones never suspend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from fenced.errors import Misuse

State = Literal["idle", "open", "failed", "closed"]


class Aborted(Exception):
    """COMMIT rolled back: a statement had failed before, and the program went on."""


class PostgresqlSession(Protocol):
    """A connection on which we may run our own statements."""

    def state(self) -> State: ...

    async def begin(self, announce: str) -> None:
        """Begin a transaction and announce in it, in one message where the driver lets us begin."""

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a statement in the open transaction, and return its rows."""

    def place(self, number: int) -> str:
        """How the driver writes the parameter with this number, from 1 on."""

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The same as `run`, with the names of the columns."""

    async def notified(self, channel: str, payload: str, seconds: float) -> bool | None:
        """Wait until another session notifies, at most so long. None: the driver cannot."""

    async def run_all(self, statements: Sequence[str]) -> None:
        """Run statements in the open transaction. One of them may be a text of several."""

    async def run_in_own_transaction(self, statements: Sequence[str]) -> None:
        """Run statements in a separate transaction, in one message where the driver lets us begin."""

    async def rollback_and(self, statement: str) -> None:
        """Roll back, and run a statement in a separate transaction; in one message where the driver can."""

    async def commit(self) -> None:
        """Commit; Aborted when the server rolled back instead."""

    async def rollback(self) -> None:
        """Roll back, if a transaction is open and the connection is not closed."""


_STATES: tuple[State, ...] = ("idle", "closed", "open", "failed", "closed")
"""By libpq's transaction status: idle, active, in a transaction, in a failed one, unknown."""


_STILL_STAMPED_COMMIT = "SELECT fenced_guard.still_stamped(); COMMIT"
"""COMMIT, but fail if the announced transaction was ended inside the block and another one has begun."""


def _commit_after(first: str) -> str:
    """The COMMIT for a transaction that began with this statement. Only an announced one has a stamp to check."""
    return _STILL_STAMPED_COMMIT if first.startswith("SELECT fenced_guard.announce") else "COMMIT"


def _script(*statements: str) -> str:
    return ";\n".join(statements)


def _begin(connection: Any) -> str:
    """BEGIN with the isolation level and the other properties that this connection has."""
    words = ["BEGIN"]
    if connection.isolation_level is not None:
        words.append(f"ISOLATION LEVEL {connection.isolation_level.name.replace('_', ' ')}")
    if connection.read_only is not None:
        words.append("READ ONLY" if connection.read_only else "READ WRITE")
    if connection.deferrable is not None:
        words.append("DEFERRABLE" if connection.deferrable else "NOT DEFERRABLE")
    return " ".join(words)


def _has_rows(cursor: Any) -> bool:
    """Whether the statement returns rows. `cursor.description` would make an object for each column."""
    if cursor.pgresult is None:
        raise Misuse(
            "this connection is in pipeline mode, where an answer comes later: leave the pipeline first"
        )
    return bool(cursor.pgresult.nfields)


class PsycopgSession:
    """A psycopg connection. With autocommit off, psycopg begins transactions implicitly, so we send no BEGIN."""

    __slots__ = ("_commit", "_made", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._commit = b"COMMIT"
        self._made: Any = None

    def state(self) -> State:
        found: State = _STATES[self.connection.pgconn.transaction_status]
        return found

    @property
    def _cursor(self) -> Any:
        """One for all statements of ours: psycopg needs as long to make one as to send a statement. Not with the
        program's row factory: some refuse rows whose columns have one name."""
        if self._made is None:
            from psycopg.rows import tuple_row

            self._made = self.connection.cursor(row_factory=tuple_row)
        return self._made

    async def _execute(self, sql: bytes) -> Any:
        # Not prepared: with a stamp in it, a statement is sent once.
        return self._cursor.execute(sql, prepare=False)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        from psycopg.rows import tuple_row

        with self.connection.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(sql.encode(), parameters or None)
            return cursor.fetchall() if _has_rows(cursor) else []

    def place(self, number: int) -> str:
        return "%s"

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        from psycopg.rows import dict_row

        with self.connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(sql.encode(), parameters or None)
            return cursor.fetchall() if _has_rows(cursor) else []

    async def notified(self, channel: str, payload: str, seconds: float) -> bool | None:
        if not self.connection.autocommit:
            # LISTEN begins with the COMMIT, and notifications come between transactions.
            return None
        await self._execute(f"LISTEN {channel}".encode())
        return any(
            note.payload == payload for note in self.connection.notifies(timeout=seconds, stop_after=1)
        )

    async def run_all(self, statements: Sequence[str]) -> None:
        await self._execute(_script(*statements).encode())

    async def begin(self, announce: str) -> None:
        begin = f"{_begin(self.connection)}; " if self.connection.autocommit else ""
        await self._execute((begin + announce).encode())
        self._commit = _commit_after(announce).encode()

    async def run_in_own_transaction(self, statements: Sequence[str]) -> None:
        begin = ["BEGIN"] if self.connection.autocommit else []
        await self._commit_by(_script(*begin, *statements, "COMMIT").encode())

    async def rollback_and(self, statement: str) -> None:
        if self.state() in ("open", "failed"):
            # The statements after a ROLLBACK in the same message are one transaction, which the server commits.
            await self._execute(_script("ROLLBACK", statement).encode())
        else:
            await self.run_in_own_transaction([statement])

    async def commit(self) -> None:
        if self.state() == "failed":
            raise Aborted
        await self._commit_by(self._commit)

    async def _commit_by(self, script: bytes) -> None:
        """Send statements of which the last one is COMMIT."""
        cursor = await self._execute(script)
        while cursor.nextset():
            pass
        if cursor.statusmessage != "COMMIT":
            raise Aborted

    async def rollback(self) -> None:
        if self.state() in ("open", "failed"):
            await self._execute(b"ROLLBACK")


class AsyncPsycopgSession(PsycopgSession):
    """A psycopg connection for asyncio."""

    __slots__ = ()

    async def _execute(self, sql: bytes) -> Any:
        return await self._cursor.execute(sql, prepare=False)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        from psycopg.rows import tuple_row

        async with self.connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(sql.encode(), parameters or None)
            return await cursor.fetchall() if _has_rows(cursor) else []

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        from psycopg.rows import dict_row

        async with self.connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(sql.encode(), parameters or None)
            return await cursor.fetchall() if _has_rows(cursor) else []

    async def notified(self, channel: str, payload: str, seconds: float) -> bool | None:
        if not self.connection.autocommit:
            return None
        await self._execute(f"LISTEN {channel}".encode())
        heard = False
        async for note in self.connection.notifies(timeout=seconds, stop_after=1):
            heard = heard or note.payload == payload
        return heard


class AsyncpgSession:
    """An asyncpg connection, or one from its pool. We send BEGIN, so `transaction()` cannot be used inside."""

    __slots__ = ("_commit", "_isolation", "connection")

    def __init__(self, connection: Any, isolation: str | None = None) -> None:
        self.connection = connection
        self._commit = "COMMIT"
        self._isolation = isolation

    def state(self) -> State:
        if self.connection.is_closed():
            return "closed"
        return "open" if self.connection.is_in_transaction() else "idle"

    async def begin(self, announce: str) -> None:
        level = f" ISOLATION LEVEL {self._isolation}" if self._isolation else ""
        await self.connection.execute(f"BEGIN{level}; {announce}")
        self._commit = _commit_after(announce)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await self.connection.fetch(sql, *parameters)]

    def place(self, number: int) -> str:
        return f"${number}"

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        return [dict(row) for row in await self.connection.fetch(sql, *parameters)]

    async def notified(self, channel: str, payload: str, seconds: float) -> bool | None:
        import asyncio

        heard = asyncio.Event()

        def listen(*note: Any) -> None:
            if note[-1] == payload:
                heard.set()

        await self.connection.add_listener(channel, listen)
        try:
            await asyncio.wait_for(heard.wait(), seconds)
        except TimeoutError:
            return False
        finally:
            await self.connection.remove_listener(channel, listen)
        return True

    async def run_all(self, statements: Sequence[str]) -> None:
        await self.connection.execute(_script(*statements))

    async def run_in_own_transaction(self, statements: Sequence[str]) -> None:
        await self._commit_by(_script("BEGIN", *statements, "COMMIT"))

    async def rollback_and(self, statement: str) -> None:
        if self.state() == "open":
            await self.connection.execute(_script("ROLLBACK", statement))
        else:
            await self.run_in_own_transaction([statement])

    async def commit(self) -> None:
        await self._commit_by(self._commit)

    async def _commit_by(self, script: str) -> None:
        try:
            done = await self.connection.execute(script)
        except Exception as error:
            if getattr(error, "sqlstate", None) == "25P02":  # an earlier statement failed
                raise Aborted from error
            raise
        if done != "COMMIT":
            raise Aborted

    async def rollback(self) -> None:
        if self.state() == "idle":
            with suppress(Exception):
                # A cancelled BEGIN may have run: the reply to a statement shows the state.
                await self.connection.execute("SELECT 1")
        if self.state() == "open":
            await self.connection.execute("ROLLBACK")
