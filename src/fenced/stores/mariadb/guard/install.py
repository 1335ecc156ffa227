"""Installing the MariaDB guard: reading the table's shape, and the statements that install the guard.

DDL commits, so an installation is no transaction. Its statements come in an order in which each one that fails leaves a
guard that refuses no more than its mode says, and a second installation repairs.
"""

from __future__ import annotations

from dataclasses import replace as replace_in
from typing import cast

from fenced.errors import Misconfigured, Misuse, Unsupported
from fenced.guards.answers import check_pattern
from fenced.guards.claims import Claiming
from fenced.guards.engine import Registered
from fenced.guards.spec import Spec, asks_for, described, may_meet
from fenced.stores.mariadb.guard import claiming, schema
from fenced.stores.mariadb.guard.schema import RunsStatements
from fenced.stores.mariadb.guard.triggers import DIGEST, INTEGERS, TEXTS, MariadbShape, drop, triggers
from fenced.stores.mariadb.wire.connection import literal
from fenced.values.decision import Mode, Rule

OWN_TABLE = "fenced_value"
CREATE_VALUES = (
    f"CREATE TABLE IF NOT EXISTS {OWN_TABLE} (name VARBINARY(200) NOT NULL PRIMARY KEY, value LONGBLOB, "
    "version BIGINT NOT NULL) ENGINE = InnoDB"
)
LOCK_SECONDS = 2
"""How long an installation waits for the lock of a table. Writers of the table queue behind it meanwhile."""
UNLOCK = "UNLOCK TABLES"
_CASCADES = ("CASCADE", "SET NULL", "SET DEFAULT")


def table_of(spec: Spec) -> str:
    """The name of the table without its database."""
    return spec.table.rpartition(".")[2]


async def scope_of(spec: Spec, session: RunsStatements) -> str:
    """The database of the table: the one that it names, or that of the connection."""
    named, _, table = spec.table.rpartition(".")
    if named == "fenced_guard" or (table.startswith("fenced_") and table != OWN_TABLE):
        raise Misuse(f"{spec.table!r} is one of fenced's own tables")
    if named:
        return named
    ((found,),) = await session.run("SELECT DATABASE()")
    if found is None:
        raise Misuse(f"no database is selected: name the table as database.{table}")
    return str(found)


async def look_at(spec: Spec, session: RunsStatements) -> MariadbShape:
    """Read the shape of the table; Misconfigured or Unsupported if it cannot be guarded."""
    scope, table = await scope_of(spec, session), table_of(spec)
    where = f"TABLE_SCHEMA = {literal(scope)} AND TABLE_NAME = {literal(table)}"
    found = await session.run(f"SELECT TABLE_TYPE, ENGINE FROM information_schema.TABLES WHERE {where}")
    if not found:
        raise Misconfigured(f"there is no table {scope}.{table}, or this user may not see it")
    kind, engine = found[0]
    if kind != "BASE TABLE":
        raise Unsupported(f"{scope}.{table} is not a plain table; guard the table behind it")
    if str(engine).lower() != "innodb":
        raise Unsupported(
            f"{scope}.{table} is a table of {engine}, where a refused row would stay: "
            f"ALTER TABLE {table} ENGINE = InnoDB"
        )
    columns = await session.run(
        "SELECT COLUMN_NAME, LOWER(DATA_TYPE), LOWER(COLUMN_TYPE), UPPER(EXTRA), "
        "LOWER(COALESCE(CHARACTER_SET_NAME, '')) "
        f"FROM information_schema.COLUMNS WHERE {where}"
    )
    shape = MariadbShape(
        scope,
        table,
        {name: _kind(data, whole, charset) for name, data, whole, _, charset in columns},
        frozenset(
            name
            for name, _, _, extra, _ in columns
            if "GENERATED" in extra and "DEFAULT_GENERATED" not in extra
        ),
    )
    _check_columns(spec, shape)
    await _refuse_cascades(shape, session)
    return shape


def _kind(data: str, whole: str, charset: str) -> str:
    if data in INTEGERS and "zerofill" in whole:
        return "zerofill"
    return "binary" if charset == "binary" else data


def _check_columns(spec: Spec, table: MariadbShape) -> None:
    where = f"{table.scope}.{table.table}"
    allowed = INTEGERS | TEXTS | ({"varbinary"} if table.table == OWN_TABLE else set())
    for column in spec.columns:
        kind = table.kinds.get(column)
        if kind is None:
            raise Misconfigured(f"the table {where} has no column {column!r}")
        if kind not in allowed:
            raise Unsupported(
                f"the column {column!r} is of type {kind}; a name is made of integers, texts, uuids and enums, "
                "which have the same text in every session"
            )
        if spec.epoch is not None and column in table.generated:
            raise Unsupported(
                f"the column {column!r} is generated; with an epoch column, make the name of other columns"
            )
    if spec.epoch is not None and table.kinds.get(spec.epoch, "bigint") != "bigint":
        raise Misconfigured(f"the epoch column {spec.epoch!r} must be a bigint")


