"""The triggers of a guarded PostgreSQL table.

They look at rows after they are written, as they really are, and their conditions are evaluated in the executor:
a row whose name is open in this transaction costs one look at a setting, and no call. Row triggers are inherited
by every partition, also by one that is made later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fenced.decision import Mode
from fenced.errors import Misconfigured, Misuse, Unsupported
from fenced.guards.spec import Spec, literal, may_meet

SCHEMA = Path(__file__).with_name("schema_1.sql")
SCHEMA_VERSION = 1
OWN_TABLE = "fenced_guard.value"
LOCK_TIMEOUT = "2s"
"""How long an installation waits for a table; its writers wait behind it."""

_TEXTS = frozenset({"text", "varchar", "bpchar", "name"})
_PLAIN = frozenset({"int2", "int4", "int8", "uuid"})
_IDENTIFIER_BYTES_MAX = 63
_TRIGGERS = (
    "fenced_insert",
    "fenced_update",
    "fenced_delete",
    "fenced_truncate",
    "fenced_epoch_insert",
    "fenced_epoch_update",
)

_CARRIED = "current_setting('fenced.stamp', true)"

Run = Callable[..., Awaitable[list[tuple[Any, ...]]]]


class Runs(Protocol):
    async def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]: ...


def guard_of(spec: Spec) -> str:
    """The table with its schema, which is what a guard is known by."""
    return spec.table if "." in spec.table else f"public.{spec.table}"


def quoted(guard: str) -> str:
    return ".".join(f'"{part}"' for part in guard.split("."))


def _object(guard: str, what: str) -> str:
    """A name in our schema for something that belongs to one guard."""
    name = f"{guard} {what}"
    if len(name) > _IDENTIFIER_BYTES_MAX:
        name = f"{hashlib.sha256(guard.encode()).hexdigest()[:32]} {what}"
    return f'fenced_guard."{name}"'


@dataclass(frozen=True, slots=True)
class Table:
    """What an installation has to know about a table."""

    kinds: dict[str, str]
    """The type of each column, without domains: a `pg_type.typname`, or `enum`."""
    generated: frozenset[str]
    partitions: tuple[str, ...]


async def look_at(spec: Spec, session: Runs) -> Table:
    guard = guard_of(spec)
    schema, _, table = guard.partition(".")
    if schema == "fenced_guard" and guard != OWN_TABLE:
        raise Misuse(f"{guard!r} is one of fenced's own tables")
    found = await session.run(
        "SELECT c.oid::bigint, c.relkind::text, c.relispartition FROM pg_catalog.pg_class c "
        f"JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE n.nspname = {literal(schema)} AND c.relname = {literal(table)}"
    )
    if not found:
        hint = "" if "." in spec.table else "; a table of another schema is named schema.table"
        raise Misconfigured(f"there is no table {guard}{hint}")
    oid, kind, is_partition = found[0]
    if kind not in ("r", "p"):
        raise Unsupported(f"{guard} is no table; a guard sits on the table behind it")
    if is_partition:
        raise Unsupported(f"{guard} is a partition; guard the partitioned table, and its partitions with it")
    columns = await session.run(
        "SELECT a.attname::text, CASE b.typtype WHEN 'e' THEN 'enum' ELSE b.typname::text END, "
        "a.attgenerated <> '' FROM pg_catalog.pg_attribute a "
        "JOIN pg_catalog.pg_type t ON t.oid = a.atttypid "
        "JOIN pg_catalog.pg_type b ON b.oid = CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.oid END "
        f"WHERE a.attrelid = {oid} AND a.attnum > 0 AND NOT a.attisdropped"
    )
    partitions = await session.run(
        "SELECT n.nspname || '.' || c.relname FROM pg_catalog.pg_partition_tree("
        f"{oid}::bigint::regclass) p JOIN pg_catalog.pg_class c ON c.oid = p.relid "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE p.relid <> {oid} ORDER BY 1"
    )
    found_table = Table(
        {name: kind for name, kind, _ in columns},
        frozenset(name for name, _, generated in columns if generated),
        tuple(name for (name,) in partitions),
    )
    _check_columns(spec, found_table)
    return found_table


def _check_columns(spec: Spec, table: Table) -> None:
    for column in spec.columns:
        kind = table.kinds.get(column)
        if kind is None:
            raise Misconfigured(f"the table {guard_of(spec)} has no column {column!r}")
        if kind not in _TEXTS | _PLAIN | {"enum"}:
            raise Unsupported(
                f"the column {column!r} is of type {kind}; a name is made of whole numbers, texts, uuids and enums, "
                "which every session writes alike"
            )
        if spec.epoch is not None and column in table.generated:
            raise Unsupported(
                f"the column {column!r} is generated; with an epoch column, name rows by others"
            )
    if spec.epoch is not None and table.kinds.get(spec.epoch, "int8") != "int8":
        raise Misconfigured(f"the epoch column {spec.epoch!r} must be a bigint")


class _Names:
    """SQL expressions about the names of rows."""

    def __init__(self, spec: Spec, table: Table) -> None:
        self.spec = spec
        self.guard = guard_of(spec)
        self._table = table

    def parts(self, row: str) -> list[str]:
        """What the name of `row` (NEW or OLD) is put together from."""
        return [self._value(row, piece) if column else literal(piece) for piece, column in self.spec.pieces]

    def _value(self, row: str, column: str) -> str:
        value = f'{row}."{column}"'
        if self._table.kinds[column] in _PLAIN:
            return value
        if self._table.kinds[column] != "text":
            value += "::text"
        if (
            self.spec.whole
        ):  # no name holds a line's end; it must not look like the end of a line of the setting
            return rf"replace({value}, E'\n', E'\r')"
        return f"replace(replace({value}, '%', '%25'), '/', '%2F')"

    def name(self, row: str) -> str:
        return f"concat({', '.join(self.parts(row))})"

    def closed(self, row: str) -> str:
        """True unless the setting lets this row through."""
        prefix = "/" if self.spec.rule == "retry" else f"|{self.guard}/"
        return _not_carried(literal(prefix), *self.parts(row))

    @property
    def moved(self) -> str:
        changes = []
        for column in self.spec.columns:
            as_bytes = "" if self._table.kinds[column] in _PLAIN else '::text COLLATE "C"'
            changes.append(f'OLD."{column}"{as_bytes} IS DISTINCT FROM NEW."{column}"{as_bytes}')
        return " OR ".join(changes)

    @property
    def not_free(self) -> str:
        return _not_carried(literal(f"*{self.guard}"))

    @property
    def epoch_unknown(self) -> str:
        """True unless the row carries a token of this transaction, which only an admitted write has put there."""
        column = f'"{self.spec.epoch}"'
        unknown = [f"OLD.{column} IS DISTINCT FROM NEW.{column}", _not_carried("'@'", f"NEW.{column}")]
        return " OR ".join([*unknown, *([self.moved] if self.spec.columns else [])])

    def conditions(self) -> dict[str, str]:
        """When each kind of write has to be decided."""
        updated = self.closed("NEW")
        if self.spec.columns:
            updated = f"({updated} OR (({self.moved}) AND {self.closed('OLD')}))"
        if self.spec.epoch is not None and self.spec.rule == "retry":
            updated = f"({self.epoch_unknown}) AND {updated}"
        return {
            "INSERT": f"{self.closed('NEW')} AND {self.not_free}",
            "UPDATE": f"{updated} AND {self.not_free}",
            "DELETE": f"{self.closed('OLD')} AND {self.not_free}",
        }


def _not_carried(*line: str) -> str:
    return (
        rf"coalesce(strpos({_CARRIED}, concat(E'\n', pg_current_xact_id(), {', '.join(line)}, E'\n')), 0) = 0"
    )


async def schema(session: Runs) -> list[str]:
    """The schema, if it is not there yet."""
    if await is_there(session):
        return []
    ((encoding, version),) = await session.run(
        "SELECT current_setting('server_encoding'), current_setting('server_version_num')::int"
    )
    if encoding != "UTF8":
        raise Misconfigured(f"a guarded database is encoded in UTF8, not in {encoding}")
    if version < 140000:
        raise Unsupported("a guard needs PostgreSQL 14 or later")
    return [SCHEMA.read_text()]


async def is_there(session: Runs) -> bool:
    """Whether the guards' schema is in this database; Misconfigured when it is one that we do not know."""
    if not await session.run("SELECT 1 WHERE to_regprocedure('fenced_guard.version()') IS NOT NULL"):
        return False
    ((version,),) = await session.run("SELECT fenced_guard.version()")
    if version != SCHEMA_VERSION:
        raise Misconfigured(f"the guards here have schema {version}, this fenced knows {SCHEMA_VERSION}")
    return True


