"""What an installation of claims makes on an SQLite table: columns, indexes and triggers.

A trigger of SQLite cannot change the row that is written. So the claim's own statement sets its columns, and the
trigger compares them.
"""

from __future__ import annotations

import functools
from pathlib import Path

from fenced.errors import Misconfigured, Unsupported
from fenced.guards import claims
from fenced.guards.claims import Claiming, Constant
from fenced.guards.spec import Spec, literal
from fenced.stores.sqlite.guard.unique import Run, TableKeys
from fenced.values import sqlfile

SQL = sqlfile.load(Path(__file__).with_name("claims.sql"))
TYPES = {
    "claim_token": "INTEGER",
    "claim_write": "INTEGER",
    "claim_holder": "TEXT",
    "claim_attempts": "INTEGER NOT NULL DEFAULT 0",
    "claim_at": "REAL",
}


def constant(value: Constant) -> str:
    if isinstance(value, str):
        return literal(value)
    return "NULL" if value is None else str(int(value))


assignments = functools.partial(claims.assigned, constant)
given_back = functools.partial(claims.given_back, constant)


async def columns(spec: Spec, claiming: Claiming, run: Run) -> list[str]:
    """The statements that add the columns which the table lacks. Misconfigured if the table lacks others, or the key is
    not unique."""
    if claiming.minted:
        raise Unsupported("SQLite cannot mint the tokens of claims: the authority is in another file")
    found = await run(f"SELECT name, pk FROM pragma_table_info({literal(spec.table)})")
    names = {name for name, _ in found}
    given = (name for part in (claiming.taken, claiming.back, claiming.dead) for name, _ in part)
    for column in (*spec.columns, *given):
        if column not in names:
            raise Misconfigured(f"the table {spec.table} has no column {column!r}")
    primary = {name for name, place in found if place}
    unique = await run(
        f'SELECT l.name FROM pragma_index_list({literal(spec.table)}) l WHERE l."unique" AND NOT l.partial AND ('
        "SELECT count(*) FROM pragma_index_info(l.name)) = 1 AND EXISTS ("
        f"SELECT 1 FROM pragma_index_info(l.name) i WHERE i.name = {literal(claiming.key)})"
    )
    if primary != {claiming.key} and not unique:
        raise Misconfigured(
            f"the key {claiming.key!r} of {spec.table} is not unique; name the primary key: key='id'"
        )
    return [
        f'ALTER TABLE "{spec.table}" ADD COLUMN {name} {kind}'
        for name, kind in TYPES.items()
        if name not in names
    ]


async def indexes(spec: Spec, claiming: Claiming, run: Run) -> list[str]:
    ready = f"fenced_{spec.table}_ready_{claiming.digest}"
    stale = await run(
        "SELECT name FROM main.sqlite_schema WHERE type = 'index' AND tbl_name = ? AND name GLOB ? AND name <> ?",
        (spec.table, f"fenced_{spec.table}_ready_*", ready),
    )
    return [
        *(f'DROP INDEX main."{name}"' for (name,) in stale),
        (
            f'CREATE INDEX IF NOT EXISTS main."{ready}" ON "{spec.table}" ({claiming.order}) '
            f"WHERE ({claiming.ready}) AND claim_holder IS NULL"
        ),
        (
            f'CREATE INDEX IF NOT EXISTS main."fenced_{spec.table}_held" ON "{spec.table}" (claim_holder) '
            "WHERE claim_holder IS NOT NULL"
        ),
    ]


def triggers(spec: Spec, name: str, gate: str) -> list[str]:
    moved = " OR ".join(f'NEW."{column}" IS NOT OLD."{column}"' for column in spec.columns)
    parts = {"table": spec.table, "name": name, "gate": gate, "moved": moved}
    return [SQL[what].format(**parts) for what in ("claimed", "update", "insert", "delete")]


def removed_by_replace(claiming: Claiming, table: TableKeys) -> list[tuple[str, str]]:
    """The columns of each unique key, and the condition for the claimed row `v` that a REPLACE would remove."""
    own = (f'"{claiming.key}"', f'v."{claiming.key}" = NEW."{claiming.key}"')
    others = [(key.columns, key.same) for key in table.keys if key.columns != own[0]]
    return [(columns, f"{same} AND v.claim_holder IS NOT NULL") for columns, same in (own, *others)]
