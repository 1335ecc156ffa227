"""Which name covers a row, and the triggers that see to it.

A trigger's fast path is one look: is there an open stamp for this row's name? Everything else was decided
when the stamp was announced. New names are looked at after the row is written (an INSERT may not know its
rowid before), rows that REPLACE would remove silently before.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fenced import sqlfile
from fenced.decision import RULES, Mode, Rule
from fenced.errors import Misconfigured, Misuse, Unsupported, shown
from fenced.guards.answers import check_pattern
from fenced.model import check_name

HERE = Path(__file__).parent
TABLES = (HERE / "tables.sql").read_text()
TRIGGER = sqlfile.load(HERE / "trigger.sql")["trigger"]
AUTHORITY_APPLICATION_ID = 0x46454E43

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)
_FIELD = re.compile(r"\{([^{}]*)\}")
_ROWIDS = ("rowid", "_rowid_", "oid")

# The realm that the guards of this database trust, or that its marks remember.
_REALM = (
    "coalesce((SELECT realm FROM fenced_guard WHERE realm IS NOT NULL LIMIT 1), "
    "(SELECT substr(stamp, 3, 16) FROM fenced_mark ORDER BY token DESC LIMIT 1))"
)

Run = Callable[..., Awaitable[list[tuple[Any, ...]]]]


def check_identifier(name: object, what: str) -> str:
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise Misuse(f"{what} is a plain SQL identifier, not {shown(name)}")
    return name


@dataclass(frozen=True)
class Spec:
    """What a guard protects: a table, the name that covers a row, and the rule.

    `name` is a constant (`orders`), a template over columns (`orders/{id}`), or one column that holds the
    whole name (`{name}`). In a template a value's `%` and `/` are escaped, so that two rows never share
    a name by accident.
    """

    table: str
    name: str
    rule: Rule = "retry"

    def __post_init__(self) -> None:
        check_identifier(self.table, "table")
        if self.rule not in RULES:
            raise Misuse(f"a rule is {', '.join(RULES)}, not {shown(self.rule)}")
        if not isinstance(self.name, str) or len(self.name) > 200:
            raise Misuse(f"name is a name or a template such as 'orders/{{id}}', not {shown(self.name)}")
        for column in self.columns:
            check_identifier(column, "a column in the name template")
        check_name(_FIELD.sub("x", self.name))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_FIELD.findall(self.name)))

    @property
    def _whole(self) -> bool:
        return len(self.columns) == 1 and self.name == f"{{{self.columns[0]}}}"

    def name_for(self, **values: object) -> str:
        """The name that covers the row with these column values."""
        if set(values) != set(self.columns):
            raise Misuse(f"the name {self.name!r} takes {', '.join(self.columns) or 'no values'}")
        escape = (lambda text: text) if self._whole else _escape
        texts = {column: escape(str(value)) for column, value in values.items()}
        return check_name(_FIELD.sub(lambda found: texts[found[1]], self.name))

    def expression(self, row: str, rowid_alias: str | None) -> str:
        """The SQL expression for the name of `row` (NEW, OLD, or a table)."""
        if not self.columns:
            return _literal(self.name)
        parts = []
        for index, piece in enumerate(_FIELD.split(self.name)):
            if index % 2 == 0:
                if piece:
                    parts.append(_literal(piece))
            elif self._whole or piece == rowid_alias:
                parts.append(f'{row}."{piece}"')
            else:
                parts.append(f"replace(replace({row}.\"{piece}\", '%', '%25'), '/', '%2F')")
        return "(" + " || ".join(parts) + ")" if len(parts) > 1 else parts[0]


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("/", "%2F")


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def glob_of(pattern: str) -> str:
    """The pattern for SQLite's GLOB, in which only `*` is special to us."""
    return re.sub(r"([?\[])", r"[\1]", check_pattern(pattern))


async def script(spec: Spec, mode: Mode | None, run: Run) -> list[str]:
    """The statements that install the guard; `run` looks at the table as it is.

    `mode` None: what is there keeps its mode, a new guard observes.
    """
    rowid_alias, uniques = await _look_at(spec, run)
    await _refuse_mixed_rules(spec, run)
    table = _literal(spec.table)
    statements = sqlfile.statements(TABLES)
    statements.append(
        f"INSERT INTO fenced_guard (guard, template, rule, realm) VALUES ({table}, {_literal(spec.name)}, "
        f"'{spec.rule}', {_REALM}) "
        "ON CONFLICT (guard) DO UPDATE SET template = excluded.template, rule = excluded.rule"
    )
    statements.append(
        f"INSERT INTO fenced_mode (guard, pattern, glob, mode) VALUES ({table}, '*', '*', '{mode or 'observe'}') "
        "ON CONFLICT (guard, pattern) DO " + ("UPDATE SET mode = excluded.mode" if mode else "NOTHING")
    )
    statements += drop_triggers(spec)
    new, old = (spec.expression(row, rowid_alias) for row in ("NEW", "OLD"))
    statements.append(_trigger(spec, "insert", "AFTER", "INSERT", new))
    statements.append(_trigger(spec, "update", "AFTER", "UPDATE", new))
    statements.append(_trigger(spec, "delete", "AFTER", "DELETE", old))
    if spec.columns:
        moved = ", ".join((*(f'"{column}"' for column in spec.columns), *_ROWIDS))
        changed = f"{old} IS NOT {new} AND "
        statements.append(_trigger(spec, "moved", "AFTER", f"UPDATE OF {moved}", old, changed))
    for number, columns in enumerate(uniques):
        victim = _victim(spec, columns, rowid_alias)
        conflict = f"{victim} IS NOT NULL AND {victim} IS NOT {new} AND "
        listed = ", ".join(f'"{column}"' for column in columns)
        for event in ("INSERT", f"UPDATE OF {listed}"):
            label = f"replaced_{event[:6].lower()}_{number}"
            statements.append(_trigger(spec, label, "BEFORE", event, victim, conflict))
    return statements


