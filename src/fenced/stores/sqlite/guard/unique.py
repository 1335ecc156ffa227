"""The unique keys through which a REPLACE could remove a row of another name without a trigger.

A REPLACE fires no trigger for the rows that it removes, so a BEFORE trigger looks for them: by every unique key, with
the collation of that key, with defaults in place of NULL, and by the rowid.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fenced.errors import Misconfigured, Unsupported

Run = Callable[..., Awaitable[list[tuple[Any, ...]]]]

_ROWIDS = ("rowid", "_rowid_", "oid")
_EXACT = re.compile("INT|CHAR|CLOB|TEXT")


@dataclass(frozen=True, slots=True)
class Column:
    kind: str
    key: int
    required: bool
    default: str | None
    generated: bool


@dataclass(frozen=True, slots=True)
class Key:
    """A unique key: `columns` as UPDATE OF lists them; `same` is true if row `v` has NEW's key."""

    columns: str
    same: str


@dataclass(frozen=True, slots=True)
class TableKeys:
    """The unique keys of a table. `alias`: the column that is the rowid.

    `replaces`: the table itself may say ON CONFLICT REPLACE, so that every INSERT and UPDATE may remove rows.
    """

    alias: str | None
    rowids: tuple[str, ...]
    keys: tuple[Key, ...]
    replaces: bool = False


async def look_at(table: str, named: tuple[str, ...], run: Run) -> TableKeys:
    """Read the keys of a table whose names are made of the columns `named`; if it is empty, all rows have one name."""
    found = await run("SELECT sql FROM main.sqlite_schema WHERE type = 'table' AND name = ?", (table,))
    if not found:
        raise Misconfigured(f"there is no table {table!r} in this database's main schema")
    if str(found[0][0]).upper().startswith("CREATE VIRTUAL"):
        raise Unsupported(f"{table!r} is a virtual table; SQLite has no triggers for those")
    columns = await _columns(table, run)
    _check_named(table, named, columns)
    listed = await run(
        "SELECT name, origin, partial FROM pragma_index_list(?, 'main') WHERE \"unique\"", (table,)
    )
    has_rowid = await run("SELECT 1 FROM pragma_table_list(?) WHERE schema = 'main' AND NOT wr", (table,))
    primary = [name for name, column in columns.items() if column.key]
    is_alias = has_rowid and len(primary) == 1 and columns[primary[0]].kind == "INTEGER"
    alias = primary[0] if is_alias and not any(origin == "pk" for _, origin, _ in listed) else None
    rowids = tuple(word for word in _ROWIDS if word not in {name.lower() for name in columns})
    if not named:
        return TableKeys(alias, rowids, ())
    keys = [*_rowid_key(named, rowids, alias)] if has_rowid else []
    for index, _, partial in listed:
        parts = await run("SELECT name, coll FROM pragma_index_xinfo(?, 'main') WHERE key", (index,))
        if partial or any(name is None or columns[name].generated for name, _ in parts):
            raise Unsupported(
                f"the unique index {index!r} is partial, or over an expression or a generated column: a REPLACE "
                "through it could remove a row without a check; guard the table under one constant name instead"
            )
        if not _determines_name(named, columns, parts):
            keys.append(_key(columns, parts))
    return TableKeys(alias, rowids, tuple(keys), "REPLACE" in str(found[0][0]).upper())


async def _columns(table: str, run: Run) -> dict[str, Column]:
    rows = await run(
        "SELECT name, upper(type), pk, \"notnull\", dflt_value, hidden FROM pragma_table_xinfo(?, 'main')",
        (table,),
    )
    return {
        name: Column(kind, key, bool(required), default, bool(hidden))
        for name, kind, key, required, default, hidden in rows
    }


def _check_named(table: str, named: tuple[str, ...], columns: dict[str, Column]) -> None:
    for name in named:
        if name not in columns:
            raise Misconfigured(f"the table {table!r} has no column {name!r}")
        if columns[name].generated:
            raise Unsupported(f"the column {name!r} is generated; name a row by stored columns")
        if re.search("REAL|FLOA|DOUB", columns[name].kind):
            raise Unsupported(
                f"the column {name!r} holds floating-point numbers; two of them may make one name"
            )


def _rowid_key(named: tuple[str, ...], rowids: tuple[str, ...], alias: str | None) -> list[Key]:
    """The rowid is a unique key too, under three spellings and its alias's name."""
    if named == (alias,) or not (rowids or alias):
        return []
    word = alias or rowids[0]
    spellings = (*rowids, *([f'"{alias}"'] if alias else []))
    return [Key(", ".join(spellings), f'v."{word}" = NEW."{word}"')]


def _determines_name(
    named: tuple[str, ...], columns: dict[str, Column], parts: Sequence[tuple[str, str]]
) -> bool:
    """Whether two rows with the same key always have the same name."""
    exact = {name for name, collation in parts if collation == "BINARY" and _EXACT.search(columns[name].kind)}
    return set(named) <= exact


def _key(columns: dict[str, Column], parts: Sequence[tuple[str, str]]) -> Key:
    same = []
    for name, collation in parts:
        new = f'NEW."{name}"'
        if columns[name].required and columns[name].default is not None:
            new = f"coalesce({new}, ({columns[name].default}))"  # REPLACE replaces NULL by the default
        same.append(f'v."{name}" = {new} COLLATE "{collation}"')
    return Key(", ".join(f'"{name}"' for name, _ in parts), " AND ".join(same))