async def script(spec: Spec, mode: Mode | None, session: Runs, *, mandatory: bool) -> list[str]:
    """The statements that install the guard; `session` looks at the database as it is.

    `mode` None: what is there keeps its mode, a new guard observes.
    """
    created = await schema(session)
    value_is_made = bool(created) and guard_of(spec) == OWN_TABLE
    if value_is_made:
        table = Table({"name": "text", "value": "text", "version": "int8"}, frozenset(), ())
    else:
        table = await look_at(spec, session)
    proof = False
    if not created:
        await _refuse_mixed_rules(spec, session)
        ((proof,),) = await session.run("SELECT proof FROM fenced_guard.trust")
    guard = guard_of(spec)
    makes_epoch = spec.epoch is not None and spec.epoch not in table.kinds
    columns = [f'ALTER TABLE {quoted(guard)} ADD COLUMN "{spec.epoch}" bigint'] if makes_epoch else []
    return [
        *created,
        f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'",
        *columns,
        *_registration(spec, mandatory, makes_epoch, mode),
        *(_triggers(_Names(spec, table), table, proof) if mandatory else _without_triggers(guard, table)),
    ]


def _registration(spec: Spec, mandatory: bool, makes_epoch: bool, mode: Mode | None) -> list[str]:
    guard, counter = guard_of(spec), _object(guard_of(spec), "refused")
    epoch = "NULL" if spec.epoch is None else literal(spec.epoch)
    values = (
        f"{literal(guard)}, {literal(spec.name)}, '{spec.rule}', {mandatory}, {epoch}, {makes_epoch}, "
        f"{literal(counter)}"
    )
    first = (
        f"SELECT fenced_guard.set_mode({literal(guard)}, '{mode or 'observe'}') WHERE {bool(mode)} OR NOT EXISTS "
        f"(SELECT 1 FROM fenced_guard.mode WHERE guard = {literal(guard)} AND pattern = '*')"
    )
    return [
        f"CREATE SEQUENCE IF NOT EXISTS {counter}",
        (
            "INSERT INTO fenced_guard.guard AS g "
            f"(guard, template, rule, mandatory, epoch, epoch_made, refused) VALUES ({values}) "
            "ON CONFLICT (guard) DO UPDATE SET template = excluded.template, rule = excluded.rule, "
            "mandatory = excluded.mandatory, epoch = excluded.epoch, epoch_made = excluded.epoch_made OR g.epoch_made"
        ),
        (
            "INSERT INTO fenced_guard.history (guard, what, detail) SELECT guard, 'install', jsonb_build_object("
            "'template', template, 'rule', rule, 'mandatory', mandatory, 'epoch', epoch) FROM fenced_guard.guard "
            f"WHERE guard = {literal(guard)}"
        ),
        first,
    ]


