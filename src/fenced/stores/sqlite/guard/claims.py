"""Claims on an SQLite table, over one of the program's connections.

`BEGIN IMMEDIATE` and every UPDATE take the file's one write lock, so what a statement has compared stays true until
COMMIT. The worker's lease is in the authority's own file, which no statement here waits for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from fenced.errors import FencedError, Misconfigured, Misuse, StaleToken
from fenced.guards.answers import error_for
from fenced.guards.claims import (
    CLOSED,
    GIVEN_BACK_AT_ONCE,
    WRITE_BITS,
    ClaimedKey,
    Claiming,
    ClaimTerms,
    ClaimView,
    Ends,
    Row,
    WorkStatus,
    claim_grant,
    write_number,
)
from fenced.guards.spec import Spec, check_identifier, literal
from fenced.stores.sqlite.guard.claiming import assignments, given_back
from fenced.stores.sqlite.guard.marks import SqliteMarks
from fenced.stores.sqlite.guard.refusals import translate, verdict_in
from fenced.stores.sqlite.guard.sessions import SqliteSession
from fenced.values.decision import Mark, Mode, Ruling, Verdict, mode_of
from fenced.values.model import Stamp
from fenced.values.rollout import Decision

_NOW = "((julianday('now') - 2440587.5) * 86400.0)"
_STAMP = (
    "INSERT OR REPLACE INTO fenced_stamp (name, guard, stamp, seq, verdict, refuse, open) "
    "VALUES (?, ?, '', ?, 'admit', 0, 0)"
)
_REVOKED = "a later write under the same claim was applied before, or an operator has revoked the claim"


class SqliteClaims:
    """The operations of claims on one table."""

    def __init__(self, spec: Spec, session: SqliteSession) -> None:
        assert spec.claims is not None
        self._claiming: Claiming = spec.claims
        self._spec = spec
        self._guard = spec.table
        self._table = f'"{spec.table}"'
        self._key = f'"{spec.claims.key}"'
        self._session = session
        self._marks = SqliteMarks(spec.table)
        self._entered: ClaimedKey | None = None

    def is_on(self, connection: object) -> bool:
        return getattr(self._session, "connection", None) is connection

    async def begin_work(self, realm: str) -> bool:
        try:
            if not await self._session.run("SELECT 1 FROM fenced_claims WHERE guard = ?", (self._guard,)):
                raise Misconfigured(f"claims are not installed on {self._guard}; run install() of its Claims")
            async with self._transaction():
                await self._session.run("UPDATE fenced_guard SET realm = ? WHERE realm IS NULL", (realm,))
        except sqlite3.Error as error:
            raise translate(error) from error
        await self._expect_realm(realm)
        return False

    async def _expect_realm(self, realm: str) -> None:
        rows = await self._session.run("SELECT realm FROM fenced_guard WHERE guard = ?", (self._guard,))
        if rows and rows[0][0] not in (None, realm):
            stamp = Stamp(realm, (f"{self._guard}/workers",), 1, None, "0" * 32)
            raise error_for(Verdict.FOREIGN, name=None, stamp=stamp, table=self._guard, realm=rows[0][0])

    async def claim(self, terms: ClaimTerms, limit: int, where: Mapping[str, object] | None) -> list[Row]:
        assert terms.token is not None
        claiming = self._claiming
        values: list[object] = []
        if where is None:
            ready = (
                f"({claiming.ready}) AND claim_attempts < {claiming.max_attempts} "
                f"AND (claim_at IS NULL OR claim_at <= {_NOW})"
            )
        else:
            ready = _equal(where, values)
        chosen = (
            f"SELECT {self._key} FROM {self._table} WHERE {ready} AND claim_holder IS NULL AND (SELECT realm FROM "
            f"fenced_guard WHERE guard = {literal(self._guard)}) = {literal(terms.realm)} "
            f"ORDER BY {claiming.order} LIMIT {limit:d}"
        )
        sets = [
            f"claim_holder = {literal(terms.holder)}",
            f"claim_token = {terms.token}",
            f"claim_write = {terms.token << WRITE_BITS}",
            "claim_attempts = claim_attempts + 1",
            f"claim_at = {_NOW}",
            *assignments(claiming.taken),
        ]
        update = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._key} "
        if limit == 1:
            rows = await self._alone(f"{update} = ({chosen}) RETURNING *", values)
        else:
            rows = await self._claim_many(chosen, values, update)
        if not rows:
            await self._expect_realm(terms.realm)
        return rows

    async def _claim_many(self, chosen: str, values: Sequence[object], update: str) -> list[Row]:
        """RETURNING has no order, so the keys are read first, under the same lock."""
        try:
            async with self._transaction():
                keys = [key for (key,) in await self._session.run(chosen, values)]
                if not keys:
                    return []
                places = ", ".join("?" * len(keys))
                rows = await self._session.records(f"{update} IN ({places}) RETURNING *", keys)
        except sqlite3.Error as error:
            raise await self._refusal(error, None) from error
        order = {key: place for place, key in enumerate(keys)}
        return sorted(rows, key=lambda row: order[row[self._claiming.key]])

    async def holders(self) -> list[str]:
        rows = await self._session.run(
            f"SELECT DISTINCT claim_holder FROM {self._table} WHERE claim_holder IS NOT NULL"
        )
        return [holder for (holder,) in rows]

    async def give_back(self, over: Sequence[str] | None) -> int:
        """The stamps of the workers that are over exist only while this transaction runs."""
        assert over is not None
        sets = ["claim_holder = NULL", "claim_at = NULL", *given_back(self._claiming)]
        count = 0
        try:
            async with self._transaction():
                for holder in over:
                    await self._session.run(_STAMP, (f"\n~{holder}", self._guard, 0))
                    count += len(
                        await self._session.run(
                            f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._key} IN (SELECT {self._key} FROM "
                            f"{self._table} WHERE claim_holder = ? LIMIT {GIVEN_BACK_AT_ONCE}) RETURNING 1",
                            (holder,),
                        )
                    )
                    await self._session.run("DELETE FROM fenced_stamp WHERE name = ?", (f"\n~{holder}",))
        except sqlite3.Error as error:
            raise translate(error) from error
        return count

    async def write(
        self, row: ClaimedKey, count: int, columns: Mapping[str, object], ends: Ends | None, *, repeat: bool
    ) -> None:
        sets = [f"{_column(name)} = ?" for name in columns]
        if ends is not None:
            sets += ["claim_holder = NULL", *self._ends(ends, columns)]
        number = write_number(row.token, count)
        sets.append("claim_write = ?")  # a parameter: the driver compiles the statement once
        unless = f" AND claim_write < {number}" if repeat else ""
        if ends is not None and ends.held_by is not None:
            unless += f" AND claim_holder = {literal(ends.held_by)}"
        statement = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._key} = ?{unless} RETURNING 1"
        rows = await self._alone(statement, [*columns.values(), number, row.key], row)
        if rows or (ends is not None and ends.held_by is not None):
            return
        found = await self._session.run(
            f"SELECT claim_write FROM {self._table} WHERE {self._key} = ?", (row.key,)
        )
        if repeat and found and found[0][0] == number:
            return
        says = f"{row.name}: token {row.token} is stale: {'another claim has it' if found else 'the row is gone'}"
        raise StaleToken(says, name=row.name)

    def _ends(self, ends: Ends, columns: Mapping[str, object]) -> list[str]:
        if ends.after is None and not ends.dead:
            return ["claim_at = NULL"]
        given = self._claiming.dead if ends.dead else self._claiming.back
        at = "NULL" if ends.dead else f"{_NOW} + {float(ends.after or 0)!r}"
        return [f"claim_at = {at}", *assignments(tuple(one for one in given if one[0] not in columns))]

    async def enter(self, row: ClaimedKey) -> None:
        session = self._session
        if session.in_transaction:
            raise Misuse("this connection is in a transaction already: commit it first")
        try:
            await self._marks.begin(session)
            await self._marks.make_ready(session)
            found = await session.run(
                f"SELECT claim_write FROM {self._table} WHERE {self._key} = ?", (row.key,)
            )
            seen = found[0][0] if found else None
            if seen is None or seen >> WRITE_BITS != row.token or seen & ((1 << WRITE_BITS) - 1) >= CLOSED:
                await session.rollback()
                verdict = (
                    Verdict.OUT_OF_ORDER
                    if seen is not None and seen >> WRITE_BITS == row.token
                    else Verdict.STALE
                )
                raise await self._refused(verdict, row)
            await session.run(_STAMP, (f"\n@{row.name}", self._guard, row.token))
        except sqlite3.Error as error:
            await session.rollback()
            raise translate(error) from error
        except BaseException:
            await session.rollback()
            raise
        self._entered = row

    async def leave(self, error: BaseException | None) -> None:
        row, session = self._entered, self._session
        assert row is not None
        if error is None:
            try:
                cleared = session.in_transaction and await session.run(
                    "DELETE FROM fenced_stamp WHERE name = ? RETURNING 1", (f"\n@{row.name}",)
                )
                if not cleared:
                    raise Misuse(
                        "the transaction was ended inside the block; let the block commit or roll back"
                    )
                await session.run("COMMIT")
            except sqlite3.Error as failed:
                await session.rollback()
                if isinstance(failed, sqlite3.IntegrityError):
                    raise  # a deferred constraint of the program's own tables
                raise translate(failed) from failed
            except BaseException:
                await session.rollback()
                raise
            return
        await session.rollback()
        if isinstance(error, sqlite3.Error) and (found := verdict_in(error)) is not None:
            raise await self._refused(found[0], row, found[2]) from error

    async def revoke(self, key: object) -> bool:
        sets = [
            "claim_holder = NULL",
            "claim_at = NULL",
            *given_back(self._claiming),
            f"claim_write = {_CLOSED}",
        ]
        which = f"{self._key} = ? AND claim_holder IS NOT NULL"
        statement = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {which} RETURNING 1"
        return bool(await self._alone(statement, [key]))

    async def revive(self, where: Mapping[str, object]) -> int:
        values: list[object] = []
        sets = [
            "claim_attempts = 0",
            "claim_at = NULL",
            *assignments(self._claiming.back),
            f"claim_write = {_CLOSED}",
        ]
        chosen = f" AND {_equal(where, values)}" if where else ""
        statement = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._is_dead()}{chosen} RETURNING 1"
        return len(await self._alone(statement, values))

    def _is_dead(self) -> str:
        claiming = self._claiming
        looks = " AND ".join(assignments(claiming.dead)).replace("= NULL", "IS NULL") or f"({claiming.ready})"
        return f"claim_holder IS NULL AND claim_attempts >= {claiming.max_attempts} AND {looks}"

    async def status(self, limit: int) -> WorkStatus:
        claiming = self._claiming
        ready = f"claim_holder IS NULL AND ({claiming.ready}) AND claim_attempts < {claiming.max_attempts}"
        due = f"(claim_at IS NULL OR claim_at <= {_NOW})"
        try:
            ((now, later, held, dead),) = await self._session.run(
                f"SELECT count(*) FILTER (WHERE {ready} AND {due}), count(*) FILTER (WHERE {ready} AND NOT {due}), "
                f"count(*) FILTER (WHERE claim_holder IS NOT NULL), count(*) FILTER (WHERE {self._is_dead()}) "
                f"FROM {self._table}"
            )
            oldest = await self._session.records(
                f"SELECT * FROM {self._table} WHERE {ready} AND {due} ORDER BY {claiming.order} LIMIT 1"
            )
            rows = await self._session.records(
                f"SELECT * FROM {self._table} WHERE claim_holder IS NOT NULL ORDER BY claim_at LIMIT {limit:d}"
            )
        except sqlite3.Error as error:
            raise translate(error) from error
        claims = [
            ClaimView(
                self.name_of(row),
                row["claim_holder"],
                datetime.fromtimestamp(row["claim_at"], UTC),
                row["claim_attempts"],
            )
            for row in rows
        ]
        name = self.name_of(oldest[0]) if oldest else None
        return WorkStatus(self._guard, now, later, held, dead, name, tuple(claims))

    def name_of(self, row: Mapping[str, Any]) -> str:
        return self._spec.name_for(**{column: row[column] for column in self._spec.columns})

    async def wait_for_rows(self, seconds: float) -> bool | None:
        return None  # SQLite notifies nobody

    async def _alone(
        self, statement: str, values: Sequence[object], row: ClaimedKey | None = None
    ) -> list[Row]:
        """One statement: a transaction of its own, or a part of the program's."""
        joins = self._session.in_transaction
        try:
            rows = await self._session.records(statement, values)
            if not joins and self._session.in_transaction:  # the driver has begun one implicitly
                await self._session.commit(())
            return rows
        except sqlite3.Error as error:
            if not joins:
                await self._session.rollback()
            raise await self._refusal(error, row) from error

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        joins = self._session.in_transaction
        try:
            if not joins:
                await self._session.run("BEGIN IMMEDIATE")
            yield
            if not joins:
                await self._session.run("COMMIT")
        except BaseException:
            if not joins:
                await self._session.rollback()
            raise

    async def _refusal(self, error: sqlite3.Error, row: ClaimedKey | None) -> FencedError:
        found = verdict_in(error)
        if found is None:
            return translate(error)
        if row is None:
            return error_for(found[0], name=found[2], table=self._guard)
        return await self._refused(found[0], row, found[2])

    async def _refused(self, verdict: Verdict, row: ClaimedKey, written: str | None = None) -> FencedError:
        """The typed error, with what the row says now; recorded, unless the program's transaction is open.

        `written`: the name of the row that was written, if the trigger told it. It may be another one.
        """
        name = written or row.name
        stamp = Stamp(row.realm, (row.name,), row.token, None, claim_grant(row.realm, row.token, row.name))
        look = f"SELECT claim_write FROM {self._table} WHERE {self._key} = ?"
        found = await self._session.run(look, (row.key,))
        seen = found[0][0] if found and name == row.name else None
        mark = Mark(seen >> WRITE_BITS, "", seen & ((1 << WRITE_BITS) - 1)) if seen is not None else None
        says = _REVOKED if verdict is Verdict.OUT_OF_ORDER else None
        refused = error_for(verdict, name=name, stamp=stamp, mark=mark, table=self._guard, says=says)
        if not self._session.in_transaction:
            modes = await self._session.run(
                "SELECT pattern, mode FROM fenced_mode WHERE guard = ?", (self._guard,)
            )
            mode = mode_of(name, [(pattern, Mode.parse(text)) for pattern, text in modes])
            decision = Decision.about(
                datetime.now(UTC), self._guard, name, stamp, mark, verdict, Ruling.REFUSE, str(mode)
            )
            await self._marks.record_late(self._session, refused, decision)
        return refused


_CLOSED = f"max(claim_write, (claim_token << {WRITE_BITS}) + {CLOSED}) + 1"


def _column(name: str) -> str:
    if name.startswith("claim_"):
        raise Misuse(f"{name} is a column of the guard")
    return f'"{check_identifier(name, "a column")}"'


def _equal(where: Mapping[str, object], values: list[object]) -> str:
    values.extend(where.values())
    return " AND ".join(f"{_column(name)} = ?" for name in where) or "1"
