"""SQLAlchemy's connections to SQLite. A guard is installed and removed through them, as part of a migration."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from fenced.errors import Unsupported
from fenced.stores.sqlite.guard.tables import SqliteTable
from fenced.values.model import Credential, Stamp


class SqliteAlchemySession:
    """A SQLAlchemy Connection. SQLAlchemy may have begun a transaction that the driver has not begun yet."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction()

    async def join(self) -> bool:
        driver: Any = self._connection.connection.driver_connection
        if self.in_transaction and not driver.in_transaction:
            # Otherwise the driver would begin before the first INSERT, and commit each CREATE before that.
            await self.run("BEGIN IMMEDIATE")
        return self.in_transaction

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        reads = not self.in_transaction and not sql.startswith("BEGIN")
        try:
            result = self._connection.exec_driver_sql(sql, tuple(parameters))
            return [tuple(row) for row in result] if result.returns_rows else []
        except DBAPIError as error:
            if isinstance(error.orig, sqlite3.Error):
                raise error.orig from error
            raise
        finally:
            if reads:  # SQLAlchemy has begun a transaction for this statement alone
                self._connection.rollback()

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        raise _no_writes()

    async def commit(self, names: Sequence[str]) -> None:
        self._connection.commit()

    async def rollback(self) -> None:
        self._connection.rollback()

    async def reenter(self, guard: str, stamp: Stamp, names: Sequence[str]) -> Sequence[str]:
        raise _no_writes()

    async def make_ready(self) -> None:
        raise _no_writes()


class SqliteAlchemyTable(SqliteTable):
    """A guard on a table, as far as migrations need it."""

    async def enter(self, credential: Credential | None) -> None:
        raise _no_writes()

    async def announce(self, credential: Credential) -> None:
        raise _no_writes()

    async def announce_within(self, credential: Credential) -> None:
        raise _no_writes()


def _no_writes() -> Unsupported:
    return Unsupported(
        "over SQLite, SQLAlchemy's connections are for migrations; write on a connection of sqlite3 or aiosqlite"
    )