def _triggers(names: _Names, table: Table, proof: bool) -> list[str]:
    """With `proof` no row passes by the setting alone: the function looks whether it is sealed."""
    guard, spec = names.guard, names.spec
    row, whole, epoch = (_object(guard, what) for what in ("row", "truncate", "epoch"))
    everything = literal(spec.name) if not spec.columns else "NULL"
    statements = [
        _function(
            row,
            f"IF TG_OP <> 'DELETE' THEN PERFORM fenced_guard.decide({literal(guard)}, {names.name('NEW')}); END IF;\n"
            f"  IF TG_OP <> 'INSERT' THEN PERFORM fenced_guard.decide({literal(guard)}, {names.name('OLD')}); END IF;\n"
            "  RETURN NULL;",
        ),
        _function(whole, f"PERFORM fenced_guard.decide({literal(guard)}, {everything});\n  RETURN NULL;"),
    ]
    for event, condition in names.conditions().items():
        when = "" if proof else f"WHEN ({condition}) "
        statements.append(
            f"CREATE OR REPLACE TRIGGER fenced_{event.lower()} AFTER {event} ON {quoted(guard)} "
            f"FOR EACH ROW {when}EXECUTE FUNCTION {row}()"
        )
    statements += [
        f"CREATE OR REPLACE TRIGGER fenced_truncate BEFORE TRUNCATE ON {quoted(target)} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {whole}()"
        for target in (guard, *table.partitions)
    ]
    return [*statements, *_epoch_triggers(names, epoch)]


