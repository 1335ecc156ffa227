"""The statements that install an SQLite guard: which name covers a row, and the triggers that check it.

A trigger's fast path is one query: is there an open stamp for this row's name? Everything else was decided when the
stamp was announced. AFTER triggers check new names, because the rowid of an INSERT may not be known earlier. BEFORE
triggers check the rows that a REPLACE would remove.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path

from fenced.errors import Misconfigured, Misuse, Unsupported
from fenced.guards.answers import check_pattern
from fenced.guards.claims import Claiming
from fenced.guards.engine import Registered
from fenced.guards.spec import Spec, asks_for, check_identifier, described, literal, may_meet
from fenced.stores.sqlite.guard import claiming
from fenced.stores.sqlite.guard.unique import Key, Run, look_at
from fenced.values import sqlfile
from fenced.values.decision import Mode
from fenced.values.schema import RELEASE, Schema, check_readable

HERE = Path(__file__).parent
TABLES = (HERE / "tables.sql").read_text()
SQL = sqlfile.load(HERE / "trigger.sql")
AUTHORITY_APPLICATION_ID = 0x46454E43

OWN_TABLE = "fenced_value"

SCHEMA_VERSION = 2
_VERSION = (
    f"INSERT INTO fenced_schema (one, version, readable_by, release) VALUES (1, {SCHEMA_VERSION}, 1, '{RELEASE}') "
    "ON CONFLICT (one) DO UPDATE SET version = excluded.version, readable_by = excluded.readable_by, "
    "release = excluded.release WHERE version < excluded.version"
)
"""Version 2 added the table `fenced_schema`. A later fenced may have stored a later version; then that stays."""
# The realm that the guards of this database trust; if none does, the realm of its highest mark.
_REALM = (
    "coalesce((SELECT realm FROM fenced_guard WHERE realm IS NOT NULL LIMIT 1), "
    "(SELECT substr(stamp, 3, 16) FROM fenced_mark ORDER BY token DESC LIMIT 1))"
)


def check_table(spec: Spec) -> None:
    """Refuse fenced's own tables, and an epoch column, which SQLite guards do not have."""
    check_identifier(spec.table, "table")
    if spec.table.startswith("fenced_") and spec.table != OWN_TABLE:
        raise Misuse(f"{spec.table!r} is one of fenced's own tables")
    if spec.epoch is not None:
        raise Unsupported("an SQLite guard keeps no epoch column; use clause() for one of your own")


def _expression(spec: Spec, row: str, rowid_alias: str | None) -> str:
    """The SQL expression for the name of `row` (NEW, OLD, or a table)."""
    parts = []
    for piece, is_column in spec.pieces:
        if not is_column:
            parts.append(literal(piece))
        elif spec.whole:
            # || turns it into text without collation or affinity: names are compared byte by byte.
            parts.append(f"({row}.\"{piece}\" || '')")
        elif piece == rowid_alias:
            parts.append(f'{row}."{piece}"')
        else:
            parts.append(f"replace(replace({row}.\"{piece}\", '%', '%25'), '/', '%2F')")
    return "(" + " || ".join(parts) + ")" if len(parts) > 1 else parts[0]


def glob_of(pattern: str) -> str:
    """The pattern for SQLite's GLOB. Only `*` is special in a pattern of ours, so `?` and `[` are escaped."""
    return re.sub(r"([?\[])", r"[\1]", check_pattern(pattern))


async def set_mode(run: Run, guard: str, mode: Mode, pattern: str) -> None:
    """Set the mode of the names that match; it binds every transaction that begins afterwards."""
    await run(
        "INSERT INTO fenced_mode (guard, pattern, glob, mode) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (guard, pattern) DO UPDATE SET mode = excluded.mode",
        (guard, pattern, glob_of(pattern), str(mode)),
    )


