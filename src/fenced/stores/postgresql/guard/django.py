"""Django's connections, as a guard uses them: its transaction is one of Django's own `atomic` blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections, transaction

from fenced.errors import Misuse
from fenced.stores.postgresql.guard.sessions import Aborted, State

_IN_TRANSACTION = 2
"""libpq's transaction status."""


class _RollBack(Exception):
    """Leaves an `atomic` block, so that it rolls back."""


class DjangoSession:
    """The connection of this thread behind one of Django's aliases."""

    def __init__(self, connection: Any) -> None:
        self._connection = connections[connection.alias]
        self._block: Any = None

    def state(self) -> State:
        if self._block is not None and getattr(self._connection.connection, "closed", True):
            return "closed"
        blocks = self._connection.atomic_blocks
        # A TestCase wraps each test in a block. Like Django's durable blocks, we ignore that one.
        return "open" if blocks and not blocks[-1]._from_testcase else "idle"

    async def begin(self, announce: str) -> None:
        if not self._connection.in_atomic_block and not self._connection.get_autocommit():
            raise Misuse("autocommit is off: Django's atomic would not commit")
        block = transaction.atomic(using=self._connection.alias, durable=True)
        block.__enter__()
        self._block = block
        await self.run(announce)

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def place(self, number: int) -> str:
        return "%s"

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            if not cursor.description:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    async def notified(self, channel: str, payload: str, seconds: float) -> bool | None:
        return None

    async def run_all(self, statements: Sequence[str]) -> None:
        for statement in statements:
            await self.run(statement)

    async def run_in_own_transaction(self, statements: Sequence[str]) -> None:
        with transaction.atomic(using=self._connection.alias):
            await self.run_all(statements)

    async def rollback_and(self, statement: str) -> None:
        await self.rollback()
        await self.run_in_own_transaction([statement])

    async def commit(self) -> None:
        connection = self._connection
        lost = connection.closed_in_transaction or connection.connection is None or connection.needs_rollback
        if lost or connection.connection.info.transaction_status != _IN_TRANSACTION:
            await self.rollback()
            raise Aborted
        block, self._block = self._block, None
        block.__exit__(None, None, None)

    async def rollback(self) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(_RollBack, _RollBack(), None)
