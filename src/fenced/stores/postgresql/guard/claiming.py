"""What an installation of claims makes on a PostgreSQL table: columns, indexes and triggers.

Row triggers: the server gives them to every partition, and they need no transition tables. The condition of the trigger
for updates admits nearly every write without a call; a claim is one call and one look at the worker's lease.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from fenced.errors import Misconfigured, Unsupported
from fenced.guards import claims
from fenced.guards.claims import Claiming, Constant
from fenced.guards.spec import Spec, literal
from fenced.stores.postgresql.guard.schema import Runs
from fenced.stores.postgresql.guard.triggers import (
    Names,
    TableShape,
    function_of,
    guard_of,
    object_of,
    quoted,
)

TYPES = {
    "claim_token": ("int8", "bigint"),
    "claim_write": ("int8", "bigint"),
    "claim_holder": ("uuid", "uuid"),
    "claim_attempts": ("int2", "smallint NOT NULL DEFAULT 0"),
    "claim_at": ("timestamptz", "timestamptz"),
}
_UNTOUCHED = (
    "(OLD.claim_token IS NOT NULL OR NEW.claim_holder IS NOT NULL OR NEW.claim_write IS NOT NULL "
    "OR NEW.claim_token IS NOT NULL)"
)
_STAMPED = (
    "NEW.claim_write > OLD.claim_write AND NEW.claim_write >> 20 = OLD.claim_token "
    "AND NEW.claim_token = OLD.claim_token AND (NEW.claim_holder = OLD.claim_holder OR NEW.claim_holder IS NULL)"
)
# The usual claim, in one statement: a live lease of the trusted realm, in a session that knows the history.
_MINT = """SELECT n.floor + nextval('fenced.token') INTO NEW.claim_token
    FROM fenced.attempt a, fenced.namespace n, fenced_guard.trust t
    WHERE a.id = NEW.claim_holder AND a.state = 'granted' AND a.expires > clock_timestamp() AND n.id = a.namespace
      AND n.lineage = current_setting('fenced.lineage', true) AND t.realm = n.realm
      AND current_setting('synchronous_commit') NOT IN ('off', 'local');
    IF (NEW.claim_token > coalesce(OLD.claim_token, 0) AND NEW.claim_token < 8796093022208) IS NOT TRUE THEN
      NEW.claim_token := fenced_guard.mint_claim({name}, NEW.claim_holder, OLD.claim_token);
    END IF;"""
_CHECK = "PERFORM fenced_guard.check_claim({guard}, {name}, NEW.claim_token, OLD.claim_token);"
_UPDATE = """IF NEW.claim_holder IS NOT NULL AND OLD.claim_holder IS NULL AND NOT ({moved}) THEN
    {token}
    NEW.claim_write := NEW.claim_token << 20;
    NEW.claim_attempts := OLD.claim_attempts + 1;
    NEW.claim_at := clock_timestamp();
  ELSIF NOT fenced_guard.admits_write({guard}, {name}, {minted}, {moved}, OLD.claim_token, OLD.claim_write,
      OLD.claim_holder, NEW.claim_token, NEW.claim_write, NEW.claim_holder) THEN
    NEW.claim_token := OLD.claim_token;
    NEW.claim_write := OLD.claim_write;
    NEW.claim_holder := OLD.claim_holder;
    NEW.claim_attempts := OLD.claim_attempts;
    NEW.claim_at := OLD.claim_at;
  END IF;
  RETURN NEW;"""


def constant(value: Constant) -> str:
    """A constant as SQL. A text is written without a type, so that it takes the column's."""
    if isinstance(value, str):
        return "E'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
    return "NULL" if value is None else str(value).upper() if isinstance(value, bool) else str(value)


assignments = functools.partial(claims.assigned, constant)
given_back = functools.partial(claims.given_back, constant)


def check_shape(spec: Spec, claiming: Claiming, table: TableShape) -> None:
    """Misconfigured or Unsupported if the rows of this table cannot be claimed."""
    guard = guard_of(spec)
    for column, (kind, _) in TYPES.items():
        if table.kinds.get(column, kind) != kind:
            raise Misconfigured(
                f"the column {column!r} of {guard} is of type {table.kinds[column]}, not {kind}"
            )
    named = (name for part in (claiming.taken, claiming.back, claiming.dead) for name, _ in part)
    for column in (*spec.columns, *named):
        if column not in table.kinds:
            raise Misconfigured(f"the table {guard} has no column {column!r}")
    if generated := [column for column in spec.columns if column in table.generated]:
        raise Unsupported(f"the column {generated[0]!r} is generated; claims need names of other columns")


async def check_key(spec: Spec, claiming: Claiming, session: Runs) -> None:
    """Misconfigured unless the key identifies a row: it is unique, alone or, in a partitioned table, with others."""
    guard = guard_of(spec)
    found = await session.run(
        "SELECT 1 FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid "
        "JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
        f"WHERE i.indrelid = {literal(quoted(guard))}::regclass AND a.attname = {literal(claiming.key)} "
        "AND i.indisunique AND i.indpred IS NULL AND (i.indnkeyatts = 1 OR c.relkind = 'p')"
    )
    if not found:
        raise Misconfigured(
            f"the key {claiming.key!r} of {guard} is not unique; name the primary key: key='id'"
        )


