"""Opening an authority: its tables, which the first client makes, and its namespace."""

from __future__ import annotations

from fenced.errors import Misconfigured, Unavailable
from fenced.leases.rules import no_namespace
from fenced.stores.mariadb.authority.rows import HERE, SQL
from fenced.stores.mariadb.authority.session import LeaseSession, other_history
from fenced.stores.mariadb.wire.connection import literal
from fenced.stores.mariadb.wire.failures import ServerRefusal
from fenced.values.model import Standing
from fenced.values.schema import RELEASE, Schema, check_readable

SCHEMA_VERSION = 1
TABLES = [part for part in (HERE / "schema.sql").read_text().split(";\n") if "CREATE TABLE" in part]


async def stored_schema(session: LeaseSession, until: float) -> Schema | None:
    """The version of the tables; None if they are not there, or are just being made."""
    try:
        rows = await session.look(SQL["version"], until)
    except ServerRefusal:
        return None
    for version, readable_by, made_by in rows:
        stored = Schema(version, readable_by, made_by.decode())
        check_readable(session.where, stored, SCHEMA_VERSION)
        return stored
    return None


async def install(session: LeaseSession, until: float) -> None:
    """Each statement leaves alone what is there: several clients may do this at once, and again after a failure."""
    stored = {"version": SCHEMA_VERSION, "readable_by": SCHEMA_VERSION, "made_by": literal(RELEASE)}
    try:
        await session.run([*TABLES, SQL["store_version"].format(**stored)], until)
    except Misconfigured as error:
        raise Misconfigured(
            f"{error}. The tables of leases are missing: run `fenced authority install` as a user who may CREATE them"
        ) from error


async def enter(
    session: LeaseSession, name: str, realm: str, create: bool, until: float
) -> tuple[int, Standing]:
    """The number of the namespace and what was learned; with `create`, a missing one is made with this realm."""
    settings = await session.read_settings(until)
    known = SQL["namespace"].format(name=literal(name))
    rows = await session.look(known, until)
    if not rows and create:
        new = {"name": literal(name), "realm": literal(realm), "lineage": literal(session.lineage)}
        await session.run([SQL["new_namespace"].format(**new)], until)
        rows = await session.look(known, until)
    if not rows:
        raise no_namespace(session.where, name)
    (number, found, floor, lineage, last), *_ = rows
    ((clock,),) = await session.look(SQL["clock"], until)
    history = lineage.decode()
    stopped = None if history == session.lineage else other_history(history, session.lineage)
    stored = await stored_schema(session, until)
    if stored is None:
        raise Unavailable(f"{session.where}: the tables of leases were deleted just now")
    standing = Standing(
        found.decode(), floor + last, settings.doubts(), settings.warnings(), stored, stopped, clock / 1e6
    )
    return number, standing