async def script(
    spec: Spec, mode: Mode | None, run: Run, *, mandatory: bool, replace: bool = False
) -> list[str]:
    """The statements that install the guard; `run` reads the table's present columns and keys.

    `mode` None: an installed guard keeps its mode, a new guard gets observe. Without `replace` another guard of this
    table is Misconfigured.
    """
    if await run("PRAGMA application_id") == [(AUTHORITY_APPLICATION_ID,)]:
        raise Misconfigured(
            "this database belongs to an authority; keep guarded data in a separate file, because a holder that is "
            "paused inside its transaction would block every lease"
        )
    await stored_schema(run)
    triggers = await (_triggers(spec, run) if spec.claims is None else _claim_triggers(spec, run))
    guards = await registered(run)
    if not replace:
        _refuse_another(spec, mandatory, guards)
    _refuse_mixed_rules(spec, guards)
    table = literal(spec.table)
    count = len(triggers) - 1 if mandatory else 0  # one of them is the view
    guard = (
        f"INSERT INTO fenced_guard (guard, template, rule, triggers, realm) "
        f"VALUES ({table}, {literal(spec.name)}, '{spec.installs}', {count}, {_REALM}) "
        "ON CONFLICT (guard) DO UPDATE "
        "SET template = excluded.template, rule = excluded.rule, triggers = excluded.triggers"
    )
    known = "UPDATE SET mode = excluded.mode" if mode else "NOTHING"
    observing = (
        f"INSERT INTO fenced_mode (guard, pattern, glob, mode) VALUES ({table}, '*', '*', '{mode or 'observe'}') "
        f"ON CONFLICT (guard, pattern) DO {known}"
    )
    dropped = await drop_triggers(spec, run)
    claims = [f"DELETE FROM fenced_claims WHERE guard = {table}"]
    if spec.claims is not None:
        spec = changed(spec, claims=changed(spec.claims, minted=False))
        claims.append(
            f"INSERT INTO fenced_claims (guard, claims) VALUES ({table}, {literal(str(spec.claims))})"
        )
        assert spec.claims is not None
        claims += await claiming.columns(spec, spec.claims, run)
        claims += await claiming.indexes(spec, spec.claims, run)
    return [
        *sqlfile.statements(TABLES),
        _VERSION,
        guard,
        observing,
        *dropped,
        *claims,
        *(triggers if mandatory else ()),
    ]


async def stored_schema(run: Run) -> Schema | None:
    """The schema of the guards in this file; None if it has none. Misconfigured if this client is too old for it."""
    tables = await run(
        "SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name IN ('fenced_schema', 'fenced_guard')"
    )
    if ("fenced_schema",) not in tables:
        return Schema(1, 1, "0.1") if tables else None
    rows = await run("SELECT version, readable_by, release FROM fenced_schema")
    found = Schema(*rows[0])
    check_readable("the guard of this file", found, SCHEMA_VERSION)
    return found


async def _triggers(spec: Spec, run: Run) -> list[str]:
    table = await look_at(spec.table, spec.columns, run)
    new, old = (_expression(spec, row, table.alias) for row in ("NEW", "OLD"))
    triggers = [
        *_gate_statements(spec),
        _trigger(spec, "insert", "AFTER", "INSERT", new),
        _trigger(spec, "update", "AFTER", "UPDATE", new),
        _trigger(spec, "delete", "AFTER", "DELETE", old),
    ]
    if spec.columns:
        moved = ", ".join((*(f'"{column}"' for column in spec.columns), *table.rowids))
        triggers.append(
            _trigger(spec, "moved", "AFTER", f"UPDATE OF {moved}", old, f"{old} IS NOT {new} AND ")
        )
    for number, key in enumerate(table.keys):
        victim = _expression(spec, "v", table.alias)
        triggers += _replace_triggers(
            spec, number, key, victim, new, "trigger" if table.replaces else "replaced"
        )
    return triggers


async def _claim_triggers(spec: Spec, run: Run) -> list[str]:
    assert spec.claims is not None
    table = await look_at(spec.table, spec.columns, run)
    name, victim = (_expression(spec, row, table.alias) for row in ("OLD", "v"))
    statements = [*_gate_statements(spec), *claiming.triggers(spec, name, _gate(spec))]
    for number, (columns, found) in enumerate(claiming.removed_by_replace(spec.claims, table)):
        victims = f'FROM "{spec.table}" v WHERE {found}'
        for event in ("INSERT", f"UPDATE OF {columns}"):
            label = f"replaced_{event[:6].lower()}_{number}"
            removed, exists = f"(SELECT {victim} {victims})", f"EXISTS (SELECT 1 {victims}) AND "
            # `replaced` finds out by itself whether the statement is a REPLACE: an upsert keeps the row.
            statements.append(_trigger(spec, label, "BEFORE", event, removed, exists, "replaced"))
    return statements


def _replace_triggers(spec: Spec, number: int, key: Key, named: str, new: str, sql: str) -> list[str]:
    """Check the row that a REPLACE through this key would remove, if that row has another name."""
    victims = f'FROM "{spec.table}" v WHERE {key.same} AND {named} IS NOT {new}'
    removed = f"(SELECT {named} {victims})"
    found = f"EXISTS (SELECT 1 {victims}) AND "
    return [
        _trigger(spec, f"replaced_{event[:6].lower()}_{number}", "BEFORE", event, removed, found, sql)
        for event in ("INSERT", f"UPDATE OF {key.columns}")
    ]


