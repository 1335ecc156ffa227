"""What an operator of PostgreSQL guards sees and does, on a connection of any driver."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fenced.errors import Misconfigured, Misuse
from fenced.guards.answers import check_pattern
from fenced.guards.spec import Spec
from fenced.proofs import HmacKey, VerifyingKey, check_key_id
from fenced.stores.postgresql.guard import claiming, install, schema
from fenced.stores.postgresql.guard.install import LOCK_TIMEOUT
from fenced.stores.postgresql.guard.refusals import IN_THE_LOG
from fenced.stores.postgresql.guard.sessions import PostgresqlSession
from fenced.stores.postgresql.guard.tables import (
    BIND_SECONDS,
    PostgresqlTable,
    older_than_change,
    rollback_quietly,
    text_literal,
    wrapped,
)
from fenced.stores.postgresql.guard.triggers import DIGEST, guard_of
from fenced.values import sqlfile
from fenced.values.contracts import Operator
from fenced.values.model import check_name, check_realm
from fenced.values.rollout import (
    QUIET_SECONDS,
    Change,
    DatabaseStatus,
    Decision,
    DecisionCount,
    GuardStatus,
    KeyView,
    Override,
    Stage,
    advised,
)

SQL = sqlfile.load(Path(__file__).with_name("operator.sql"))
OVERRIDE_SECONDS = (1.0, 86_400.0)
KEEP = 10_000
"""How many records are kept one by one."""
_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; SET LOCAL jit = off"
_LOCK_LIMIT = f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"
DROPPED_AT_ONCE = 5_000
"""How many marks one transaction deletes."""

_DOUBTS = (
    "fsync is off: a power cut may lose marks and data (postgresql.conf: fsync = on)",
    "full_page_writes is off: a power cut may damage marks and data (postgresql.conf: full_page_writes = on)",
    "synchronous_commit is off: a crash loses the last marks and writes (postgresql.conf: synchronous_commit = on)",
    "the marks are in an unlogged table: a crash deletes them (ALTER TABLE fenced_guard.mark SET LOGGED)",
)
_HASTY = "synchronous_commit is off for {0}: a crash loses its last marks (ALTER ROLE {0} RESET synchronous_commit)"
_FAILOVER = "after a fail-over to it marks may be missing (postgresql.conf: synchronous_standby_names)"
_HIDDEN = "whether its {} standbys are synchronous (GRANT pg_read_all_stats TO this role)"

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


class PostgresqlOperator(Operator):
    """The guards of one database."""

    kind = "a PostgreSQL guard"

    def __init__(self, session: PostgresqlSession) -> None:
        self._session = session

    async def status(self, table: str | None = None, quiet_for: float = QUIET_SECONDS) -> DatabaseStatus:
        """Every guard, or that of one table, as it is now. A next stage is safe after `quiet_for` quiet seconds."""
        # The server would compile these queries: that takes a second, and running them a few milliseconds.
        only = None if table is None else _spec(table).table
        return await self._within(_SNAPSHOT, lambda: self._status(only, quiet_for))

    async def figures(self) -> DatabaseStatus:
        return await self._within(_SNAPSHOT, lambda: self._status(None, QUIET_SECONDS, marks=False))

    async def extent(self) -> tuple[int, int]:
        ((marks, highest),) = await self._within(_SNAPSHOT, lambda: self._run("extent"))
        return int(marks), int(highest)

    async def roles(self) -> frozenset[str]:
        return frozenset(role for (role,) in await self._within(_SNAPSHOT, lambda: self._run("roles")))

    async def _status(self, only: str | None, quiet_for: float, *, marks: bool = True) -> DatabaseStatus:
        ((now, realm, *trust),) = await self._run("database")
        guards = await self._guards(quiet_for, only, marks)
        if marks:
            guards = [advised(guard, now, quiet_for) for guard in guards]
        found = await schema.look(self._session)
        status = DatabaseStatus(now, realm, tuple(guards), *trust)
        ((*store, roles, shows, standbys, behind),) = await self._run("store")
        doubts = [says for value, says in zip(store, _DOUBTS, strict=True) if value == "off"]
        return replace(
            status,
            schema=found.schema if found else None,
            elsewhere=IN_THE_LOG,
            doubts=(*doubts, *([_HASTY.format(roles)] if roles else [])),
            failover=None if behind is None else f"standby {behind} is asynchronous: {_FAILOVER}",
            hidden=(_HIDDEN.format(standbys),) if standbys and not shows else (),
            local_clock=False,
        )

    async def _guards(self, quiet_for: float, only: str | None, counts_marks: bool) -> list[GuardStatus]:
        rows = await self._run("guards")
        chosen = [row for row in rows if only in (None, row[0])]
        if only is not None and not chosen:
            raise Misconfigured(f"no guard is installed for {only}")
        modes = _by_guard(await self._run("modes"))
        overrides = _by_guard(await self._run("overrides"))
        counts = _by_guard(await self._run("counts", quiet=repr(float(quiet_for))))
        triggers = _by_guard(await self._run("triggers"))
        unseen = _by_guard(await self._run("unseen"))
        bypass = _by_guard(await self._run("bypass", may_replicate=await self._may_replicate()))
        found = []
        for guard, template, rule, mandatory, epoch, refused, made, oid, claims in chosen:
            marks = highest = 0
            if counts_marks:
                ((marks, highest),) = await self._run("marks", names=text_literal(_names(template)))
            gone = ["the table was dropped or renamed"] if oid is None else []
            if mandatory and made != (claiming.DIGEST if claims else DIGEST):
                gone.append(f"its triggers are those of another version of fenced: {schema.UPGRADE}")
            gone += [says for (says,) in unseen[guard]]
            found.append(
                GuardStatus(
                    guard,
                    template,
                    rule,
                    mandatory,
                    epoch,
                    tuple(Stage(*row) for row in modes[guard]),
                    tuple(Override(*row) for row in overrides[guard]),
                    marks,
                    highest,
                    refused,
                    tuple(DecisionCount(*row) for row in counts[guard] if row[1] != "admit"),
                    (*gone, *_wrong(guard, triggers[guard])),
                    tuple(f"{role} ({why})" for role, why in bypass[guard]),
                    tuple(who for (who,) in await self._run("pending", guard=text_literal(guard))),
                )
            )
        return found

    async def _may_replicate(self) -> str:
        """Whether a role may set session_replication_role. Since PostgreSQL 15 it can be granted to any role."""
        ((version,),) = await self._session.run("SELECT current_setting('server_version_num')::int")
        if version < 150000:
            return "false"
        return "has_parameter_privilege(r.oid, 'session_replication_role', 'SET')"

    async def upgrade(self) -> list[str]:
        """Bring the schema, its functions and every guard's triggers to this version. Returns the tables.

        Each table has a separate transaction, so that no two tables are locked at once. In between, old triggers call
        the new functions.
        """
        try:
            if await schema.look(self._session) is None:
                raise Misconfigured("no guard is installed in this database: fenced guard install")
            guards = await install.registered(self._session)
        except Exception as error:
            raise wrapped(error) from error
        finally:
            await rollback_quietly(self._session)
        for spec, mandatory in guards:
            await PostgresqlTable(spec, self._session, mandatory).install(None)
        return [spec.table for spec, _ in guards]

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        """The newest lines of the audit, the newest last."""
        return [Decision.of(row) for row in await self._newest("records", table, limit)]

    async def history(self, table: str | None = None, limit: int = 100) -> list[Change]:
        """What operators did, the newest last."""
        rows = await self._newest("history", table, limit)
        return [
            Change(at, who, application, guard, what, json.loads(detail))
            for at, who, application, guard, what, detail in rows
        ]

    async def _newest(self, what: str, table: str | None, limit: int) -> Rows:
        text = "NULL" if table is None else _literal(table)

        async def newest() -> Rows:
            rows = await self._run(what, guard=text, limit=str(int(limit)))
            if table is not None and not rows:  # records and history of a guard stay after it was uninstalled
                await self._check_installed(_spec(table).table)
            return rows[::-1]

        return await self._within("SET TRANSACTION READ ONLY", newest)

    async def _check_installed(self, guard: str) -> None:
        known = f"SELECT 1 FROM fenced_guard.guard WHERE guard = {text_literal(guard)}"
        if not await self._session.run(known):
            raise Misconfigured(f"no guard is installed for {guard}")

    async def modes(self, table: str | None = None) -> dict[str, str]:
        """The mode of each pattern of a table that has one."""
        guard = _spec(table).table
        rows = await self._within("SET TRANSACTION READ ONLY", lambda: self._run("modes"))
        return {pattern: mode for found, pattern, mode, _ in rows if found == guard}

    async def set_mode(
        self, table: str | None, mode: str, pattern: str = "*", wait: float = BIND_SECONDS
    ) -> tuple[str, ...]:
        """Set the mode of the names that match; return the transactions that it does not bind yet."""
        return await PostgresqlTable(_spec(table), self._session).set_mode(mode, pattern, wait)

    async def adopt(self, realm: str) -> None:
        """Trust this authority from now on, and no other."""
        await PostgresqlTable(Spec("x", "x"), self._session).adopt(realm)

    async def waiting_messages(self) -> dict[str, int]:
        """How many messages wait in each outbox. An empty one is not listed."""
        return await self._within("SET TRANSACTION READ ONLY", self._waiting_messages)

    async def _waiting_messages(self) -> dict[str, int]:
        found = {}
        for guard, table in await self._run("outboxes"):
            ((count,),) = await self._session.run(f"SELECT count(*) FROM {table}")
            found[guard] = count
        return {guard: count for guard, count in found.items() if count}

    async def unset_mode(self, table: str | None, pattern: str) -> bool:
        """Delete the mode of a pattern; False if it had none."""
        if check_pattern(pattern) == "*":
            raise Misuse("the mode of * is the table's own: set another one")
        call = f"fenced_guard.unset_mode({_literal(table)}, {text_literal(pattern)})"
        ((there,),) = await self._change(f"SELECT {call}")
        return bool(there)

    async def override(self, table: str | None, pattern: str, seconds: float, why: str) -> Override:
        """Let writes to the names that match through for some seconds, whatever the mode is."""
        shortest, longest = OVERRIDE_SECONDS
        if not shortest <= seconds <= longest:
            raise Misuse("an override lasts from a second to 24 hours")
        arguments = f"interval '{float(seconds)!r} seconds'", _why(why), text_literal(check_pattern(pattern))
        call = f"fenced_guard.override_for({', '.join((_literal(table), *arguments))})"
        ((until, who),) = await self._change(f"SELECT {call}, session_user::text")
        return Override(pattern, until, who, why)

    async def pending(self, table: str | None, wait: float = BIND_SECONDS) -> tuple[str, ...]:
        """Wait for the transactions that the last mode change does not bind; return those left after `wait` seconds."""
        return await older_than_change(self._session, _spec(table).table, wait)

    async def end_overrides(self, table: str | None, pattern: str | None) -> int:
        """End them now; returns how many."""
        which = "NULL" if pattern is None else text_literal(check_pattern(pattern))
        ((count,),) = await self._change(f"SELECT fenced_guard.end_overrides({_literal(table)}, {which})")
        return int(count)

    async def reset(self, name: str, why: str) -> int | None:
        """Delete the mark of a name; returns its token, None if it had none."""
        call = f"fenced_guard.reset({text_literal(check_name(name))}, {_why(why)})"
        ((token,),) = await self._change(f"SELECT {call}")
        return None if token is None else int(token)

    async def drop_marks(self, realm: str, below: int) -> int:
        """Delete the marks below a token, and refuse every token below it from now on. Return how many were deleted.

        Several small transactions do it, so that no writer waits for long.
        """
        dropped = 0
        call = f"fenced_guard.drop_marks({text_literal(check_realm(realm))}, {int(below)}, {DROPPED_AT_ONCE})"
        while True:
            ((count,),) = await self._change(f"SELECT {call}")
            dropped += int(count)
            if count == 0:
                return dropped

    async def keys(self) -> list[KeyView]:
        """The keys that may sign stamps and those that were revoked, in the order they were added."""
        select = "SELECT id, kind, added, revoked FROM fenced_guard.key ORDER BY added, id"
        rows = await self._within("SET TRANSACTION READ ONLY", lambda: self._session.run(select))
        return [KeyView(*row) for row in rows]

    async def add_key(self, key: VerifyingKey) -> None:
        """Accept proofs that this key made. Its secret is sent as a parameter, so that no statement's text has it."""
        secret = key.secret if isinstance(key, HmacKey) else key.public
        call = "SELECT fenced_guard.add_key(%s, %s, %s)"
        await self._within(
            _LOCK_LIMIT, lambda: self._session.run(call, (key.id, key.kind, secret)), commit=True
        )

    async def revoke_key(self, key_id: str) -> None:
        """Stop accepting proofs that this key made."""
        await self._change(f"SELECT fenced_guard.revoke_key('{check_key_id(key_id)}')")

    async def require_proofs(self, required: bool) -> None:
        """Require proofs, or stop requiring them; the same transaction replaces the triggers of every guard."""
        await self._within(_LOCK_LIMIT, lambda: self._require_proofs(required), commit=True)

    async def _require_proofs(self, required: bool) -> None:
        await self._session.run(f"SELECT fenced_guard.require_proofs({bool(required)})")
        for spec, mandatory in await install.registered(self._session):
            for statement in await install.script(spec, None, self._session, mandatory=mandatory):
                await self._session.run(statement)

    async def trust(self, change: dict[str, float | None]) -> None:
        """Change `max_jump` (None: no limit), `sample` (a share from 0 to 1) or `patience` (seconds)."""
        if not change:
            return
        jump, sample = change.get("max_jump"), change.get("sample") or 0
        if (jump is not None and jump < 1) or not 0 <= sample <= 1:
            raise Misuse("max_jump is at least 1, and sample is from 0 to 100 percent")
        await self._change(f"SELECT fenced_guard.set_trust({text_literal(json.dumps(change))})")

    async def grant_monitor(self, role: str, *, revoke: bool = False) -> None:
        """Let a role read what operators read, and change nothing; or no longer."""
        call = f"{'revoke' if revoke else 'grant'}_monitor({text_literal(role)})"
        await self._change(f"SELECT fenced_guard.{call}")

    async def tidy(self, keep: int = KEEP) -> dict[str, int]:
        """Add up old records, delete expired overrides, and write down how many decisions could not be recorded."""
        if keep < 0:
            raise Misuse("keep is a number of records, 0 or more")
        (row,) = await self._change(f"SELECT * FROM fenced_guard.tidy_up({int(keep)})")
        return dict(zip(("summed", "overrides", "unrecorded"), row, strict=True))

    async def _change(self, sql: str) -> Rows:
        """Call one of the operators' functions in a separate transaction, which waits at most 2 s for a lock."""
        first = f"SET TRANSACTION ISOLATION LEVEL READ COMMITTED; {_LOCK_LIMIT}"
        return await self._within(first, lambda: self._session.run(sql), commit=True)

    async def _run(self, what: str, **parts: str) -> Rows:
        return await self._session.run(SQL[what].format(**parts))

    async def _within(self, first: str, work: Callable[[], Awaitable[T]], *, commit: bool = False) -> T:
        """Do `work` in a new transaction; Misconfigured if no guard is installed in this database."""
        if self._session.state() != "idle":
            raise Misuse("this connection is closed, or in a transaction")
        try:
            await self._session.begin(first)
            if not await schema.is_there(self._session):
                raise Misconfigured("no guard is installed in this database: fenced guard install")
            answer = await work()
            if commit:
                await self._session.commit()
            return answer
        except Exception as error:
            raise wrapped(error) from error
        finally:
            await rollback_quietly(self._session)