def _epoch_triggers(names: _Names, function: str) -> list[str]:
    guard, spec = names.guard, names.spec
    if spec.epoch is None:
        return [
            f"DROP TRIGGER IF EXISTS fenced_epoch_insert ON {quoted(guard)}",
            f"DROP TRIGGER IF EXISTS fenced_epoch_update ON {quoted(guard)}",
        ]
    body = (
        f'NEW."{spec.epoch}" := coalesce(fenced_guard.token_for({names.name("NEW")}), NEW."{spec.epoch}");\n'
        "  RETURN NEW;"
    )
    head = "CREATE OR REPLACE TRIGGER fenced_epoch_{} BEFORE {} ON " + quoted(guard) + " FOR EACH ROW "
    return [
        _function(function, body),
        head.format("insert", "INSERT") + f"EXECUTE FUNCTION {function}()",
        head.format("update", "UPDATE") + f"WHEN ({names.epoch_unknown}) EXECUTE FUNCTION {function}()",
    ]


def _function(name: str, body: str) -> str:
    return (
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger\n"
        "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$\n"
        f"BEGIN\n  {body}\nEND $$"
    )


def _without_triggers(guard: str, table: Table) -> list[str]:
    return [
        *(f"DROP TRIGGER IF EXISTS {trigger} ON {quoted(guard)}" for trigger in _TRIGGERS),
        *(f"DROP TRIGGER IF EXISTS fenced_truncate ON {quoted(name)}" for name in table.partitions),
        *(f"DROP FUNCTION IF EXISTS {_object(guard, what)}()" for what in ("row", "truncate", "epoch")),
    ]


async def uninstall(spec: Spec, session: Runs) -> list[str]:
    """Leave the table as it was. The marks stay: a later guard must not forget them."""
    guard = guard_of(spec)
    if not await is_there(session):
        raise Misconfigured("no guard is installed in this database")
    found = await session.run(
        f"SELECT epoch, epoch_made FROM fenced_guard.guard WHERE guard = {literal(guard)}"
    )
    if not found:
        raise Misconfigured(f"no guard is installed for {guard}")
    epoch, made = found[0]
    table = await look_at(Spec(spec.table, "x"), session)
    dropped = [f'ALTER TABLE {quoted(guard)} DROP COLUMN "{epoch}"'] if made else []
    return [
        f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'",
        *_without_triggers(guard, table),
        *dropped,
        f"DROP SEQUENCE IF EXISTS {_object(guard, 'refused')}",
        f"INSERT INTO fenced_guard.history (guard, what, detail) VALUES ({literal(guard)}, 'uninstall', '{{}}')",
        *(
            f"DELETE FROM fenced_guard.{kept} WHERE guard = {literal(guard)}"
            for kept in ("guard", "mode", "override")
        ),
    ]


async def _refuse_mixed_rules(spec: Spec, session: Runs) -> None:
    """Two guards that may meet under one name judge by one rule, or the weaker one would be the way in."""
    guard = guard_of(spec)
    for other, template, rule in await session.run("SELECT guard, template, rule FROM fenced_guard.guard"):
        if other != guard and rule != spec.rule and may_meet(spec.name, template):
            raise Misconfigured(
                f"{other!r} is guarded under {template!r} by rule {rule}; {spec.name!r} may be the same name, "
                f"so its rule must be {rule}, too"
            )
