"""What the holders compete for: a stock of goods, as named values, behind a guard or in a plain table.

A value is the list of orders that were sold. A lost update is a missing order; one that is there twice was doubled.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any, Protocol

from fenced.client import registry
from fenced.drills.served import SCHEMES, ServedResource
from fenced.errors import Contended, Misconfigured, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.contracts import NamedValues, Versioned
from fenced.values.model import Credential, Stamp

STOCK_FIRST = 10
BUSY_SECONDS = 10.0

Orders = list[tuple[str, int]]
"""The orders that were sold: id and amount."""


def orders_in(value: bytes | None) -> Orders:
    return [(each, amount) for each, amount in json.loads(value)] if value else []


def stock_of(orders: Orders) -> int:
    return STOCK_FIRST - sum(amount for _, amount in orders)


class Resource(Protocol):
    """Named values, read and written under a stamp."""

    @property
    def url(self) -> str: ...

    guarded: bool

    def open(self) -> None: ...
    def announce(self, stamp: Stamp) -> None: ...
    def read(self, stamp: Stamp, name: str) -> Versioned: ...
    def write(self, stamp: Stamp, name: str, value: bytes) -> int: ...
    def peek(self, name: str) -> Versioned: ...
    def close(self) -> None: ...


class GuardedResource:
    """Values behind any guard."""

    guarded = True

    def __init__(self, url: str) -> None:
        self.guard: NamedValues = registry.guard(url, BlockingRuntime())

    @property
    def url(self) -> str:
        return self.guard.url

    def open(self) -> None:
        step(self.guard.open())

    def announce(self, stamp: Stamp) -> None:
        step(self.guard.announce(Credential((stamp,))))

    def read(self, stamp: Stamp, name: str) -> Versioned:
        return step(self.guard.read(Credential((stamp,)), name))

    def write(self, stamp: Stamp, name: str, value: bytes) -> int:
        return step(self.guard.write(Credential((stamp,)), name, value))

    def peek(self, name: str) -> Versioned:
        return step(self.guard.peek(name))

    def close(self) -> None:
        step(self.guard.close())


_CREATE = """
CREATE TABLE IF NOT EXISTS stock (
  name TEXT PRIMARY KEY, value TEXT, version INTEGER NOT NULL
) STRICT, WITHOUT ROWID"""
_READ = "SELECT value, version FROM stock WHERE name = ?"
_WRITE = """
INSERT INTO stock (name, value, version) VALUES (?, ?, 1)
ON CONFLICT (name) DO UPDATE SET value = excluded.value, version = version + 1
RETURNING version"""


class PlainTable:
    """The same kind of table without a guard: stamps are passed, and ignored."""

    guarded = False

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._connection: sqlite3.Connection | None = None

    @property
    def url(self) -> str:
        return "none"

    def open(self) -> None:
        self._run("PRAGMA journal_mode = WAL")
        self._run("PRAGMA synchronous = FULL")
        self._run(_CREATE)

    def announce(self, stamp: Stamp) -> None:
        return

    def read(self, stamp: Stamp, name: str) -> Versioned:
        return self.peek(name)

    def write(self, stamp: Stamp, name: str, value: bytes) -> int:
        return int(self._run(_WRITE, name, value.decode())[0][0])

    def peek(self, name: str) -> Versioned:
        rows = self._run(_READ, name)
        return Versioned(rows[0][0].encode(), rows[0][1]) if rows else Versioned(None, 0)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, sql: str, *parameters: str) -> list[tuple[Any, ...]]:
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise _translate(error) from error


def _translate(error: sqlite3.Error) -> Contended | Misconfigured | Unavailable:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Contended(f"the table is locked by another writer: {error}")
    if code == sqlite3.SQLITE_CANTOPEN:
        return Misconfigured(f"the table cannot be opened: {error}")
    return Unavailable(f"the table answered: {error}")


def resource(guard: str | None, table: str, *, guarded: bool = True) -> Resource:
    """The guard's values or a service's, or the plain table in the file `table` when there is no guard.

    Not `guarded`: the values of a service whose guard only observes.
    """
    if guard is None:
        return PlainTable(table)
    if guard.partition(":")[0] in SCHEMES:
        return ServedResource(guard, guarded=guarded)
    return GuardedResource(guard)
