"""The SQLite engine, for fenced.sql and the command line: its drivers, errors and operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fenced.errors import FencedError
from fenced.guards.claims import ClaimTable
from fenced.guards.engine import ConnectionClass, Driver, Engine
from fenced.guards.spec import Spec
from fenced.values.contracts import Colour
from fenced.values.sqlfile import load

if TYPE_CHECKING:
    import sqlite3

    from fenced.stores.sqlite.guard.operator import SqliteOperator


def _claims(spec: Spec, table: Any, session: Any) -> ClaimTable:
    from fenced.stores.sqlite.guard.claims import SqliteClaims

    return SqliteClaims(spec, session)


def _sqlite3() -> Driver:
    from fenced.stores.sqlite.guard.sessions import PlainSession
    from fenced.stores.sqlite.guard.tables import SqliteTable
    from fenced.stores.sqlite.guard.transactions import SqliteTransaction

    return Driver(SqliteTable.of_program, PlainSession, SqliteTransaction, _claims)


def _aiosqlite() -> Driver:
    from fenced.stores.sqlite.guard.sessions import AioSession
    from fenced.stores.sqlite.guard.tables import SqliteTable

    return Driver(SqliteTable.of_program, AioSession, claims=_claims)


def _alchemy() -> Driver:
    from fenced.stores.sqlite.guard.alchemy import SqliteAlchemySession, SqliteAlchemyTable

    return Driver(SqliteAlchemyTable.of_program, SqliteAlchemySession)


class SqliteEngine:
    """SQLite, by the drivers sqlite3 and aiosqlite; for migrations also through SQLAlchemy."""

    name = "sqlite"
    dialects = frozenset({"sqlite"})
    quote = '"'
    drivers: Mapping[Colour, Mapping[ConnectionClass, Callable[[], Driver]]] = {
        "blocking": {("sqlite3", "Connection"): _sqlite3, ("sqlalchemy", "Connection"): _alchemy},
        "asyncio": {("aiosqlite", "Connection"): _aiosqlite},
    }

    def refusal(self, error: BaseException) -> FencedError | None:
        from fenced.stores.sqlite.guard.refusals import refusal_in

        return refusal_in(error)

    def outbox(self) -> Mapping[str, str]:
        return load(Path(__file__).with_name("outbox.sql"))

    def connect(self, dsn: str) -> sqlite3.Connection:
        from fenced.stores.sqlite.guard.operator import connect
        from fenced.stores.sqlite.guard.sessions import path_of

        return connect(path_of(dsn))

    def operator(self, connection: sqlite3.Connection) -> SqliteOperator:
        from fenced.stores.sqlite.guard.operator import SqliteOperator
        from fenced.stores.sqlite.guard.sessions import PlainSession

        return SqliteOperator(PlainSession(connection))


ENGINE: Engine = SqliteEngine()