def _by_guard(rows: Rows) -> defaultdict[str, Rows]:
    """Rows by their first column, without it."""
    found: defaultdict[str, Rows] = defaultdict(list)
    for guard, *rest in rows:
        found[guard].append(tuple(rest))
    return found


def _wrong(guard: str, triggers: Sequence[tuple[str, str, bool]]) -> list[str]:
    says = []
    everywhere = {trigger for relation, trigger, _ in triggers if relation == guard}
    for relation, trigger, missing in triggers:
        if relation != guard and trigger in everywhere:
            continue
        where = "" if relation == guard else f" on partition {relation}"
        if missing and where and trigger == "fenced_truncate":
            says.append(f"partition {relation} can be truncated: install the guard again")
        elif missing:
            says.append(f"trigger {trigger} is missing{where}: install the guard again")
        else:
            says.append(f"trigger {trigger} is disabled{where}")
    return says


def _names(template: str) -> str:
    """A regular expression for the names that a template can make."""
    spec = Spec("x", template)
    if spec.whole:
        return "."
    return f"^{''.join('[^/]+' if column else re.escape(piece) for piece, column in spec.pieces)}$"


def _spec(table: str | None) -> Spec:
    """A spec with the guard of this table, for operations that do not use the template."""
    if table is None:
        raise Misuse("which table? Pass --table TABLE")
    return Spec(guard_of(Spec(table, "x")), "x")


def _literal(table: str | None) -> str:
    return text_literal(_spec(table).table)


def _why(why: str) -> str:
    if not why.strip():
        raise Misuse("say why: it is kept in the history")
    return text_literal(why)