async def _refuse_mixed_rules(spec: Spec, run: Run) -> None:
    """Two guards that may meet under one name judge by one rule, or the weaker one would be the way in."""
    if not await run("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'fenced_guard'"):
        return
    own = spec.name.partition("{")[0]
    for guard, template, rule in await run("SELECT guard, template, rule FROM fenced_guard"):
        other = str(template).partition("{")[0]
        overlap = own.startswith(other) or other.startswith(own)
        if guard != spec.table and rule != spec.rule and overlap:
            raise Misconfigured(
                f"{guard!r} is guarded under {template!r} by rule {rule}; {spec.name!r} may be the same name, "
                f"so its rule must be {rule}, too"
            )


def _trigger(spec: Spec, label: str, when: str, event: str, name: str, guard_if: str = "") -> str:
    mode = (
        f"(SELECT mode FROM fenced_mode "
        f"WHERE guard = '{spec.table}' AND (pattern = '*' OR {name} GLOB glob) "
        "ORDER BY length(pattern) DESC, pattern DESC LIMIT 1)"
    )
    verdict = (
        f"coalesce((SELECT verdict FROM fenced_stamp WHERE name = {name}), "
        "CASE WHEN EXISTS (SELECT 1 FROM fenced_stamp) THEN 'uncovered' ELSE 'missing' END)"
    )
    return TRIGGER.format(
        trigger=f'"fenced_{spec.table}_{label}"',
        when=when,
        event=event,
        table_name=f'"{spec.table}"',
        table=spec.table,
        guard_if=guard_if,
        name=name,
        mode=mode,
        verdict=verdict,
    )


def _victim(spec: Spec, columns: Sequence[str], rowid_alias: str | None) -> str:
    """The name of the row that a REPLACE on these unique columns would remove, or NULL."""
    same = " AND ".join(f'v."{column}" = NEW."{column}"' for column in columns)
    return f'(SELECT {spec.expression("v", rowid_alias)} FROM "{spec.table}" v WHERE {same})'


async def _look_at(spec: Spec, run: Run) -> tuple[str | None, list[tuple[str, ...]]]:
    """The table's rowid alias, and the unique keys whose REPLACE could remove a row of another name."""
    if await run("PRAGMA application_id") == [(AUTHORITY_APPLICATION_ID,)]:
        raise Misconfigured(
            "this database is an authority's; keep guarded data in a file of its own, or a holder "
            "stopped inside its transaction blocks every lease"
        )
    found = await run("SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = ?", (spec.table,))
    if not found:
        raise Misconfigured(f"there is no table {spec.table!r} in this database's main schema")
    if str(found[0][0]).upper().startswith("CREATE VIRTUAL"):
        raise Unsupported(f"{spec.table!r} is a virtual table; SQLite has no triggers for those")
    columns = await run("SELECT name, type, pk FROM pragma_table_info(?)", (spec.table,))
    known = {row[0] for row in columns}
    for column in spec.columns:
        if column not in known:
            raise Misconfigured(f"the table {spec.table!r} has no column {column!r}")
    keys = [row for row in columns if row[2]]
    alias = keys[0][0] if len(keys) == 1 and str(keys[0][1]).upper() == "INTEGER" else None
    return alias, await _unique_keys(spec, run, keys)


async def _unique_keys(spec: Spec, run: Run, keys: Sequence[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    if not spec.columns:
        return []
    uniques = [tuple(row[0] for row in keys)] if keys else []
    for index, partial in await run(
        'SELECT name, partial FROM pragma_index_list(?) WHERE "unique"', (spec.table,)
    ):
        columns = [row[0] for row in await run("SELECT name FROM pragma_index_info(?)", (index,))]
        if partial or None in columns:
            raise Unsupported(
                f"the unique index {index!r} is partial or over an expression: a REPLACE through it could "
                "remove a row unseen; guard the table under one constant name instead"
            )
        uniques.append(tuple(columns))
    named = set(spec.columns)
    return [unique for unique in dict.fromkeys(uniques) if not named <= set(unique)]


def drop_triggers(spec: Spec) -> list[str]:
    labels = ["insert", "update", "delete", "moved"]
    labels += [f"replaced_{event}_{number}" for event in ("insert", "update") for number in range(16)]
    return [f'DROP TRIGGER IF EXISTS "fenced_{spec.table}_{label}"' for label in labels]


def uninstall(spec: Spec) -> list[str]:
    """Leave the table as it was. The marks stay: a later guard must not forget them."""
    table = _literal(spec.table)
    return [
        *drop_triggers(spec),
        f"DELETE FROM fenced_guard WHERE guard = {table}",
        f"DELETE FROM fenced_mode WHERE guard = {table}",
    ]