async def cascades(table: MariadbShape, session: RunsStatements) -> list[str]:
    """The foreign keys by which a statement on another table changes rows of this one, and fires no trigger."""
    rows = await session.run(
        "SELECT CONSTRAINT_NAME, UPDATE_RULE, DELETE_RULE, REFERENCED_TABLE_NAME "
        "FROM information_schema.REFERENTIAL_CONSTRAINTS "
        f"WHERE CONSTRAINT_SCHEMA = {literal(table.scope)} AND TABLE_NAME = {literal(table.table)}"
    )
    return [
        f"foreign key {name} (ON {'DELETE' if deletes in _CASCADES else 'UPDATE'} "
        f"{deletes if deletes in _CASCADES else updates}, of {parent})"
        for name, updates, deletes, parent in rows
        if updates in _CASCADES or deletes in _CASCADES
    ]


async def _refuse_cascades(table: MariadbShape, session: RunsStatements) -> None:
    found = await cascades(table, session)
    if found:
        raise Unsupported(
            f"{', '.join(found)} changes rows of {table.scope}.{table.table} without firing its triggers: make it "
            "RESTRICT, and change these rows by statements of their own"
        )


async def registered(session: RunsStatements) -> list[Registered]:
    """Every guard of the connection's database."""
    if await schema.look(session) is None:
        return []
    found = await session.run(
        "SELECT tbl, template, rule, epoch, mandatory, claims FROM fenced_guard.guard "
        "WHERE scope = CAST(DATABASE() AS BINARY) ORDER BY tbl"
    )
    made = []
    for tbl, template, rule, epoch, mandatory, claims in found:
        claiming = Claiming.parse(text(claims)) if claims else None
        spec = Spec(text(tbl), text(template), cast(Rule, text(rule)), text(epoch) or None, claiming)
        made.append(Registered(spec, bool(mandatory)))
    return made


