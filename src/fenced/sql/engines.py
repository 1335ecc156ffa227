"""Which guard works on which of the program's connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from fenced.contracts import UnitOfWork
from fenced.decision import Mark
from fenced.errors import Unsupported, shown
from fenced.guards.shared.spec import Spec
from fenced.model import Credential


class TableGuard(UnitOfWork, Protocol):
    """A guard on a table of the program's own, on one of its connections."""

    async def install(self, mode: str | None) -> None: ...
    async def script(self, mode: str | None) -> str: ...
    async def uninstall(self) -> None: ...
    async def set_mode(self, mode: str, pattern: str, wait: float = ...) -> tuple[str, ...]: ...
    async def adopt(self, realm: str) -> None: ...
    async def peek(self, name: str, at_least: int) -> Mark | None: ...
    async def announce(self, credential: Credential) -> None: ...
    async def announce_on(self, credential: Credential) -> None: ...
    async def clear(self, credential: Credential) -> None: ...
    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...


Kind = tuple[Callable[..., Any], Callable[[Any], Any]]
"""(table factory, session factory)"""


def _scoped(kind: Kind) -> Kind:
    """The session of this thread or task, for a registry of them."""
    table, session = kind
    return table, lambda registry: session(registry())


def _sqlite() -> Kind:
    from fenced.guards.sqlite.sessions import PlainSession
    from fenced.guards.sqlite.tables import SqliteTable

    return SqliteTable, PlainSession


def _aiosqlite() -> Kind:
    from fenced.guards.sqlite.sessions import AioSession
    from fenced.guards.sqlite.tables import SqliteTable

    return SqliteTable, AioSession


def _psycopg() -> Kind:
    from fenced.guards.postgresql.sessions import PsycopgSession
    from fenced.guards.postgresql.tables import PostgresqlTable

    return PostgresqlTable, PsycopgSession


def _async_psycopg() -> Kind:
    from fenced.guards.postgresql.sessions import AsyncPsycopgSession
    from fenced.guards.postgresql.tables import PostgresqlTable

    return PostgresqlTable, AsyncPsycopgSession


def _asyncpg() -> Kind:
    from fenced.guards.postgresql.sessions import AsyncpgSession
    from fenced.guards.postgresql.tables import PostgresqlTable

    return PostgresqlTable, AsyncpgSession


def _alchemy() -> Kind:
    from fenced.guards.postgresql.alchemy import AlchemySession, AlchemyTable

    return AlchemyTable, AlchemySession


def _async_alchemy() -> Kind:
    from fenced.guards.postgresql.alchemy import AlchemyTable, AsyncAlchemySession

    return AlchemyTable, AsyncAlchemySession


def _django() -> Kind:
    from fenced.guards.postgresql.django import DjangoSession
    from fenced.guards.postgresql.tables import PostgresqlTable

    return PostgresqlTable, DjangoSession


Known = dict[tuple[str, str], Callable[[], Kind]]
"""By the package and the name of a connection's class, or of one that it inherits from."""

BLOCKING: Known = {
    ("sqlite3", "Connection"): _sqlite,
    ("psycopg", "Connection"): _psycopg,
    ("sqlalchemy", "Connection"): _alchemy,
    ("sqlalchemy", "Session"): _alchemy,
    ("sqlalchemy", "scoped_session"): lambda: _scoped(_alchemy()),
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
    ("sqlalchemy", "async_scoped_session"): lambda: _scoped(_async_alchemy()),
}


def table_on(connection: object, spec: Spec, mandatory: bool, known: Known) -> TableGuard:
    """The guard on this connection; Unsupported for one that we do not know."""
    kind: Any = type(connection)
    found = _found(kind, known is BLOCKING)
    if found is None:
        raise _unknown(connection, known)
    table, session = found
    made: TableGuard = table(spec, session(connection), mandatory)
    return made


@lru_cache(maxsize=64)
def _found(kind: type[object], blocking: bool) -> Kind | None:
    known = BLOCKING if blocking else SUSPENDING
    for base in kind.__mro__:
        load = known.get((base.__module__.partition(".")[0], base.__name__))
        if load is not None:
            return load()
    return None


def _unknown(connection: object, known: Known) -> Unsupported:
    kinds = ", ".join(sorted(f"{package}'s {name}" for package, name in known))
    other = SUSPENDING if known is BLOCKING else BLOCKING
    keys = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(connection).__mro__}
    hint = ""
    if keys & other.keys():
        hint = f"; that is one for {'AsyncGuard' if known is BLOCKING else 'Guard'}"
    return Unsupported(f"a guard works on {kinds}, not on {shown(type(connection))}{hint}")
