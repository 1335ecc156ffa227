"""What an operator of MariaDB guards sees and does. The guards are those of the connection's database."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC
from pathlib import Path
from typing import Any, TypeVar

from fenced.errors import Misconfigured, Misuse, Unsupported
from fenced.guards.answers import check_pattern
from fenced.guards.spec import Spec
from fenced.proofs import HmacKey, VerifyingKey, check_key_id
from fenced.stores.mariadb.guard import install, schema
from fenced.stores.mariadb.guard.changing import BIND_SECONDS, change_modes, refuse_open
from fenced.stores.mariadb.guard.install import likes_of, table_of, text
from fenced.stores.mariadb.guard.refusals import wrapped
from fenced.stores.mariadb.guard.sessions import MariadbSession
from fenced.stores.mariadb.guard.status import at, doubts, guards, run, some
from fenced.stores.mariadb.guard.tables import MariadbTable
from fenced.stores.mariadb.wire.connection import literal
from fenced.values import sqlfile
from fenced.values.contracts import Operator
from fenced.values.model import check_name, check_realm
from fenced.values.rollout import (
    QUIET_SECONDS,
    Change,
    DatabaseStatus,
    Decision,
    KeyView,
    Override,
    advised,
)

SQL = sqlfile.load(Path(__file__).with_name("operator.sql"))
OVERRIDE_SECONDS = (1.0, 86_400.0)
KEEP = 10_000
"""How many records are kept one by one."""
DROPPED_AT_ONCE = 5_000
"""How many marks one transaction deletes."""
CONNECT_SECONDS = 10
_WHY = {
    "TRIGGER": "may drop the triggers",
    "DROP": "may truncate the table",
    "ALTER": "may rename the table",
    "SUPER": "administrator",
}

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


class MariadbOperator(Operator):
    """The guards of one database."""

    kind = "a MariaDB guard"

    def __init__(self, session: MariadbSession) -> None:
        self._session = session

    async def status(self, table: str | None = None, quiet_for: float = QUIET_SECONDS) -> DatabaseStatus:
        """Every guard, or that of one table, as it is now. A next stage is safe after `quiet_for` quiet seconds."""
        return await self._looking(lambda scope: self._status(scope, table, quiet_for))

    async def figures(self) -> DatabaseStatus:
        return await self._looking(lambda scope: self._status(scope, None, QUIET_SECONDS, marks=False))

    async def extent(self) -> tuple[int, int]:
        ((marks, highest),) = await self._looking(lambda scope: self._run("extent", scope))
        return int(marks), int(highest)

    async def _status(
        self, scope: str, only: str | None, quiet_for: float, *, marks: bool = True
    ) -> DatabaseStatus:
        ((flush, log_bin, sync, doublewrite, now),) = await self._run("store", scope)
        rows = await self._session.run(
            f"SELECT realm, proof FROM fenced_guard.trust WHERE scope = {literal(scope)}"
        )
        now = now.replace(tzinfo=UTC)
        table = None if only is None else table_of(_spec(only))
        found_guards = await guards(self._session, scope, table, quiet_for, counts_marks=marks)
        if marks:
            found_guards = [advised(guard, now, quiet_for) for guard in found_guards]
        found = await schema.look(self._session)
        return DatabaseStatus(
            now,
            text(rows[0][0]) or None if rows else None,
            tuple(found_guards),
            proof=bool(rows[0][1]) if rows else False,
            schema=found.schema if found else None,
            doubts=tuple(doubts(flush, log_bin, sync, doublewrite)),
            local_clock=False,
        )

    async def upgrade(self) -> list[str]:
        """Bring the tables, the routines and every guard's triggers to this version. Returns the tables."""
        guards = await self._looking(lambda _: install.registered(self._session), upgrades=True)
        for spec, mandatory in guards:
            await MariadbTable(spec, self._session, mandatory).install(None)
        return [spec.table for spec, _ in guards]

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        """The newest lines of the audit, the newest last."""
        rows = await self._newest("records", table, limit)
        return [
            Decision.of(
                (
                    *(at(when), text(guard), some(name), some(stamp), token, some(grant), seq),
                    *(text(verdict), text(ruling), text(mode), text(who), None, None, some(address), pid),
                )
            )
            for when, guard, name, stamp, token, grant, seq, verdict, ruling, mode, who, address, pid in rows
        ]

    async def history(self, table: str | None = None, limit: int = 100) -> list[Change]:
        """What operators did, the newest last."""
        return [
            Change(at(when), text(who), "", some(guard), text(what), {"detail": text(detail)})
            for when, who, guard, what, detail in await self._newest("history", table, limit)
        ]

    async def _newest(self, what: str, table: str | None, limit: int) -> Rows:
        only = "NULL" if table is None else literal(table_of(_spec(table)))

        async def newest(scope: str) -> Rows:
            rows = await self._run(what, scope, table=only, limit=str(int(limit)))
            if table is not None and not rows:  # records and history of a guard stay after it was uninstalled
                await guards(self._session, scope, table_of(_spec(table)), QUIET_SECONDS, counts_marks=False)
            return rows[::-1]

        return await self._looking(newest)

    async def modes(self, table: str | None = None) -> dict[str, str]:
        """The mode of each pattern of a table that has one."""
        guard = table_of(_spec(table))
        rows = await self._looking(lambda scope: self._run("modes", scope))
        return {text(pattern): text(mode) for found, pattern, mode, _ in rows if text(found) == guard}

    async def set_mode(
        self, table: str | None, mode: str, pattern: str = "*", wait: float = BIND_SECONDS
    ) -> tuple[str, ...]:
        """Set the mode of the names that match. Returns nothing: see `MariadbTable.set_mode`."""
        return await MariadbTable(_spec(table), self._session).set_mode(mode, pattern, wait)

    async def unset_mode(self, table: str | None, pattern: str) -> bool:
        """Delete the mode of a pattern; False if it had none."""
        if check_pattern(pattern) == "*":
            raise Misuse("the mode of * is the table's own: set another one")
        if pattern not in await self.modes(table):
            return False
        spec = _spec(table)
        await change_modes(
            spec,
            self._session,
            lambda scope: [
                f"DELETE FROM fenced_guard.mode WHERE {_of(scope, table_of(spec))} AND pattern = {literal(pattern)}"
            ],
            f"{pattern}: none",
            BIND_SECONDS,
        )
        return True

    async def override(self, table: str | None, pattern: str, seconds: float, why: str) -> Override:
        """Let writes to the names that match through for some seconds, whatever the mode is."""
        shortest, longest = OVERRIDE_SECONDS
        if not shortest <= seconds <= longest:
            raise Misuse("an override lasts from a second to 24 hours")
        check_pattern(pattern)
        reason = _why(why)
        spec = _spec(table)
        insert = "INSERT INTO fenced_guard.override (scope, tbl, pattern, likes, until, who, why) VALUES "
        values = (
            f"{literal(table_of(spec))}, {literal(pattern)}, {literal(likes_of(pattern))}, "
            f"UTC_TIMESTAMP(6) + INTERVAL {float(seconds)!r} SECOND, USER(), {literal(reason)}"
        )
        await change_modes(
            spec,
            self._session,
            lambda scope: [insert + f"({literal(scope)}, {values})"],
            f"{pattern}: {seconds:g} s: {reason}",
            BIND_SECONDS,
            "override",
        )
        rows = await self._looking(lambda scope: self._run("overrides", scope))
        found = [row for row in rows if text(row[0]) == table_of(spec) and text(row[1]) == pattern]
        _, _, ends, who, _ = found[-1]
        return Override(pattern, at(ends), text(who), reason)

    async def end_overrides(self, table: str | None, pattern: str | None) -> int:
        """End them now; returns how many."""
        spec = _spec(table)
        rows = await self._looking(lambda scope: self._run("overrides", scope))
        ended = [row for row in rows if text(row[0]) == table_of(spec) and pattern in (None, text(row[1]))]
        only = "" if pattern is None else f" AND pattern = {literal(check_pattern(pattern))}"
        await change_modes(
            spec,
            self._session,
            lambda scope: [f"DELETE FROM fenced_guard.override WHERE {_of(scope, table_of(spec))}{only}"],
            f"{pattern or 'all'}: ended",
            BIND_SECONDS,
            "override",
        )
        return len(ended)

    async def adopt(self, realm: str) -> None:
        """Trust this authority from now on, and no other."""
        await self.extent()  # Misconfigured without a guard
        await MariadbTable(Spec("x", "x"), self._session).adopt(realm)

    async def reset(self, name: str, why: str) -> int | None:
        """Delete the mark of a name; returns its token, None if it had none."""
        reason, wanted = _why(why), literal(check_name(name))

        async def delete(scope: str) -> int | None:
            where = f"scope = {literal(scope)} AND name = {wanted}"
            await self._session.run("START TRANSACTION")
            try:
                rows = await self._session.run(
                    f"SELECT token FROM fenced_guard.mark WHERE {where} FOR UPDATE"
                )
                await self._session.run(f"DELETE FROM fenced_guard.mark WHERE {where}")
                token = int(rows[0][0]) if rows and rows[0][0] else None
                says = f"{name}: token {token}: {reason}"
                await self._session.run(install.history(scope, None, "reset", says))
            except BaseException:
                await self._session.undo("ROLLBACK")
                raise
            await self._session.run("COMMIT")
            return token

        return await self._looking(delete)

    async def drop_marks(self, realm: str, below: int) -> int:
        """Delete the marks below a token, and refuse every token below it from now on. Return how many were deleted."""
        trusted = check_realm(realm)

        async def drop(scope: str) -> int:
            own = f"scope = {literal(scope)}"
            await self._session.run(
                f"UPDATE fenced_guard.trust SET floor = GREATEST(floor, {int(below)}) "
                f"WHERE {own} AND realm = {literal(trusted)}"
            )
            rows = await self._session.run(f"SELECT realm, floor FROM fenced_guard.trust WHERE {own}")
            if not rows or text(rows[0][0]) != trusted or rows[0][1] < below:
                raise Misconfigured(f"the guards of {scope} do not trust realm {trusted}")
            marks = f"FROM fenced_guard.mark WHERE {own} AND token > 0 AND token < {int(below)}"
            dropped = 0
            while True:
                ((count,),) = await self._session.run(
                    f"SELECT COUNT(*) FROM (SELECT 1 {marks} LIMIT {DROPPED_AT_ONCE}) AS some"
                )
                if not count:
                    break
                await self._session.run(f"DELETE {marks} LIMIT {DROPPED_AT_ONCE}")
                dropped += int(count)
            await self._session.run(install.history(scope, None, "drop marks", f"{dropped} below {below}"))
            return dropped

        return await self._looking(drop)

    async def keys(self) -> list[KeyView]:
        """The keys that may sign stamps and those that were revoked, in the order they were added."""
        rows = await self._looking(lambda scope: self._run("keys", scope))
        return [
            KeyView(text(key), text(kind), at(added), None if revoked is None else at(revoked))
            for key, kind, added, revoked in rows
        ]

    async def add_key(self, key: VerifyingKey) -> None:
        """Accept proofs that this key made. The server keeps what HMAC needs of its secret."""
        if not isinstance(key, HmacKey):
            raise Unsupported("a MariaDB guard checks proofs by HMAC keys alone: this server has no Ed25519")
        inner, outer = _blocks(key.secret)

        async def add(scope: str) -> None:
            blocks = f"x'{inner.hex()}', x'{outer.hex()}'"
            values = f"{literal(scope)}, {literal(key.id)}, 'hmac', {blocks}, UTC_TIMESTAMP(6)"
            known = f"SELECT 1 FROM fenced_guard.proof_key WHERE scope = {literal(scope)} AND id = {literal(key.id)}"
            if await self._session.run(known):
                raise Misuse(f"there is a key {key.id} already; take another id for another secret")
            columns = "(scope, id, kind, inner_block, outer_block, added)"
            await self._session.run(f"INSERT INTO fenced_guard.proof_key {columns} VALUES ({values})")
            await self._session.run(install.history(scope, None, "add key", key.id))

        await self._looking(add)

    async def revoke_key(self, key_id: str) -> None:
        """Stop accepting proofs that this key made."""
        wanted = check_key_id(key_id)

        async def revoke(scope: str) -> None:
            where = f"scope = {literal(scope)} AND id = '{wanted}' AND revoked IS NULL"
            if not await self._session.run(f"SELECT 1 FROM fenced_guard.proof_key WHERE {where}"):
                raise Misuse(f"there is no key {wanted} that could be revoked")
            await self._session.run(
                f"UPDATE fenced_guard.proof_key SET revoked = UTC_TIMESTAMP(6) WHERE {where}"
            )
            await self._session.run(install.history(scope, None, "revoke key", wanted))

        await self._looking(revoke)

    async def require_proofs(self, required: bool) -> None:
        """Require proofs of whoever announces, or stop requiring them. Waits for transactions that have announced."""

        async def require(scope: str) -> None:
            where = f"scope = {literal(scope)}"
            if required and not [key for key in await self._run("keys", scope) if key[3] is None]:
                raise Misuse("no key could sign: add one first")
            await self._session.run(f"UPDATE fenced_guard.trust SET proof = {bool(required)} WHERE {where}")
            await self._session.run(install.history(scope, None, "require proofs", str(bool(required))))

        await self._looking(require)

    async def waiting_messages(self) -> dict[str, int]:
        """How many messages wait in each outbox. An empty one is not listed."""

        async def count(scope: str) -> dict[str, int]:
            found = {}
            for (table,) in await self._run("outboxes", scope):
                ((waiting,),) = await self._session.run(f"SELECT COUNT(*) FROM `{scope}`.`{text(table)}`")
                found[text(table)] = int(waiting)
            return {table: waiting for table, waiting in found.items() if waiting}

        return await self._looking(count)

    async def tidy(self, keep: int = KEEP) -> dict[str, int]:
        """Add up old records, and delete expired overrides."""
        if keep < 0:
            raise Misuse("keep is a number of records, 0 or more")

        async def tidied(scope: str) -> dict[str, int]:
            own = f"scope = {literal(scope)}"
            run = self._session.run
            rows = await run(
                f"SELECT id FROM fenced_guard.record WHERE {own} ORDER BY id DESC LIMIT 1 OFFSET {int(keep)}"
            )
            old = f"{own} AND id <= {int(rows[0][0]) if rows else 0}"
            await run("START TRANSACTION")
            try:
                ((summed,),) = await run(f"SELECT COUNT(*) FROM fenced_guard.record WHERE {old} FOR UPDATE")
                await run(
                    "INSERT INTO fenced_guard.tally (scope, tbl, verdict, ruling, mode, who, count, last) "
                    "SELECT r.scope, r.tbl, r.verdict, r.ruling, r.mode, r.who, SUM(r.count), MAX(r.at) "
                    "FROM fenced_guard.record r "
                    f"WHERE {old} GROUP BY 1, 2, 3, 4, 5, 6 ON DUPLICATE KEY UPDATE "
                    "count = tally.count + VALUES(count), last = GREATEST(last, VALUES(last))"
                )
                await run(f"DELETE FROM fenced_guard.record WHERE {old}")
                expired = f"FROM fenced_guard.override WHERE {own} AND until <= UTC_TIMESTAMP(6)"
                ((overrides,),) = await run(f"SELECT COUNT(*) {expired}")
                await run(f"DELETE {expired}")
            except BaseException:
                await self._session.undo("ROLLBACK")
                raise
            await run("COMMIT")
            return {"summed": int(summed), "overrides": int(overrides), "unrecorded": 0}

        return await self._looking(tidied)

    async def _run(self, what: str, scope: str, **parts: str) -> Rows:
        return await run(self._session, what, scope, **parts)

    async def _looking(self, work: Callable[[str], Awaitable[T]], *, upgrades: bool = False) -> T:
        """Do `work` with the database's name; Misconfigured if no guard is installed on this server."""
        try:
            await refuse_open(self._session)
            if upgrades and await schema.look(self._session) is None:
                raise Misconfigured("no guard is installed on this server: fenced guard install")
            if not upgrades:
                await schema.installed(self._session)
            return await work(await install.scope_of(Spec("x", "x"), self._session))
        except Exception as error:
            raise wrapped(error) from error


def _blocks(secret: bytes) -> tuple[bytes, bytes]:
    """The blocks that HMAC-SHA256 puts in front of the message and of its hash (RFC 2104)."""
    key = (hashlib.sha256(secret).digest() if len(secret) > 64 else secret).ljust(64, b"\0")
    return bytes(byte ^ 0x36 for byte in key), bytes(byte ^ 0x5C for byte in key)


def _of(scope: str, table: str) -> str:
    return f"scope = {literal(scope)} AND tbl = {literal(table)}"


def _spec(table: str | None) -> Spec:
    """A spec with the guard of this table, for operations that do not use the template."""
    if table is None:
        raise Misuse("which table? Pass --table TABLE")
    return Spec(table, "x")


def _why(why: str) -> str:
    if not why.strip():
        raise Misuse("say why: it is kept in the history")
    return why
