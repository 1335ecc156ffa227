"""A SQL engine that fenced does not know: its own scheme, connection, errors and quotes. SQLite does the work.

It is registered by an entry point alone. That nothing else is needed is what tests/cli/test_engines.py shows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fenced.errors import FencedError, Misconfigured, Unsupported
from fenced.guards.engine import ConnectionClass, Driver, Engine
from fenced.stores.sqlite.guard.operator import SqliteOperator
from fenced.stores.sqlite.guard.refusals import refusal_in
from fenced.stores.sqlite.guard.sessions import PlainSession
from fenced.stores.sqlite.guard.tables import SqliteTable
from fenced.values.contracts import Colour


class ToyError(Exception):
    """All that the toy's driver raises."""


class ToyConnection:
    """A driver's connection. It is no sqlite3.Connection, so that no built-in engine takes it."""

    def __init__(self, path: Path) -> None:
        self.raw = sqlite3.connect(path, isolation_level=None)
        self.raw.execute("PRAGMA foreign_keys = ON")

    def execute(self, sql: str, parameters: tuple[object, ...] = ()) -> sqlite3.Cursor:
        try:
            return self.raw.execute(sql, parameters)
        except sqlite3.Error as error:
            raise ToyError(str(error)) from error

    def close(self) -> None:
        self.raw.close()


class ToyTable(SqliteTable):
    """The guard of a table in a toy database."""

    async def leave(self, error: BaseException | None) -> None:
        await super().leave(error.__cause__ if isinstance(error, ToyError) else error)


def _toy() -> Driver:
    return Driver(ToyTable, lambda connection: PlainSession(connection.raw))


def _alchemy() -> Driver:
    return Driver(ToyTable, lambda session: PlainSession(session.connection().connection.driver_connection))


class ToyEngine:
    name = "toy"
    dialects = frozenset({"sqlite"})
    quote = "`"
    drivers: Mapping[Colour, Mapping[ConnectionClass, Callable[[], Driver]]] = {
        "blocking": {("tests", "ToyConnection"): _toy, ("sqlalchemy", "Session"): _alchemy},
    }

    def refusal(self, error: BaseException) -> FencedError | None:
        cause = error.__cause__
        return refusal_in(cause) if isinstance(error, ToyError) and cause is not None else None

    def outbox(self) -> Mapping[str, str]:
        raise Unsupported("a toy has no outbox")

    def connect(self, dsn: str) -> ToyConnection:
        path = Path(dsn.removeprefix("toy://"))
        if not path.is_file():
            raise Misconfigured(f"there is no toy {path}")
        return ToyConnection(path)

    def operator(self, connection: Any) -> SqliteOperator:
        return SqliteOperator(PlainSession(connection.raw))


ENGINE: Engine = ToyEngine()
