"""The connections that a fence can work on: sqlite3's and aiosqlite's.

`reenter` and `commit` run the statements of nearly every guarded transaction. They are plain functions, so that sqlite3
connections need no coroutines for them.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fenced.errors import Misuse, redacted, shown
from fenced.guards.engine import StampSource
from fenced.values.model import TOKEN_MAX, Stamp, is_seq


class SqliteSession(Protocol):
    """A connection on which we may run our own statements."""

    @property
    def in_transaction(self) -> bool: ...

    async def join(self) -> bool:
        """Whether the caller has begun a transaction. If only its framework has, begin it in the database too."""

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The same as `run`, with the names of the columns."""

    async def reenter(self, guard: str, stamp: Stamp, names: Sequence[str]) -> Sequence[str]:
        """`sessions.reenter` on this connection."""

    async def commit(self, names: Sequence[str]) -> None:
        """`sessions.commit` on this connection."""

    async def rollback(self) -> None:
        """Roll back, if there is a transaction."""

    async def make_ready(self) -> None:
        """Remember on the connection itself that it enforces foreign keys."""


BUSY_SECONDS = 10.0
"""How long a connection of our own waits for the write lock."""
_URL = re.compile(r"sqlite:///(?P<path>[^?#]+)")


def path_of(url: str) -> Path:
    """The file behind an address."""
    found = _URL.fullmatch(url)
    if found is None:
        raise Misuse(f"an SQLite address is sqlite:///path/to/file.db, not {shown(redacted(url))}")
    return Path(found["path"]).absolute()


READY = "fenced_ready"
"""A collation that marks a connection on which foreign keys are known to be enforced. Nothing is compared by it."""

# One statement for a holder whose stamp already has the mark, under rule `retry`: it is admitted, and the mark stays.
_AGAIN = f"""
INSERT OR REPLACE INTO fenced_stamp (name, guard, stamp, seq, verdict, refuse, open)
SELECT m.name, g.guard, '', ?, 'admit', 0, 1 FROM fenced_mark m, fenced_guard g
WHERE m.name = ? AND m.token = ? AND m.grant_id = ? AND g.guard = ? AND g.realm = ? AND g.rule = 'retry'
  AND 1 = 1 COLLATE {READY}"""
_CLEAR = "DELETE FROM fenced_stamp WHERE name = ?"  # by key: faster than emptying the table


class TransactionEnded(Exception):
    """The transaction was ended inside the block: the stamps that we inserted are gone."""


def _rows(connection: sqlite3.Connection, sql: str, parameters: Sequence[object]) -> list[Any]:
    """Run our own statement, whatever factories the program has set on its connection."""
    cursor = connection.cursor()
    cursor.row_factory = None
    texts = connection.text_factory
    if texts is str:
        return cursor.execute(sql, parameters).fetchall()
    connection.text_factory = str
    try:
        return cursor.execute(sql, parameters).fetchall()
    finally:
        connection.text_factory = texts


def reenter(
    connection: sqlite3.Connection, guard: str, source: StampSource, seq: int | None, names: Sequence[str]
) -> Sequence[str]:
    """Begin, and insert the stamp for the names whose mark it already has; return the other names."""
    execute = connection.execute
    execute("BEGIN IMMEDIATE")
    # A stamp with numbers out of range is judged: no mark is 0. SQLite could not hold more than 2**63.
    token = source.token if source.token <= TOKEN_MAX and is_seq(seq) else 0
    seq = seq if token else 0
    left = []
    for name in names:
        mine = (seq or 0, name, token, source.grant, guard, source.realm)
        if execute(_AGAIN, mine).rowcount != 1:
            left.append(name)
    return left


def commit(connection: sqlite3.Connection, names: Sequence[str]) -> None:
    """Delete the stamps, and commit; TransactionEnded if they are already gone."""
    execute = connection.execute
    for name in names:
        if execute(_CLEAR, (name,)).rowcount != 1:
            raise TransactionEnded
    execute("COMMIT")


def _equal(left: str, right: str) -> int:
    return (left > right) - (left < right)


class PlainSession:
    """An sqlite3 connection, used in the calling thread."""

    __slots__ = ("connection",)

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    async def join(self) -> bool:
        return self.in_transaction

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return _rows(self.connection, sql, parameters)

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        cursor = self.connection.cursor()
        cursor.row_factory = None
        rows = cursor.execute(sql, parameters).fetchall()
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in rows]

    async def reenter(self, guard: str, stamp: Stamp, names: Sequence[str]) -> Sequence[str]:
        return reenter(self.connection, guard, stamp, stamp.seq, names)

    async def commit(self, names: Sequence[str]) -> None:
        commit(self.connection, names)

    async def rollback(self) -> None:
        self.connection.rollback()

    async def make_ready(self) -> None:
        self.connection.create_collation(READY, _equal)


class AioSession:
    """The program's own aiosqlite connection. Each statement is a call to the connection's thread."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @property
    def in_transaction(self) -> bool:
        try:
            return bool(self.connection.in_transaction)
        except ValueError:  # closed: our next statement says so
            return False

    async def join(self) -> bool:
        return self.in_transaction

    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            cursor = await self.connection.cursor()
        except ValueError as error:  # as aiosqlite calls it
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.") from error
        try:
            cursor.row_factory = None
            await cursor.execute(sql, parameters)
            return list(await cursor.fetchall())
        finally:
            await cursor.close()

    async def records(self, sql: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
        async with self.connection.execute(sql, parameters) as cursor:
            rows = await cursor.fetchall()
            names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, tuple(row), strict=True)) for row in rows]

    async def reenter(self, guard: str, stamp: Stamp, names: Sequence[str]) -> Sequence[str]:
        await self.run("BEGIN IMMEDIATE")
        if await self.run("PRAGMA foreign_keys") == [(0,)]:
            raise sqlite3.OperationalError(f"no such collation sequence: {READY}")
        return names  # announcing all of them takes hardly more calls to the connection's thread

    async def commit(self, names: Sequence[str]) -> None:
        for name in names:
            cursor = await self.connection.execute(_CLEAR, (name,))
            cleared = cursor.rowcount
            await cursor.close()
            if cleared != 1:
                raise TransactionEnded
        await self.run("COMMIT")

    async def rollback(self) -> None:
        # Do not check in_transaction first: a BEGIN may still be queued for the connection's thread.
        with contextlib.suppress(ValueError):  # closed, and so rolled back
            await self.connection.rollback()

    async def make_ready(self) -> None:
        return
