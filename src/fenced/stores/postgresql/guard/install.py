"""Installing the PostgreSQL guard: reading the table's shape, and the statements that install the guard."""

from __future__ import annotations

from dataclasses import replace as with_claims

from fenced.errors import Misconfigured, Misuse, Unsupported
from fenced.guards.claims import Claiming
from fenced.guards.engine import Registered
from fenced.guards.spec import Spec, asks_for, literal, may_meet
from fenced.stores.postgresql.guard import claiming, schema
from fenced.stores.postgresql.guard.schema import Runs
from fenced.stores.postgresql.guard.triggers import (
    DIGEST,
    PLAIN,
    TEXTS,
    Names,
    TableShape,
    guard_of,
    object_of,
    quoted,
    triggers,
    without_triggers,
)
from fenced.values.decision import Mode

OWN_TABLE = "fenced_guard.value"
LOCK_TIMEOUT = "2s"
"""How long an installation waits for the lock of a table. Writers of the table queue behind it meanwhile."""

# Other statements may follow in the same transaction, such as the rest of a migration.
_SETTINGS = ("search_path", "lock_timeout")
_KEEP_SETTINGS = "SELECT " + ", ".join(
    f"set_config('fenced.{setting}', current_setting('{setting}'), true)" for setting in _SETTINGS
)
# Outside a transaction SET LOCAL has no effect, and neither has _KEEP_SETTINGS. Then the current value is set again.
_RESTORE_SETTINGS = "SELECT " + ", ".join(
    f"set_config('{setting}', coalesce(nullif(current_setting('fenced.{setting}', true), ''), "
    f"current_setting('{setting}')), true)"
    for setting in _SETTINGS
)


