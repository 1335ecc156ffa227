"""Which guard works on which of the program's connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fenced.decision import Mark
from fenced.errors import Unsupported, shown
from fenced.guards.spec import Announcement, Spec


class Table(Protocol):
    """A guard on a table of the program's own, on one of its connections."""

    async def install(self, mode: str | None) -> None: ...
    async def script(self, mode: str | None) -> str: ...
    async def uninstall(self) -> None: ...
    async def set_mode(self, mode: str, pattern: str) -> None: ...
    async def adopt(self, realm: str) -> None: ...
    async def peek(self, name: str, at_least: int) -> Mark | None: ...
    async def enter(self, announcement: Announcement) -> None: ...
    async def leave(self, error: BaseException | None) -> None: ...
    async def announce(self, announcement: Announcement) -> None: ...
    async def announce_on(self, announcement: Announcement) -> None: ...
    async def clear(self, announcement: Announcement) -> None: ...
    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...


def _sqlite(connection: Any) -> tuple[type[Any], Any]:
    from fenced.guards.sqlite.sessions import PlainSession
    from fenced.guards.sqlite.tables import SqliteTable

    return SqliteTable, PlainSession(connection)


def _aiosqlite(connection: Any) -> tuple[type[Any], Any]:
    from fenced.guards.sqlite.sessions import AioSession
    from fenced.guards.sqlite.tables import SqliteTable

    return SqliteTable, AioSession(connection)


def _psycopg(connection: Any) -> tuple[type[Any], Any]:
    from fenced.guards.postgresql.sessions import PsycopgSession
    from fenced.guards.postgresql.tables import PostgresqlTable

    return PostgresqlTable, PsycopgSession(connection)


def _async_psycopg(connection: Any) -> tuple[type[Any], Any]:
    from fenced.guards.postgresql.sessions import AsyncPsycopgSession
    from fenced.guards.postgresql.tables import PostgresqlTable

    return PostgresqlTable, AsyncPsycopgSession(connection)


def _asyncpg(connection: Any) -> tuple[type[Any], Any]:
    from fenced.guards.postgresql.sessions import AsyncpgSession
    from fenced.guards.postgresql.tables import PostgresqlTable

    return PostgresqlTable, AsyncpgSession(connection)


def _alchemy(connection: Any) -> tuple[type[Any], Any]:
    from fenced.guards.postgresql.alchemy import AlchemySession, AlchemyTable

    return AlchemyTable, AlchemySession(connection)


def _async_alchemy(connection: Any) -> tuple[type[Any], Any]:
    from fenced.guards.postgresql.alchemy import AlchemyTable, AsyncAlchemySession

    return AlchemyTable, AsyncAlchemySession(connection)


def _django(connection: Any) -> tuple[type[Any], Any]:
    from fenced.guards.postgresql.django import DjangoSession
    from fenced.guards.postgresql.tables import PostgresqlTable

    return PostgresqlTable, DjangoSession(connection)


Known = dict[tuple[str, str], Callable[[Any], tuple[type[Any], Any]]]
"""By the package and the name of a connection's class, or of one that it inherits from."""

BLOCKING: Known = {
    ("sqlite3", "Connection"): _sqlite,
    ("psycopg", "Connection"): _psycopg,
    ("sqlalchemy", "Connection"): _alchemy,
    ("sqlalchemy", "Session"): _alchemy,
    ("sqlalchemy", "scoped_session"): lambda scoped: _alchemy(scoped()),
    ("django", "DatabaseWrapper"): _django,
    ("django", "ConnectionProxy"): _django,
}
SUSPENDING: Known = {
    ("aiosqlite", "Connection"): _aiosqlite,
    ("psycopg", "AsyncConnection"): _async_psycopg,
    ("asyncpg", "Connection"): _asyncpg,
    ("asyncpg", "PoolConnectionProxy"): _asyncpg,
    ("sqlalchemy", "AsyncConnection"): _async_alchemy,
    ("sqlalchemy", "AsyncSession"): _async_alchemy,
    ("sqlalchemy", "async_scoped_session"): lambda scoped: _async_alchemy(scoped()),
}


def table_on(connection: object, spec: Spec, mandatory: bool, known: Known) -> Table:
    """The guard on this connection; Unsupported for one that we do not know."""
    for kind in type(connection).__mro__:
        found = known.get((kind.__module__.partition(".")[0], kind.__name__))
        if found is not None:
            table, session = found(connection)
            made: Table = table(spec, session, mandatory)
            return made
    raise _unknown(connection, known)


def _unknown(connection: object, known: Known) -> Unsupported:
    kinds = ", ".join(sorted(f"{package}'s {name}" for package, name in known))
    other = SUSPENDING if known is BLOCKING else BLOCKING
    keys = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(connection).__mro__}
    hint = ""
    if keys & other.keys():
        hint = f"; that is one for {'AsyncGuard' if known is BLOCKING else 'Guard'}"
    return Unsupported(f"a guard works on {kinds}, not on {shown(type(connection))}{hint}")
