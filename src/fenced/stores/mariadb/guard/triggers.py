"""The triggers of a guarded table: which name covers a row, and what asks the guard about it.

A trigger asks once for each statement and name. It remembers that in a variable with NOW(6), which is the same for all
rows of a statement, and another one in the next. The guard forgets the variable at both ends of a guarded transaction.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from fenced.guards.spec import Spec
from fenced.stores.mariadb.wire.connection import literal

INTEGERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})
TEXTS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "uuid"})
EVENTS = {"insert": ("NEW",), "update": ("NEW", "OLD"), "delete": ("OLD",)}


@dataclass(frozen=True)
class MariadbShape:
    """The table as it is now."""

    scope: str
    """Its database."""
    table: str
    kinds: dict[str, str]
    """The type of each column."""
    generated: frozenset[str] = field(default=frozenset())

    @property
    def quoted(self) -> str:
        return f"`{self.scope}`.`{self.table}`"


def trigger_name(table: str, event: str) -> str:
    """At most 64 characters, which is as long as a name can be."""
    if len(table) > 40:
        table = f"{table[:23]}_{hashlib.sha256(table.encode()).hexdigest()[:16]}"
    return f"fenced_{table}_{event}"


def name_of(spec: Spec, table: MariadbShape, row: str) -> str:
    """The SQL expression for the name of a row (NEW or OLD)."""
    parts = _parts(spec, table, row)
    return parts[0] if len(parts) == 1 else f"CONCAT({', '.join(parts)})"


def _parts(spec: Spec, table: MariadbShape, row: str, before: str = "") -> list[str]:
    """The pieces of the name, with a text before it."""
    parts = []
    for number, (piece, is_column) in enumerate(spec.pieces):
        if not is_column:
            parts.append(_constant(before + piece if number == 0 else piece))
            continue
        if number == 0 and before:
            parts.append(_constant(before))
        text, plain = f"{row}.`{piece}`", spec.whole or table.kinds[piece] in INTEGERS
        if table.kinds[piece] not in INTEGERS:
            text = f"CONVERT({text} USING utf8mb4)"
        # Also for a column that is never NULL: it may become one that is, and a NULL would look decided.
        text = f"COALESCE({text}, '')"
        parts.append(text if plain else f"REPLACE(REPLACE({text}, '%', '%25'), '/', '%2F')")
    return parts


def _constant(text: str) -> str:
    found = literal(text)
    return f"_utf8mb4 {found}" if found.startswith("x") else found


def triggers(spec: Spec, table: MariadbShape) -> list[str]:
    """The statements that create the triggers."""
    return [*(_decides(spec, table, event) for event in EVENTS), *_epoch_triggers(spec, table)]


def drop(table: MariadbShape) -> list[str]:
    """The statements that drop them."""
    names = (trigger_name(table.table, event) for event in (*EVENTS, "epoch_i", "epoch_u"))
    return [f"DROP TRIGGER IF EXISTS `{table.scope}`.`{name}`" for name in names]


def _decides(spec: Spec, table: MariadbShape, event: str) -> str:
    asked = [_asked(spec, table, row) for row in EVENTS[event]]
    if event == "update":
        asked[1:] = [f"IF {moved(spec, table)} THEN\n    {asked[1]}\n  END IF;"] if spec.columns else []
    body = "\n  ".join(asked)
    return trigger(table, event, "AFTER", event.upper(), body)


def trigger(table: MariadbShape, label: str, when: str, event: str, body: str) -> str:
    return (
        f"CREATE TRIGGER `{table.scope}`.`{trigger_name(table.table, label)}` {when} {event} ON {table.quoted}\n"
        f"FOR EACH ROW BEGIN\n  {body}\nEND"
    )


def _asked(spec: Spec, table: MariadbShape, row: str) -> str:
    name, own = name_of(spec, table, row), f"{table.table}:"
    decided = ", ".join(_parts(spec, table, row, own))
    where = f"{literal(table.scope)}, '{table.table}'"
    decides = (
        f"decide({where}, " if spec.installs == "retry" else f"decide_counted({where}, '{spec.installs}', "
    )
    return (
        f"IF NOT (@fenced_ok <=> CONCAT(NOW(6), {decided}))\n"
        f"      AND NOT (@fenced_free <=> CONCAT(NOW(6), '{own}')) THEN\n"
        f"    CALL fenced_guard.{decides}{name});\n  END IF;"
    )


def moved(spec: Spec, table: MariadbShape) -> str:
    """Whether an UPDATE has changed the name: compared byte by byte, whatever the collation says."""
    same = []
    for column in spec.columns:
        old, new = f"OLD.`{column}`", f"NEW.`{column}`"
        if table.kinds[column] not in INTEGERS:
            old, new = f"CONVERT({old} USING utf8mb4)", f"CONVERT({new} USING utf8mb4)"
            old, new = f"CAST({old} AS BINARY)", f"CAST({new} AS BINARY)"
        same.append(f"{old} <=> {new}")
    return f"NOT ({' AND '.join(same)})"


def _epoch_triggers(spec: Spec, table: MariadbShape) -> list[str]:
    """They put the token of an admitted write into the row. A write that is only let through keeps the epoch, or 0
    if it changes the name. An AUTO_INCREMENT column has no value yet: a name with one gets its epoch by an UPDATE."""
    if spec.epoch is None:
        return []
    token = f"fenced_guard.token_for({literal(table.scope)}, {name_of(spec, table, 'NEW')})"
    kept = f"OLD.`{spec.epoch}`"
    if spec.columns:
        kept = f"IF({moved(spec, table)}, 0, {kept})"
    return [
        trigger(table, "epoch_i", "BEFORE", "INSERT", f"SET NEW.`{spec.epoch}` = COALESCE({token}, 0);"),
        trigger(table, "epoch_u", "BEFORE", "UPDATE", f"SET NEW.`{spec.epoch}` = COALESCE({token}, {kept});"),
    ]


def _digest() -> str:
    """A digest of the statements that create a table's triggers. If it differs, an installation would change them."""
    table = MariadbShape("d", "t", {"id": "int", "name": "varchar", "epoch": "bigint"})
    specs = [
        Spec("t", "t/{id}/{name}"),
        Spec("t", "{name}", "sequenced", "epoch"),
        Spec("t", "t", "retry", "epoch"),
    ]
    return hashlib.sha256(repr([triggers(spec, table) for spec in specs]).encode()).hexdigest()[:16]


DIGEST = _digest()