def text(value: object) -> str:
    """What a binary column holds, as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


async def script(
    spec: Spec, mode: Mode | None, session: RunsStatements, *, mandatory: bool, replace: bool = False
) -> list[str]:
    """The statements that install the guard on the database that `session` is connected to.

    `mode` None: an installed guard keeps its mode, a new guard gets observe.
    """
    if spec.claims is not None:
        spec = replace_in(spec, claims=claiming.resolved(spec.claims))
    upgrades = await schema.upgrade(session)
    table = await look_at(spec, session)
    if await schema.look(session) is not None:
        await _refuse_others(spec, table, session, mandatory=mandatory, replace=replace)
        where = f"scope = {literal(table.scope)} AND proof"
        if spec.claims and await session.run(f"SELECT 1 FROM fenced_guard.trust WHERE {where}"):
            raise Unsupported("proofs are required in this database, and claims carry none")
    makes_epoch = spec.epoch is not None and spec.epoch not in table.kinds
    added = [f"ALTER TABLE {table.quoted} ADD COLUMN `{spec.epoch}` BIGINT DEFAULT 0"] if makes_epoch else []
    made = triggers
    if spec.claims is not None:
        added, made = await claiming.columns(spec, spec.claims, table, session), claiming.triggers
    return [
        *upgrades,
        *_registration(spec, table, mandatory, makes_epoch, mode),
        # Nobody writes between the old triggers and the new ones.
        f"LOCK TABLES {table.quoted} WRITE",
        *added,
        *drop(table),
        *(made(spec, table) if mandatory else ()),
        UNLOCK,
    ]


def _registration(
    spec: Spec, table: MariadbShape, mandatory: bool, makes_epoch: bool, mode: Mode | None
) -> list[str]:
    where = f"{literal(table.scope)}, {literal(table.table)}"
    epoch = "NULL" if spec.epoch is None else literal(spec.epoch)
    claims = "NULL" if spec.claims is None else literal(str(spec.claims))
    digest = DIGEST if spec.claims is None else claiming.DIGEST
    first = mode or Mode("observe")
    keeps = "" if mode is None else ", mode = VALUES(mode), percent = VALUES(percent)"
    detail = f"{spec.name}, rule {spec.installs}{f', epoch {spec.epoch}' if spec.epoch else ''}"
    return [
        f"INSERT IGNORE INTO fenced_guard.trust (scope) VALUES ({literal(table.scope)})",
        (
            "INSERT INTO fenced_guard.guard "
            "(scope, tbl, template, rule, mandatory, epoch, epoch_made, mode, percent, claims, triggers) "
            f"VALUES ({where}, {literal(spec.name)}, '{spec.installs}', {mandatory}, {epoch}, {makes_epoch}, "
            f"'{first}', {first.percent!r}, {claims}, '{digest}') ON DUPLICATE KEY UPDATE "
            "template = VALUES(template), rule = VALUES(rule), mandatory = VALUES(mandatory), epoch = VALUES(epoch), "
            "epoch_made = epoch_made OR VALUES(epoch_made), "
            f"claims = VALUES(claims), triggers = VALUES(triggers){keeps}"
        ),
        mode_row(table.scope, table.table, first, "*", keeps=mode is None),
        history(table.scope, table.table, "install", detail),
    ]


def likes_of(pattern: str) -> str:
    """The pattern for LIKE ... ESCAPE '|'."""
    likes = check_pattern(pattern)
    for special in "|%_":
        likes = likes.replace(special, f"|{special}")
    return likes.replace("*", "%")


def mode_row(scope: str, table: str, mode: Mode, pattern: str, *, keeps: bool = False) -> str:
    """The statement that sets the mode of a pattern; `keeps`: only if it has none."""
    values = (
        f"{literal(scope)}, {literal(table)}, {literal(pattern)}, {literal(likes_of(pattern))}, {len(pattern)}, "
        f"'{mode}', {mode.percent!r}, UTC_TIMESTAMP(6)"
    )
    known = (
        "mode = mode" if keeps else "mode = VALUES(mode), percent = VALUES(percent), since = VALUES(since)"
    )
    return (
        "INSERT INTO fenced_guard.mode (scope, tbl, pattern, likes, length, mode, percent, since) "
        f"VALUES ({values}) ON DUPLICATE KEY UPDATE {known}"
    )


def history(scope: str, table: str | None, what: str, detail: str) -> str:
    return (
        "INSERT INTO fenced_guard.history (at, who, scope, tbl, what, detail) VALUES "
        f"(UTC_TIMESTAMP(6), USER(), {literal(scope)}, {'NULL' if table is None else literal(table)}, "
        f"'{what}', {literal(detail)})"
    )


async def _refuse_others(
    spec: Spec, table: MariadbShape, session: RunsStatements, *, mandatory: bool, replace: bool
) -> None:
    """Misconfigured if the table has another guard, or another table one that can make a name by another rule."""
    rows = await session.run(
        "SELECT tbl, template, rule, epoch, mandatory, claims FROM fenced_guard.guard "
        f"WHERE scope = {literal(table.scope)}"
    )
    wanted = (spec.name, spec.installs, spec.epoch or "", mandatory, str(spec.claims or ""))
    for tbl, template, rule, epoch, live, claims in rows:
        found = (text(template), text(rule), text(epoch), bool(live), text(claims))
        if text(tbl) == table.table:
            if found != wanted and not replace:
                claimed = Claiming.parse(found[4]) if found[4] else None
                other = Spec(text(tbl), found[0], cast(Rule, found[1]), found[2] or None, claimed)
                raise Misconfigured(
                    f"{table.table} is guarded under {described(other, found[3])}; {asks_for(spec, mandatory)}"
                )
        elif found[1] != spec.installs and may_meet(spec.name, found[0]):
            raise Misconfigured(
                f"{text(tbl)!r} is guarded under {found[0]!r} by rule {found[1]}; {spec.name!r} can make "
                "the same name, "
                f"so its rule must be {found[1]} too"
            )


async def uninstall(spec: Spec, session: RunsStatements) -> list[str]:
    """Restore the table. The marks stay: a guard that is installed later needs them to refuse old holders."""
    await schema.installed(session)
    scope, table = await scope_of(spec, session), table_of(spec)
    where = f"scope = {literal(scope)} AND tbl = {literal(table)}"
    found = await session.run(f"SELECT epoch, epoch_made FROM fenced_guard.guard WHERE {where}")
    if not found:
        raise Misconfigured(f"no guard is installed for {scope}.{table}")
    shape = MariadbShape(scope, table, {})
    known = f"TABLE_SCHEMA = {literal(scope)} AND TABLE_NAME = {literal(table)}"
    there = await session.run(f"SELECT 1 FROM information_schema.TABLES WHERE {known}")
    epoch, made = found[0]
    column = await session.run(
        f"SELECT 1 FROM information_schema.COLUMNS WHERE {known} AND COLUMN_NAME = {literal(text(epoch))}"
    )
    dropped = [f"ALTER TABLE {shape.quoted} DROP COLUMN `{text(epoch)}`"] if made and column else []
    return [
        *([f"LOCK TABLES {shape.quoted} WRITE", *drop(shape), *dropped, UNLOCK] if there else ()),
        history(scope, table, "uninstall", ""),
        *(f"DELETE FROM fenced_guard.{kept} WHERE {where}" for kept in ("guard", "mode", "override")),
    ]
