"""The guards' schema in a database: tables by forward migrations, functions replaced as a whole.

`tables_1.sql` made the tables of fenced 0.1; each later `tables_N.sql` leads from version N - 1 to N. The other files
hold functions, each with CREATE OR REPLACE. An installation runs the migrations that are missing, and replaces the
functions if their text has changed. So a function can be mended without a migration.

A transaction may announce under the old functions and write under the new ones. That is safe as long as both write the
lines of the setting `fenced.stamp` in one form (`stamps.sql`). A call that is under way may still call a function that
no file has any more. So such functions stay until the migration after the next one drops them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fenced.errors import Misconfigured, Unsupported
from fenced.guards.shared.spec import literal
from fenced.schema import RELEASE, Schema, check_readable, is_older

HERE = Path(__file__).parent
VERSION = 2
READABLE_BY = 1
"""The oldest version that a client must know. Raised by a migration that old clients cannot work with."""
FILES = (
    "versions",
    "stamps",
    "decision",
    "crypto",
    "announce",
    "successors",
    "triggers",
    "operators",
    "grants",
)
UPGRADE = "fenced guard upgrade"


class Runs(Protocol):
    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...


class Installed(NamedTuple):
    """What a database has: the schema, and a digest of its functions."""

    schema: Schema
    functions: str


@cache
def functions() -> str:
    """The statements that create or replace all functions."""
    return "\n".join((HERE / f"{name}.sql").read_text() for name in FILES)


@cache
def digest() -> str:
    return hashlib.sha256(functions().encode()).hexdigest()[:16]


async def look(session: Runs) -> Installed | None:
    """The schema of this database; None if there is none. Misconfigured if this client is too old for it."""
    ((old, new),) = await session.run(
        "SELECT to_regprocedure('fenced_guard.version()') IS NOT NULL, "
        "to_regprocedure('fenced_guard.installed()') IS NOT NULL"
    )
    if not old:
        return None
    if not new:  # 0.1 stored no version
        return Installed(Schema(1, 1, "0.1"), "")
    ((version, readable_by, release, text),) = await session.run("SELECT * FROM fenced_guard.installed()")
    found = Installed(Schema(version, readable_by, release), text)
    check_readable("the guard of this database", found.schema, VERSION)
    return found


async def is_there(session: Runs) -> bool:
    """Whether this database has a schema that this client can work with. Misconfigured if it must be upgraded first."""
    found = await look(session)
    if found is not None and found.schema.version < VERSION:
        raise Misconfigured(
            f"the guard of this database has schema {found.schema.version}, and this fenced {RELEASE} needs {VERSION}: "
            f"run `{UPGRADE}` as the role that owns the schema fenced_guard"
        )
    return found is not None


async def upgrade(session: Runs) -> list[str]:
    """The statements that bring the schema of this database to our version; none if it has it.

    A later fenced may have replaced the functions already. Then they stay.
    """
    found = await look(session)
    if found is None:
        await _check_server(session)
    version = found.schema.version if found else 0
    if (
        found
        and version >= VERSION
        and (found.functions == digest() or is_older(RELEASE, found.schema.release))
    ):
        return []
    if version > VERSION:  # and readable by this client
        return []
    migrations = [(HERE / f"tables_{number}.sql").read_text() for number in range(version + 1, VERSION + 1)]
    stored = f"readable_by = {READABLE_BY}, release = {literal(RELEASE)}, functions = {literal(digest())}"
    return [
        _unchanged(version),
        *migrations,
        functions(),
        f"UPDATE fenced_guard.schema SET version = {VERSION}, {stored}",
    ]


def _unchanged(version: int) -> str:
    """One upgrade at a time: the lock lasts until COMMIT. Another session may have upgraded since we looked."""
    return (
        "DO $fenced$ DECLARE\n  v_version integer := 0;\nBEGIN\n"
        "  PERFORM pg_advisory_xact_lock(hashtextextended('fenced_guard.schema', 0));\n"
        "  IF to_regclass('fenced_guard.schema') IS NOT NULL THEN\n"
        "    SELECT version INTO v_version FROM fenced_guard.schema;\n"
        "  ELSIF to_regclass('fenced_guard.mark') IS NOT NULL THEN v_version := 1; END IF;\n"
        f"  IF v_version <> {version} THEN\n"
        "    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',\n"
        "      MESSAGE = 'fenced: another session has upgraded the guard of this database meanwhile; try again';\n"
        "  END IF;\nEND $fenced$"
    )


async def _check_server(session: Runs) -> None:
    ((encoding, version),) = await session.run(
        "SELECT current_setting('server_encoding'), current_setting('server_version_num')::int"
    )
    if encoding != "UTF8":
        raise Misconfigured(f"a guarded database must be encoded in UTF8; this one is in {encoding}")
    if version < 140000:
        raise Unsupported("a guard needs PostgreSQL 14 or later")
