"""What an installation of claims makes on a table of MariaDB or MySQL: columns, indexes and triggers.

There are no partial indexes: a virtual column is 0 for the rows that may be claimed, else 1, and the index begins with
it. The others come behind them: a claim must not write where another one has locked the gap before the first row.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import replace

from fenced.errors import Misconfigured, Unsupported
from fenced.guards import claims
from fenced.guards.claims import CLOSED, Claiming, Constant
from fenced.guards.spec import Spec
from fenced.stores.mariadb.guard.schema import RunsStatements
from fenced.stores.mariadb.guard.triggers import INTEGERS, MariadbShape, moved, name_of, trigger
from fenced.stores.mariadb.wire.connection import literal

TYPES = {
    "claim_token": ("bigint", "BIGINT"),
    "claim_write": ("bigint", "BIGINT"),
    "claim_holder": ("varchar", "VARCHAR(49) CHARACTER SET ascii COLLATE ascii_bin"),
    "claim_attempts": ("smallint", "SMALLINT NOT NULL DEFAULT 0"),
    "claim_at": ("datetime", "DATETIME(6)"),
}
_BUSY = "claim_busy"
_ORDERED = re.compile(r"[`\"]?(?P<column>\w+)[`\"]?(\s+(ASC|DESC))?", re.IGNORECASE)
_INDEXED = INTEGERS | frozenset(
    {"char", "varchar", "varbinary", "binary", "enum", "uuid", "decimal", "float", "double", "bit", "year"}
    | {"date", "datetime", "timestamp", "time"}
)
# A statement carries in the row what it is: a claim the realm of its authority and the worker (`REALM:HOLDER`), giving
# back a mark (`~HOLDER`), a write of the claimant its number. So no variable of the session can be left over.
_UPDATE = """IF NEW.claim_holder = CONCAT('~', OLD.claim_holder) AND NEW.claim_token <=> OLD.claim_token
      AND NEW.claim_write <=> OLD.claim_write AND NOT ({moved}) THEN
    SET NEW.claim_holder = NULL;
  ELSEIF NEW.claim_holder IS NOT NULL AND NOT (NEW.claim_holder <=> OLD.claim_holder) THEN
    CALL fenced_guard.check_claim({scope}, {name}, OLD.claim_holder IS NULL AND NOT ({moved}), NEW.claim_holder,
      NEW.claim_token, OLD.claim_token);
    SET NEW.claim_holder = RIGHT(NEW.claim_holder, 32), NEW.claim_write = NEW.claim_token * 1048576,
      NEW.claim_attempts = OLD.claim_attempts + 1, NEW.claim_at = UTC_TIMESTAMP(6);
  ELSEIF (OLD.claim_token IS NOT NULL OR NEW.claim_token IS NOT NULL OR NEW.claim_write IS NOT NULL)
      AND NOT COALESCE(NEW.claim_write > OLD.claim_write AND NEW.claim_write DIV 1048576 = OLD.claim_token
        AND NEW.claim_token = OLD.claim_token AND NOT ({moved}), FALSE)
      AND NOT (NEW.claim_token <=> OLD.claim_token AND NEW.claim_write <=> OLD.claim_write AND NOT ({moved})
        AND {carried}) THEN
    CALL fenced_guard.rule_on_write({scope}, {table}, {name}, {moved}, OLD.claim_token, OLD.claim_write,
      NEW.claim_write);
    SET NEW.claim_token = OLD.claim_token, NEW.claim_write = OLD.claim_write, NEW.claim_holder = OLD.claim_holder,
      NEW.claim_attempts = OLD.claim_attempts, NEW.claim_at = OLD.claim_at;
  END IF;"""
_INSERT = """IF NEW.claim_token IS NOT NULL OR NEW.claim_holder IS NOT NULL OR NEW.claim_write IS NOT NULL THEN
    CALL fenced_guard.refuse_born_claimed({name});
  END IF;"""
_DELETE = """IF OLD.claim_holder IS NOT NULL AND NOT ({carried}) THEN
    CALL fenced_guard.rule_on_write({scope}, {table}, {name}, FALSE, OLD.claim_token, OLD.claim_write, OLD.claim_write);
  END IF;"""
# A row that an operator has revoked is closed to its worker, whose announcement may be left over on the connection.
_CARRIED = (
    "fenced_guard.carries_claim({scope}, {table}, {name}, OLD.claim_token) "
    f"AND OLD.claim_write % 1048576 < {CLOSED}"
)


def constant(value: Constant) -> str:
    """A constant as SQL; in every sql_mode and character set it is the same text."""
    if isinstance(value, str):
        found = literal(value)
        return f"_utf8mb4 {found}" if found.startswith("x") else found
    return "NULL" if value is None else str(int(value))


assignments = functools.partial(claims.assigned, constant, quote="`")
given_back = functools.partial(claims.given_back, constant, quote="`")


def order_of(claiming: Claiming) -> str:
    return claiming.order.replace('"', "`")


def resolved(claiming: Claiming) -> Claiming:
    if claiming.minted:
        raise Unsupported("MariaDB and MySQL cannot mint the tokens of claims: leave mint=True out")
    return replace(claiming, minted=False)


async def columns(spec: Spec, claiming: Claiming, table: MariadbShape, session: RunsStatements) -> list[str]:
    """The statements that add the columns and indexes which the table lacks.

    Misconfigured or Unsupported if its rows cannot be claimed.
    """
    _check_shape(spec, claiming, table)
    rows = await session.run(
        "SELECT INDEX_NAME, MAX(NON_UNIQUE), GROUP_CONCAT(COLUMN_NAME) FROM information_schema.STATISTICS "
        f"WHERE TABLE_SCHEMA = {literal(table.scope)} AND TABLE_NAME = {literal(table.table)} GROUP BY INDEX_NAME"
    )
    if not any(columns == claiming.key and not repeats for _, repeats, columns in rows):
        raise Misconfigured(
            f"the key {claiming.key!r} of {spec.table} is not unique; name the primary key: key='id'"
        )
    names = {name for name, _, _ in rows}
    ready = f"fenced_ready_{claiming.digest}"
    alter = f"ALTER TABLE {table.quoted} "
    removed, added = (
        [],
        [f"ADD COLUMN {name} {kind}" for name, (_, kind) in TYPES.items() if name not in table.kinds],
    )
    if ready not in names:
        removed = [f"DROP INDEX `{name}`" for name in sorted(names) if name.startswith("fenced_ready_")]
        removed += [f"DROP COLUMN {_BUSY}"] if _BUSY in table.kinds else []
        added += [
            f"ADD COLUMN {_BUSY} TINYINT AS (IF(({claiming.ready}) AND claim_holder IS NULL, 0, 1)) VIRTUAL",
            f"ADD INDEX `{ready}` ({_BUSY}, {order_of(claiming)})",
        ]
    added += [] if "fenced_held" in names else ["ADD INDEX fenced_held (claim_holder)"]
    return [alter + ", ".join(changes) for changes in (removed, added) if changes]


def _check_shape(spec: Spec, claiming: Claiming, table: MariadbShape) -> None:
    for column, (kind, _) in TYPES.items():
        if table.kinds.get(column, kind) != kind:
            raise Misconfigured(
                f"the column {column!r} of {spec.table} is of type {table.kinds[column]}, not {kind}"
            )
    named = (name for part in (claiming.taken, claiming.back, claiming.dead) for name, _ in part)
    for column in (*spec.columns, *named):
        if column not in table.kinds:
            raise Misconfigured(f"the table {spec.table} has no column {column!r}")
    if generated := [column for column in spec.columns if column in table.generated]:
        raise Unsupported(f"the column {generated[0]!r} is generated; claims need names of other columns")
    for part in claiming.order.split(","):
        found = _ORDERED.fullmatch(part.strip())
        if found is None or table.kinds.get(found["column"]) not in _INDEXED:
            raise Unsupported(f"the order {part.strip()!r} is not a column that an index can begin with")


def triggers(spec: Spec, table: MariadbShape) -> list[str]:
    """The statements that create the triggers of a table with claims."""
    fields = {
        "scope": literal(table.scope),
        "table": literal(table.table),
        "name": name_of(spec, table, "OLD"),
        "moved": moved(spec, table),
    }
    fields["carried"] = _CARRIED.format(**fields)
    born = {**fields, "name": name_of(spec, table, "NEW")}
    bodies = {"insert": (_INSERT, born), "update": (_UPDATE, fields), "delete": (_DELETE, fields)}
    return [
        trigger(table, event, "BEFORE", event.upper(), text.format(**parts))
        for event, (text, parts) in bodies.items()
    ]


def _digest() -> str:
    table = MariadbShape("d", "t", {"id": "int", "name": "varchar"})
    return hashlib.sha256(repr(triggers(Spec("t", "t/{id}/{name}"), table)).encode()).hexdigest()[:16]


DIGEST = _digest()
"""Of what the triggers are made of. If it differs, an installation would change them."""