async def resolved(claiming: Claiming, session: Runs, *, there: bool) -> Claiming:
    """With `minted` decided: whether the authority is in this database, with the owner of the guards."""
    owner = (
        "(SELECT nspowner FROM pg_catalog.pg_namespace WHERE nspname = 'fenced_guard')"
        if there
        else "(SELECT oid FROM pg_catalog.pg_roles WHERE rolname = current_user)"
    )
    ((beside,),) = await session.run(
        "SELECT coalesce((SELECT n.nspowner = "
        f"{owner} AND to_regclass('fenced.token') IS NOT NULL FROM pg_catalog.pg_namespace n "
        "WHERE n.nspname = 'fenced'), false)"
    )
    if claiming.minted and not beside:
        raise Misconfigured(
            "mint=True needs the authority in this database, with the same owner: open a client of it first"
        )
    return replace(claiming, minted=bool(beside) if claiming.minted is None else claiming.minted)


def columns(guard: str) -> str:
    added = ", ".join(f"ADD COLUMN IF NOT EXISTS {name} {kind}" for name, (_, kind) in TYPES.items())
    return f"ALTER TABLE {quoted(guard)} {added}"


def index_of(guard: str, claiming: Claiming, what: str) -> str:
    key = hashlib.sha256(guard.encode()).hexdigest()[:12]
    return f"fenced_{what}_{key}" + (f"_{claiming.digest}" if what == "ready" else "")


def indexes(guard: str, claiming: Claiming) -> list[str]:
    """By `IF NOT EXISTS`: on a table in use an operator makes them first, CONCURRENTLY, under the same names."""
    ready, held = (index_of(guard, claiming, what) for what in ("ready", "held"))
    stale = f"fenced_ready_{hashlib.sha256(guard.encode()).hexdigest()[:12]}_%"
    return [
        (
            "DO $fenced$ DECLARE\n  v_index regclass;\nBEGIN\n"
            "  FOR v_index IN SELECT indexrelid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid\n"
            f"    WHERE i.indrelid = {literal(quoted(guard))}::regclass AND c.relname LIKE {literal(stale)}\n"
            f"      AND c.relname <> {literal(ready)} LOOP\n"
            "    EXECUTE format('DROP INDEX %s', v_index);\n  END LOOP;\nEND $fenced$"
        ),
        (
            f'CREATE INDEX IF NOT EXISTS "{ready}" ON {quoted(guard)} ({claiming.order}) '
            f"WHERE ({claiming.ready}) AND claim_holder IS NULL"
        ),
        (
            f'CREATE INDEX IF NOT EXISTS "{held}" ON {quoted(guard)} (claim_holder) '
            f"WHERE claim_holder IS NOT NULL"
        ),
    ]


def triggers(names: Names, table: TableShape, claiming: Claiming) -> list[str]:
    """The statements that create the functions and triggers of a table with claims."""
    guard = names.guard
    made = {what: object_of(guard, what) for what in ("insert", "update", "delete", "truncate", "notify")}
    fields = {
        "guard": literal(guard),
        "name": names.name("OLD"),
        "moved": names.moved,
        "minted": bool(claiming.minted),
    }
    token = (_MINT if claiming.minted else _CHECK).format(**fields)
    bodies = {
        "insert": f"PERFORM fenced_guard.refuse_born_claimed({names.name('NEW')});\n  RETURN NULL;",
        "update": _UPDATE.format(token=token, **fields),
        "delete": f"PERFORM fenced_guard.decide_delete({literal(guard)}, {names.name('OLD')}, OLD.claim_write);\n"
        "  RETURN OLD;",
        "truncate": f"PERFORM fenced_guard.rule_on_claim({literal(guard)}, NULL, NULL, 'missing', NULL, "
        "'TRUNCATE carries no stamp, and the mode is require');\n  RETURN NULL;",
        "notify": f"PERFORM fenced_guard.notify_idle({literal(guard)});\n  RETURN NULL;",
    }
    when = {
        "insert": "NEW.claim_token IS NOT NULL OR NEW.claim_holder IS NOT NULL OR NEW.claim_write IS NOT NULL",
        "update": f"{_UNTOUCHED} AND ({_STAMPED} AND NOT ({names.moved})) IS NOT TRUE",
        "delete": "OLD.claim_holder IS NOT NULL",
    }
    head = f"CREATE OR REPLACE TRIGGER fenced_{{}} BEFORE {{}} ON {quoted(guard)} FOR EACH ROW WHEN ({{}}) "
    return [
        *(function_of(function, bodies[what]) for what, function in made.items()),
        *(
            head.format(event, event.upper(), condition) + f"EXECUTE FUNCTION {made[event]}()"
            for event, condition in when.items()
        ),
        (
            f"CREATE OR REPLACE TRIGGER fenced_notify AFTER INSERT ON {quoted(guard)} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {made['notify']}()"
        ),
        *(
            f"CREATE OR REPLACE TRIGGER fenced_truncate BEFORE TRUNCATE ON {quoted(target)} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {made['truncate']}()"
            for target in (guard, *table.partitions)
        ),
    ]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


DIGEST = _digest((_UNTOUCHED, _STAMPED, _MINT, _CHECK, _UPDATE))
"""Of what the triggers are made of. If it differs, an installation would change them."""
