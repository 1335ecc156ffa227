"""The guards' schema in a database.

A transaction may announce under the old functions and write under the new ones. That is safe as long as both write the
lines of the setting `fenced.stamp` in one form (`stamps.sql`). A call that is running during an upgrade may still call
a function that the new files lack. So the migration after the next one drops such functions, not the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fenced.errors import Misconfigured, Unsupported
from fenced.values.schema import RELEASE, V0_1, Installed, Schema, SqlSchema, check_readable

SCHEMA = SqlSchema(
    "fenced_guard",
    Path(__file__).parent,
    version=4,
    readable_by=1,
    files=(
        *("versions", "stamps", "decision", "crypto", "announce", "successors", "triggers"),
        *("claims", "operators", "grants"),
    ),
)
UPGRADE = "fenced guard upgrade"
WITH_CLAIMS = 4
"""The first version that knows guards of claims."""


class Runs(Protocol):
    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...


async def look(session: Runs) -> Installed | None:
    """The schema of this database; None if there is none. Misconfigured if this client is too old for it."""
    ((old, new),) = await session.run(
        "SELECT to_regprocedure('fenced_guard.version()') IS NOT NULL, "
        "to_regprocedure('fenced_guard.installed()') IS NOT NULL"
    )
    if not new:
        return V0_1 if old else None
    ((version, readable_by, release, functions),) = await session.run(
        "SELECT * FROM fenced_guard.installed()"
    )
    found = Installed(Schema(version, readable_by, release), functions)
    check_readable("the guard of this database", found.schema, SCHEMA.version)
    return found


async def is_there(session: Runs) -> bool:
    """Whether this database has a schema that this client can work with. Misconfigured if it must be upgraded first."""
    found = await look(session)
    if found is not None and found.schema.version < SCHEMA.version:
        raise Misconfigured(
            f"the guard of this database has schema {found.schema.version}, and this fenced {RELEASE} needs "
            f"{SCHEMA.version}: run `{UPGRADE}` as the role that owns the schema fenced_guard"
        )
    return found is not None


async def upgrade(session: Runs) -> list[str]:
    """The statements that bring the schema of this database to our version; none if it has it."""
    return SCHEMA.upgrade(await look(session))


async def check_server(session: Runs) -> None:
    """Before any text is read: in a database in SQL_ASCII, psycopg returns it as bytes."""
    ((in_utf8, version),) = await session.run(
        "SELECT current_setting('server_encoding') = 'UTF8', current_setting('server_version_num')::int"
    )
    if not in_utf8:
        raise Misconfigured(
            "a guarded database must be encoded in UTF8, and this one is not: CREATE DATABASE ... ENCODING 'UTF8'"
        )
    if version < 140000:
        raise Unsupported("a guard needs PostgreSQL 14 or later")