async def registered(run: Run) -> list[Registered]:
    """Every guard of this file."""
    if not await run("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'fenced_guard'"):
        return []
    found = await run("SELECT guard, template, rule, triggers FROM fenced_guard ORDER BY guard")
    claims: dict[str, str] = {}
    if await _has_claims(run):
        claims = dict(await run("SELECT guard, claims FROM fenced_claims"))
    return [
        Registered(
            Spec(guard, template, rule, None, Claiming.parse(claims[guard]) if guard in claims else None),
            triggers > 0,
        )
        for guard, template, rule, triggers in found
    ]


async def _has_claims(run: Run) -> bool:
    """Whether this file was made or upgraded by a fenced that knows claims."""
    return bool(await run("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'fenced_claims'"))


def _refuse_another(spec: Spec, mandatory: bool, guards: Sequence[Registered]) -> None:
    """Refuse to change an installed guard: its writers would be judged by another name or rule at once."""
    claims = changed(spec.claims, minted=False) if spec.claims else None
    wanted = Registered(changed(spec, rule=spec.installs, claims=claims), mandatory)
    for live in guards:
        if live.spec.table == spec.table and live != wanted:
            raise Misconfigured(
                f"{spec.table} is guarded under {described(*live)}; {asks_for(spec, mandatory)}"
            )


def _refuse_mixed_rules(spec: Spec, guards: Sequence[Registered]) -> None:
    """Guards that can have a name in common must have one rule; otherwise a writer could use the weaker one."""
    for other, _ in guards:
        if other.table != spec.table and other.rule != spec.installs and may_meet(spec.name, other.name):
            raise Misconfigured(
                f"{other.table!r} is guarded under {other.name!r} by rule {other.rule}; {spec.name!r} can make the "
                f"same name, so its rule must be {other.rule} too"
            )


def _trigger(
    spec: Spec, label: str, when: str, event: str, name: str, guard_if: str = "", sql: str = "trigger"
) -> str:
    return SQL[sql].format(
        trigger=f'main."fenced_{spec.table}_{label}"',
        when=when,
        event=event,
        table_name=f'"{spec.table}"',
        table=spec.table,
        gate=_gate(spec),
        guard_if=guard_if,
        name=name,
    )


def _gate(spec: Spec) -> str:
    return f"fenced_{spec.table}_gate"


def _gate_statements(spec: Spec) -> list[str]:
    # The longest pattern, without ORDER BY: its sorter is allocated again for every row.
    mode = (
        "(SELECT mode FROM (SELECT mode, max(printf('%03d%s', length(pattern), pattern)) FROM fenced_mode "
        f"WHERE guard = '{spec.table}' AND (pattern = '*' OR NEW.name GLOB glob)))"
    )
    verdict = (
        "coalesce((SELECT verdict FROM fenced_stamp WHERE name = NEW.name), "
        "CASE WHEN EXISTS (SELECT 1 FROM fenced_stamp) THEN 'uncovered' ELSE 'missing' END)"
    )
    parts = {"table": spec.table, "gate": _gate(spec), "mode": mode, "verdict": verdict}
    return [SQL["view"].format(**parts), SQL["gate"].format(**parts)]


async def drop_triggers(spec: Spec, run: Run) -> list[str]:
    """Statements that drop the triggers that exist now."""
    found = await run(
        "SELECT name FROM main.sqlite_schema WHERE type = 'trigger' AND tbl_name = ? AND name GLOB 'fenced_*'",
        (spec.table,),
    )
    gate = f'DROP VIEW IF EXISTS main."{_gate(spec)}"'  # and its trigger
    return [*(f'DROP TRIGGER main."{name}"' for (name,) in found), gate]


async def uninstall(spec: Spec, run: Run) -> list[str]:
    """Restore the table. The marks stay: a guard that is installed later needs them to refuse old holders."""
    table = literal(spec.table)
    return [
        *await drop_triggers(spec, run),
        f"DELETE FROM fenced_guard WHERE guard = {table}",
        f"DELETE FROM fenced_mode WHERE guard = {table}",
        *([f"DELETE FROM fenced_claims WHERE guard = {table}"] if await _has_claims(run) else []),
    ]
