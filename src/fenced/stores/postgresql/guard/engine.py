"""The PostgreSQL engine, for fenced.sql and the command line: its drivers, errors and operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fenced.errors import FencedError, Misuse, redacted, shown
from fenced.guards.claims import ClaimTable
from fenced.guards.engine import ConnectionClass, Driver, Engine
from fenced.guards.spec import Spec
from fenced.values.contracts import Colour
from fenced.values.sqlfile import load

if TYPE_CHECKING:
    import psycopg

    from fenced.stores.postgresql.guard.operator import PostgresqlOperator


def _claims(spec: Spec, table: Any, session: Any) -> ClaimTable:
    from fenced.stores.postgresql.guard.claims import PostgresqlClaims

    return PostgresqlClaims(spec, table, session)


def _psycopg() -> Driver:
    from fenced.stores.postgresql.guard.sessions import PsycopgSession
    from fenced.stores.postgresql.guard.tables import PostgresqlTable

    return Driver(PostgresqlTable, PsycopgSession, claims=_claims)


def _async_psycopg() -> Driver:
    from fenced.stores.postgresql.guard.sessions import AsyncPsycopgSession
    from fenced.stores.postgresql.guard.tables import PostgresqlTable

    return Driver(PostgresqlTable, AsyncPsycopgSession, claims=_claims)


def _asyncpg() -> Driver:
    from fenced.stores.postgresql.guard.sessions import AsyncpgSession
    from fenced.stores.postgresql.guard.tables import PostgresqlTable

    return Driver(PostgresqlTable, AsyncpgSession, claims=_claims)


def _alchemy() -> Driver:
    from fenced.stores.postgresql.guard.alchemy import AlchemySession, AlchemyTable

    return Driver(AlchemyTable, AlchemySession, claims=_claims)


def _async_alchemy() -> Driver:
    from fenced.stores.postgresql.guard.alchemy import AlchemyTable, AsyncAlchemySession

    return Driver(AlchemyTable, AsyncAlchemySession, claims=_claims)


def _django() -> Driver:
    from fenced.stores.postgresql.guard.django import DjangoSession
    from fenced.stores.postgresql.guard.tables import PostgresqlTable

    return Driver(PostgresqlTable, DjangoSession, claims=_claims)


LINK = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
"""Ends a look after half a minute if the network has forgotten the connection; else it would wait for hours."""


class PostgresqlEngine:
    """PostgreSQL, by psycopg and asyncpg, also through SQLAlchemy and Django."""

    name = "postgresql"
    dialects = frozenset({"postgresql"})
    quote = '"'
    drivers: Mapping[Colour, Mapping[ConnectionClass, Callable[[], Driver]]] = {
        "blocking": {
            ("psycopg", "Connection"): _psycopg,
            ("sqlalchemy", "Connection"): _alchemy,
            ("sqlalchemy", "Session"): _alchemy,
            ("django", "DatabaseWrapper"): _django,
            ("django", "ConnectionProxy"): _django,
        },
        "asyncio": {
            ("psycopg", "AsyncConnection"): _async_psycopg,
            ("asyncpg", "Connection"): _asyncpg,
            ("asyncpg", "PoolConnectionProxy"): _asyncpg,
            ("sqlalchemy", "AsyncConnection"): _async_alchemy,
            ("sqlalchemy", "AsyncSession"): _async_alchemy,
        },
    }

    def refusal(self, error: BaseException) -> FencedError | None:
        from fenced.stores.postgresql.guard.refusals import refusal_in

        return refusal_in(error)

    def outbox(self) -> Mapping[str, str]:
        return load(Path(__file__).with_name("outbox.sql"))

    def connect(self, dsn: str) -> psycopg.Connection:
        import psycopg

        from fenced.stores.postgresql.guard.refusals import typed

        try:
            given = psycopg.conninfo.conninfo_to_dict(dsn)
            link = psycopg.conninfo.make_conninfo(dsn, **{key: LINK[key] for key in LINK if key not in given})
            return psycopg.connect(link, autocommit=True, fallback_application_name="fenced guard")
        except psycopg.ProgrammingError as error:  # not an address
            raise Misuse(f"{shown(redacted(dsn))}: {error}") from error
        except psycopg.Error as error:
            raise typed(error) from error

    def operator(self, connection: psycopg.Connection) -> PostgresqlOperator:
        from fenced.stores.postgresql.guard.operator import PostgresqlOperator
        from fenced.stores.postgresql.guard.sessions import PsycopgSession

        return PostgresqlOperator(PsycopgSession(connection))


ENGINE: Engine = PostgresqlEngine()