async def look_at(spec: Spec, session: Runs) -> TableShape:
    """Read the shape of the table; Misconfigured or Unsupported if it cannot be guarded."""
    guard = guard_of(spec)
    schema, _, table = guard.partition(".")
    if schema == "fenced_guard" and guard != OWN_TABLE:
        raise Misuse(f"{guard!r} is one of fenced's own tables")
    found = await session.run(
        "SELECT c.oid::bigint, c.relkind::text, c.relispartition, "
        "EXISTS (SELECT 1 FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid), "
        "EXISTS (SELECT 1 FROM pg_catalog.pg_inherits i WHERE i.inhrelid = c.oid) FROM pg_catalog.pg_class c "
        f"JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE n.nspname = {literal(schema)} AND c.relname = {literal(table)}"
    )
    if not found:
        hint = "" if "." in spec.table else "; a table of another schema is named schema.table"
        raise Misconfigured(f"there is no table {guard}{hint}")
    oid, kind, is_partition, has_children, is_child = found[0]
    if kind not in ("r", "p"):
        raise Unsupported(f"{guard} is not a table; guard the table behind it")
    if is_partition:
        raise Unsupported(
            f"{guard} is a partition; guard the partitioned table, which includes its partitions"
        )
    columns = await session.run(
        "SELECT a.attname::text, CASE b.typtype WHEN 'e' THEN 'enum' ELSE b.typname::text END, "
        "a.attgenerated::text FROM pg_catalog.pg_attribute a "
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
    found_table = TableShape(
        {name: kind for name, kind, _ in columns},
        {name: generated for name, _, generated in columns if generated},
        tuple(name for (name,) in partitions),
        children=has_children and kind == "r",
        partitioned=kind == "p",
        child=is_child,
    )
    _check_columns(spec, found_table)
    return found_table


def _check_columns(spec: Spec, table: TableShape) -> None:
    for column in spec.columns:
        kind = table.kinds.get(column)
        if kind is None:
            raise Misconfigured(f"the table {guard_of(spec)} has no column {column!r}")
        if kind not in TEXTS | PLAIN | {"enum"}:
            raise Unsupported(
                f"the column {column!r} is of type {kind}; a name is made of integers, texts, uuids and enums, "
                "which have the same text in every session"
            )
        if table.generated.get(column) == "v":
            raise Unsupported(f"the column {column!r} is virtual; a name is made of stored columns")
        if spec.epoch is not None and column in table.generated:
            raise Unsupported(
                f"the column {column!r} is generated; with an epoch column, make the name of other columns"
            )
    if spec.epoch is not None and table.kinds.get(spec.epoch, "int8") != "int8":
        raise Misconfigured(f"the epoch column {spec.epoch!r} must be a bigint")


async def script(
    spec: Spec, mode: Mode | None, session: Runs, *, mandatory: bool, replace: bool = False
) -> list[str]:
    """The statements that install the guard on the database that `session` is connected to.

    `mode` None: an installed guard keeps its mode, a new guard gets observe. Without `replace` the statements fail if
    another guard of this table is installed when they run.
    """
    there = await schema.look(session) is not None
    if not there:
        await schema.check_server(session)
    value_is_made = not there and guard_of(spec) == OWN_TABLE
    if value_is_made:
        table = TableShape({"name": "text", "value": "bytea", "version": "int8"}, {}, ())
    else:
        table = await look_at(spec, session)
    if table.children:
        raise Unsupported(
            f"tables inherit from {guard_of(spec)}, and triggers on it do not see their rows; use partitions instead"
        )
    proof = False
    if there:
        await _refuse_mixed_rules(spec, session)
        ((proof,),) = await session.run("SELECT proof FROM fenced_guard.trust")
    if spec.claims is not None:
        return await _claims_script(spec, table, mode, session, there=there, proof=proof, replace=replace)
    guard = guard_of(spec)
    makes_epoch = spec.epoch is not None and spec.epoch not in table.kinds
    adopts_epoch = spec.epoch is not None and not makes_epoch and mandatory and not value_is_made
    if adopts_epoch and there:
        known = f"SELECT 1 FROM fenced_guard.guard WHERE guard = {literal(guard)} AND mandatory AND epoch = "
        adopts_epoch = not await session.run(known + literal(spec.epoch or ""))
    columns = (
        [f'ALTER TABLE {quoted(guard)} ADD COLUMN "{spec.epoch}" bigint DEFAULT 0'] if makes_epoch else []
    )
    return [
        _KEEP_SETTINGS,
        "SET LOCAL search_path = pg_catalog, pg_temp",  # so that a trigger's condition names only pg_catalog
        f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'",  # before a migration locks the guards' own tables
        *await schema.upgrade(session),
        *_registration(spec, mandatory, makes_epoch, mode, replace),
        *await _leftovers(spec, session),
        *columns,
        *(triggers(Names(spec, table), table, proof) if mandatory else without_triggers(guard)),
        *([_refuse_values(guard, spec.epoch)] if adopts_epoch and spec.epoch else []),
        schema.SCHEMA.owned,
        _RESTORE_SETTINGS,
    ]


async def _claims_script(
    spec: Spec,
    table: TableShape,
    mode: Mode | None,
    session: Runs,
    *,
    there: bool,
    proof: bool,
    replace: bool,
) -> list[str]:
    assert spec.claims is not None
    guard = guard_of(spec)
    if proof:
        raise Unsupported("proofs are required in this database, and claims carry none")
    claiming.check_shape(spec, spec.claims, table)
    await claiming.check_key(spec, spec.claims, session)
    claims = await claiming.resolved(spec.claims, session, there=there)
    spec = with_claims(spec, claims=claims)
    return [
        _KEEP_SETTINGS,
        "SET LOCAL search_path = pg_catalog, pg_temp",
        f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'",
        *await schema.upgrade(session),
        *_registration(spec, True, False, mode, replace),
        *await _leftovers(spec, session),
        claiming.columns(guard),
        *claiming.indexes(guard, claims),
        *claiming.triggers(Names(spec, table), table, claims),
        schema.SCHEMA.owned,
        _RESTORE_SETTINGS,
    ]


async def _leftovers(spec: Spec, session: Runs) -> list[str]:
    """Drop the triggers of a guard of the other kind: only `replace` puts one in the place of the other."""
    found = await schema.look(session)
    if found is None:
        return []
    claims = "claims IS NOT NULL" if found.schema.version >= schema.WITH_CLAIMS else "false"
    installed = await session.run(
        f"SELECT {claims} FROM fenced_guard.guard WHERE guard = {literal(guard_of(spec))}"
    )
    other = installed and installed[0][0] is not (spec.claims is not None)
    return without_triggers(guard_of(spec)) if other else []


def _refuse_values(guard: str, epoch: str) -> str:
    """Refuse a column that already has values: a trigger would take one for an admitted write's token and admit the
    row's name. The statement runs after the triggers are created, so that no writer can add a value in between."""
    says = (
        f"fenced: the column {epoch} of {guard} has values, which would be taken for tokens. Name another column, "
        f'or set it to 0 while no lease is held: UPDATE {quoted(guard)} SET "{epoch}" = 0 WHERE "{epoch}" <> 0'
    )
    return (
        f'DO $fenced$ BEGIN\n  IF EXISTS (SELECT 1 FROM {quoted(guard)} WHERE "{epoch}" <> 0) THEN\n'
        f"    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE = {literal(says)};\n"
        "  END IF;\nEND $fenced$"
    )


async def cautions(session: Runs) -> list[str]:
    """Warnings for the operator: a publication FOR ALL TABLES also publishes the guards' own tables."""
    found = await session.run(
        "SELECT p.pubname::text, array_agg(DISTINCT quote_ident(t.schemaname)), "
        "array_agg(format('%I.%I', t.schemaname, t.tablename) ORDER BY 1), "
        "current_setting('server_version_num')::int >= 150000 "
        "FROM pg_catalog.pg_publication p LEFT JOIN pg_catalog.pg_publication_tables t "
        "ON t.pubname = p.pubname AND t.schemaname NOT IN ('fenced', 'fenced_guard') WHERE p.puballtables GROUP BY 1"
    )
    return [
        f"publication {name} is FOR ALL TABLES: it also publishes the guards' own tables, and a subscriber that lacks "
        "them stops at the next guarded write. Before the next guarded write, publish only the other tables: "
        f'CREATE PUBLICATION "{name}_without_guards" FOR '
        + (f"TABLES IN SCHEMA {', '.join(schemas)}" if by_schema else f"TABLE {', '.join(tables)}")
        + f"; and at each subscriber: ALTER SUBSCRIPTION name SET PUBLICATION {name}_without_guards"
        for name, schemas, tables, by_schema in found
        if schemas[0] is not None
    ]


def _registration(
    spec: Spec, mandatory: bool, makes_epoch: bool, mode: Mode | None, replace: bool
) -> list[str]:
    guard, counter = guard_of(spec), object_of(guard_of(spec), "refused")
    epoch = "NULL" if spec.epoch is None else literal(spec.epoch)
    values = (
        f"{literal(guard)}, {literal(spec.name)}, '{spec.installs}', {mandatory}, {epoch}, {makes_epoch}, "
        f"{literal(counter)}, '{digest_of(spec)}', {_claims(spec)}"
    )
    first = (
        f"SELECT fenced_guard.set_mode({literal(guard)}, '{mode or 'observe'}') WHERE {bool(mode)} OR NOT EXISTS "
        f"(SELECT 1 FROM fenced_guard.mode WHERE guard = {literal(guard)} AND pattern = '*')"
    )
    return [
        # First, because it waits for a concurrent installation of this guard. The next statements see what it did.
        (
            "INSERT INTO fenced_guard.guard "
            f"(guard, template, rule, mandatory, epoch, epoch_made, refused, triggers, claims) VALUES ({values}) "
            "ON CONFLICT (guard) DO NOTHING"
        ),
        *([] if replace else [_refuse_another(spec, mandatory)]),
        f"CREATE SEQUENCE IF NOT EXISTS {counter}",
        (
            f"UPDATE fenced_guard.guard SET template = {literal(spec.name)}, rule = '{spec.installs}', "
            f"mandatory = {mandatory}, epoch = {epoch}, epoch_made = epoch_made OR {makes_epoch}, "
            f"triggers = '{digest_of(spec)}', claims = {_claims(spec)} WHERE guard = {literal(guard)}"
        ),
        (
            "INSERT INTO fenced_guard.history (guard, what, detail) SELECT guard, 'install', jsonb_build_object("
            "'template', template, 'rule', rule, 'mandatory', mandatory, 'epoch', epoch) FROM fenced_guard.guard "
            f"WHERE guard = {literal(guard)}"
        ),
        first,
    ]


def digest_of(spec: Spec) -> str:
    """Of the statements that make the triggers of such a guard."""
    return DIGEST if spec.claims is None else claiming.DIGEST


def _claims(spec: Spec) -> str:
    return "NULL" if spec.claims is None else claiming.constant(str(spec.claims))


def _refuse_another(spec: Spec, mandatory: bool) -> str:
    """Refuse to change an installed guard: its writers would be judged by another name or rule from one statement to
    the next. The statement is part of the script, because the script may run later and on another database."""
    guard = guard_of(spec)
    epoch = "NULL" if spec.epoch is None else literal(spec.epoch)
    says = f"{literal(f'fenced: {guard} is guarded under ')}, v_live, {literal('; ' + asks_for(spec, mandatory))}"
    return (
        "DO $fenced$ DECLARE\n  v_live text;\nBEGIN\n"
        "  SELECT concat(template, ', rule ', rule, ', epoch column ' || epoch, ', claims ' || claims,\n"
        "    CASE WHEN NOT mandatory THEN ', without triggers' END) INTO v_live FROM fenced_guard.guard\n"
        f"  WHERE guard = {literal(guard)} AND (template, rule, mandatory, epoch, claims)\n"
        f"    IS DISTINCT FROM ({literal(spec.name)}, '{spec.installs}', {mandatory}, {epoch}, {_claims(spec)});\n"
        "  IF FOUND THEN RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',\n"
        f"    MESSAGE = concat({says}); END IF;\n"
        "END $fenced$"
    )


async def registered(session: Runs) -> list[Registered]:
    """Every guard of this database."""
    installed = await schema.look(session)
    if installed is None:
        return []
    claims = "claims" if installed.schema.version >= schema.WITH_CLAIMS else "NULL"
    found = await session.run(
        f"SELECT guard, template, rule, epoch, mandatory, {claims} FROM fenced_guard.guard ORDER BY guard"
    )
    return [
        Registered(Spec(guard, template, rule, epoch, Claiming.parse(claims) if claims else None), mandatory)
        for guard, template, rule, epoch, mandatory, claims in found
    ]


async def users_of(guard: str, session: Runs, *, readers: bool) -> list[str]:
    """The sessions that hold a lock on the table or on one of its partitions, as far as this role may see them.

    Without `readers`, sessions that only read are left out, unless there are no others: an installation waits for them
    only if it adds a column or drops a trigger.
    """
    await session.run("SELECT pg_stat_clear_snapshot()")  # the caller's transaction may have looked before
    found = await session.run(
        "SELECT DISTINCT ON (k.pid) k.pid, concat_ws(', ', coalesce(a.usename::text, a.backend_type), "
        "nullif(a.application_name, '')), a.state, "
        "extract(epoch FROM clock_timestamp() - a.xact_start)::integer, "
        "k.mode NOT IN ('AccessShareLock', 'RowShareLock') AS writes FROM pg_catalog.pg_locks k "
        "LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = k.pid "
        f"CROSS JOIN (SELECT to_regclass({literal(quoted(guard))}) AS oid) AS guarded "
        "WHERE k.locktype = 'relation' AND k.granted AND k.pid IS DISTINCT FROM pg_backend_pid() "
        "AND k.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()) "
        "AND (k.relation = guarded.oid OR k.relation IN (SELECT relid FROM pg_partition_tree(guarded.oid))) "
        "ORDER BY k.pid, writes DESC"
    )
    writers = [row for row in found if row[-1]]
    return [
        "a prepared transaction"
        if pid is None
        else f"process {pid} ({who}{f'; {state} for {seconds} s' if state and seconds is not None else ''})"
        for pid, who, state, seconds, _ in (found if readers or not writers else writers)
    ]


async def uninstall(spec: Spec, session: Runs) -> list[str]:
    """Restore the table. The marks stay: a guard that is installed later needs them to refuse old holders."""
    guard = guard_of(spec)
    if not await schema.is_there(session):
        raise Misconfigured("no guard is installed in this database")
    found = await session.run(
        f"SELECT epoch, epoch_made FROM fenced_guard.guard WHERE guard = {literal(guard)}"
    )
    if not found:
        raise Misconfigured(f"no guard is installed for {guard}")
    epoch, made = found[0]
    dropped = [f'ALTER TABLE IF EXISTS {quoted(guard)} DROP COLUMN IF EXISTS "{epoch}"'] if made else []
    return [
        _KEEP_SETTINGS,
        f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'",
        *without_triggers(guard),
        *dropped,
        f"DROP SEQUENCE IF EXISTS {object_of(guard, 'refused')}",
        f"INSERT INTO fenced_guard.history (guard, what, detail) VALUES ({literal(guard)}, 'uninstall', '{{}}')",
        *(
            f"DELETE FROM fenced_guard.{kept} WHERE guard = {literal(guard)}"
            for kept in ("guard", "mode", "override")
        ),
        _RESTORE_SETTINGS,
    ]


async def _refuse_mixed_rules(spec: Spec, session: Runs) -> None:
    """Guards that can have a name in common must have one rule; otherwise a writer could use the weaker one."""
    guard = guard_of(spec)
    for other, template, rule in await session.run("SELECT guard, template, rule FROM fenced_guard.guard"):
        if other != guard and rule != spec.installs and may_meet(spec.name, template):
            raise Misconfigured(
                f"{other!r} is guarded under {template!r} by rule {rule}; {spec.name!r} can make the same name, "
                f"so its rule must be {rule} too"
            )
