"""The guards' own database on a server: its tables, and its routines, which writers call with their owner's rights.

DDL commits here, so nothing of this is part of a transaction. Each statement can be repeated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fenced.errors import Misconfigured, Unsupported
from fenced.stores.mariadb.wire.connection import literal
from fenced.values.schema import RELEASE, Schema, check_readable, is_older

VERSION = 1
READABLE_BY = 1
UPGRADE = "fenced guard upgrade"
FILES = ("decision", "announce", "triggers", "claims")
_HERE = Path(__file__).parent
_ROUTINE = re.compile(r"^CREATE (PROCEDURE|FUNCTION) (fenced_guard\.\w+)", re.MULTILINE)
_OPEN = {
    "mariadb": "@@in_transaction",
    # An open transaction of this session; with performance_schema off the server cannot tell, and the driver must.
    "mysql": "EXISTS (SELECT 1 FROM performance_schema.events_transactions_current e "
    "WHERE e.THREAD_ID = PS_CURRENT_THREAD_ID() AND e.STATE = 'ACTIVE' AND e.AUTOCOMMIT = 'NO')",
}


class RunsStatements(Protocol):
    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...


class MariadbProduct(NamedTuple):
    """What runs there."""

    product: str
    """mariadb or mysql."""
    version: tuple[int, int]


class InstalledTables(NamedTuple):
    """The schema of a server, and a digest of its routines."""

    schema: Schema
    routines: str


async def server_of(session: RunsStatements) -> MariadbProduct:
    """Unsupported if it is too old."""
    ((said,),) = await session.run("SELECT VERSION()")
    text = said.decode() if isinstance(said, bytes) else str(said)
    product = "mariadb" if "mariadb" in text.lower() else "mysql"
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    version = (numbers[0], numbers[1])
    if version < ((10, 6) if product == "mariadb" else (8, 0)):
        raise Unsupported(f"a guard needs MariaDB 10.6 or MySQL 8.0, or later, and this server is {text}")
    return MariadbProduct(product, version)


async def is_open(session: RunsStatements) -> bool:
    """Whether the session is in a transaction."""
    server = await server_of(session)
    ((found,),) = await session.run(f"SELECT {_OPEN[server.product]}")
    return bool(found)


async def look(session: RunsStatements) -> InstalledTables | None:
    """The schema of this server; None if it has none, or this user may not see it."""
    there = await session.run(
        "SELECT COUNT(*) FROM information_schema.TABLES "
        "WHERE TABLE_SCHEMA = 'fenced_guard' AND TABLE_NAME = 'schema_version'"
    )
    if not there[0][0]:
        return None
    rows = await session.run(
        "SELECT version, readable_by, `release`, routines FROM fenced_guard.schema_version"
    )
    if not rows:
        return None
    version, readable_by, release, routines = rows[0]
    found = InstalledTables(Schema(version, readable_by, release), routines)
    check_readable("the guard of this server", found.schema, VERSION)
    return found


async def installed(session: RunsStatements) -> InstalledTables:
    """The schema of this server; Misconfigured without one, or if it must be upgraded first."""
    found = await look(session)
    if found is None:
        raise Misconfigured("no guard is installed on this server: fenced guard install")
    if found.schema.version < VERSION:
        raise Misconfigured(
            f"the guard of this server has schema {found.schema.version}, and this fenced {RELEASE} needs {VERSION}: "
            f"run `{UPGRADE}` as the user that installed it"
        )
    return found


def split(text: str) -> list[str]:
    """The statements of a file, which are divided by lines of `$$`."""
    return [statement.strip() for statement in re.split(r"^\$\$$", text, flags=re.MULTILINE)]


def _refuse(condition: str, number: int, says: str) -> str:
    signal = f"SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'fenced: {says}'"
    return f"IF {condition} THEN\n    {signal};\n  END IF;"


@lru_cache(maxsize=2)
def routines(product: str) -> tuple[str, ...]:
    """The statements that create or replace all routines."""
    parts = {
        "{refuse_open}": _refuse(_OPEN[product], 916, "this connection is in a transaction already"),
        "{refuse_idle}": _refuse(
            f"@@autocommit AND NOT ({_OPEN[product]})", 917, "begin a transaction first"
        ),
    }
    made: list[str] = []
    for file in FILES:
        for statement in split((_HERE / f"{file}.sql").read_text()):
            found = _ROUTINE.search(statement)
            assert found is not None, statement
            text = statement[found.start() :]
            for name, check in parts.items():
                text = text.replace(name, check)
            if product == "mariadb":
                made.append(text.replace("CREATE ", "CREATE OR REPLACE ", 1))
            else:
                made += [f"DROP {found[1]} IF EXISTS {found[2]}", text]
    return tuple(made)


def digest(product: str) -> str:
    return hashlib.sha256("\n".join(routines(product)).encode()).hexdigest()[:16]


async def upgrade(session: RunsStatements) -> list[str]:
    """The statements that bring the schema of this server to our version; none if it has it."""
    server, found = await server_of(session), await look(session)
    own = digest(server.product)
    if found is not None:
        later = found.schema.version > VERSION or is_older(RELEASE, found.schema.release)
        if later or (found.schema.version == VERSION and found.routines == own):
            return []
    # The row comes last: until it is there, the next installation runs all of this again.
    values = f"1, {VERSION}, {READABLE_BY}, {literal(RELEASE)}, {literal(own)}"
    return [
        *split((_HERE / "tables.sql").read_text()),
        *routines(server.product),
        f"REPLACE INTO fenced_guard.schema_version (one, version, readable_by, `release`, routines) VALUES ({values})",
    ]
