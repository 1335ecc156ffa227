"""Django's connections, as a guard uses them: its transaction is one of Django's own `atomic` blocks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from django.db import connections, transaction

from fenced.errors import Misuse
from fenced.stores.mariadb.guard.sessions import LEAVE, TOLD, MariadbSession, State, named

T = TypeVar("T")

_FINISH = "CALL fenced_guard.finish()"


class _RollBack(Exception):
    """Leaves an `atomic` block, so that it rolls back."""


class MariadbDjangoSession:
    """The connection of this thread behind one of Django's aliases."""

    def __init__(self, connection: Any) -> None:
        self._connection = connections[connection.alias]
        self._block: Any = None

    def state(self) -> State:
        if self._block is not None and self._connection.connection is None:
            return "closed"
        blocks = self._connection.atomic_blocks
        # A TestCase wraps each test in a block. Like Django's durable blocks, we ignore that one.
        return "open" if blocks and not blocks[-1]._from_testcase else "idle"

    async def begin(self, statement: str) -> None:
        if not self._connection.in_atomic_block and not self._connection.get_autocommit():
            raise Misuse("autocommit is off: Django's atomic would not commit")
        block = transaction.atomic(using=self._connection.alias, durable=True)
        block.__enter__()
        self._block = block
        await self.run(statement)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return list(cursor.fetchall()) if cursor.description else []

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return named(cursor)

    async def change(self, sql: str, parameters: Sequence[object] = ()) -> int:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return int(cursor.rowcount)

    async def together(self, work: Callable[[MariadbSession], Coroutine[Any, Any, T]]) -> T:
        return await work(self)

    async def told(self) -> object:
        with self._connection.connection.cursor() as cursor:  # Django's own refuses statements after an error
            cursor.execute(TOLD)
            (found,) = cursor.fetchone()
            return found

    async def leave(self, statement: str) -> None:
        connection = self._connection
        if connection.closed_in_transaction or connection.connection is None or connection.needs_rollback:
            raise Misuse(
                "nothing was committed: a statement failed inside the block, and the program caught its error"
            )
        if statement == LEAVE:
            await self.run(_FINISH)
        block, self._block = self._block, None
        block.__exit__(None, None, None)

    async def undo(self, statement: str) -> None:
        block, self._block = self._block, None
        try:
            if self._connection.connection is not None:
                with self._connection.connection.cursor() as cursor:
                    cursor.execute(statement)
        finally:
            if block is not None:
                block.__exit__(_RollBack, _RollBack(), None)
