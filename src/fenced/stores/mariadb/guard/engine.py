"""The engine of MariaDB and MySQL, for fenced.sql and the command line: its drivers, errors and operator."""

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
    from fenced.stores.mariadb.guard.operator import MariadbOperator


def _claims(spec: Spec, table: Any, session: Any) -> ClaimTable:
    from fenced.stores.mariadb.guard.claims import MariadbClaims

    return MariadbClaims(spec, table, session)


def _pymysql() -> Driver:
    from fenced.stores.mariadb.guard.sessions import PymysqlSession
    from fenced.stores.mariadb.guard.tables import MariadbTable

    return Driver(MariadbTable, PymysqlSession, claims=_claims)


def _mysqldb() -> Driver:
    from fenced.stores.mariadb.guard.sessions import MysqldbSession
    from fenced.stores.mariadb.guard.tables import MariadbTable

    return Driver(MariadbTable, MysqldbSession, claims=_claims)


def _asyncmy() -> Driver:
    from fenced.stores.mariadb.guard.sessions import MariadbAsyncSession
    from fenced.stores.mariadb.guard.tables import MariadbTable

    return Driver(MariadbTable, MariadbAsyncSession, claims=_claims)


def _alchemy() -> Driver:
    from fenced.stores.mariadb.guard.alchemy import MariadbAlchemySession, MariadbAlchemyTable

    return Driver(MariadbAlchemyTable, MariadbAlchemySession, claims=_claims)


def _async_alchemy() -> Driver:
    from fenced.stores.mariadb.guard.alchemy import MariadbAlchemyTable, MariadbAsyncAlchemySession

    return Driver(MariadbAlchemyTable, MariadbAsyncAlchemySession, claims=_claims)


def _django() -> Driver:
    from fenced.stores.mariadb.guard.django import MariadbDjangoSession
    from fenced.stores.mariadb.guard.tables import MariadbTable

    return Driver(MariadbTable, MariadbDjangoSession, claims=_claims)


class MariadbEngine:
    """MariaDB and MySQL, by PyMySQL, mysqlclient and asyncmy, also through SQLAlchemy and Django."""

    name = "mariadb"
    dialects = frozenset({"mariadb", "mysql"})
    quote = "`"
    drivers: Mapping[Colour, Mapping[ConnectionClass, Callable[[], Driver]]] = {
        "blocking": {
            ("pymysql", "Connection"): _pymysql,
            ("MySQLdb", "Connection"): _mysqldb,
            ("sqlalchemy", "Connection"): _alchemy,
            ("sqlalchemy", "Session"): _alchemy,
            ("django", "DatabaseWrapper"): _django,
            ("django", "ConnectionProxy"): _django,
        },
        "asyncio": {
            ("asyncmy", "Connection"): _asyncmy,
            ("sqlalchemy", "AsyncConnection"): _async_alchemy,
            ("sqlalchemy", "AsyncSession"): _async_alchemy,
        },
    }

    def refusal(self, error: BaseException) -> FencedError | None:
        from fenced.stores.mariadb.guard.refusals import refusal_in

        return refusal_in(error)

    def outbox(self) -> Mapping[str, str]:
        return load(Path(__file__).with_name("outbox.sql"))

    def connect(self, dsn: str) -> Any:
        from fenced.stores.mariadb.guard.connecting import connect

        return connect(dsn)

    def operator(self, connection: Any) -> MariadbOperator:
        from fenced.stores.mariadb.guard.operator import MariadbOperator
        from fenced.stores.mariadb.guard.sessions import PymysqlSession

        return MariadbOperator(PymysqlSession(connection))


ENGINE: Engine = MariadbEngine()
