"""Claims on a PostgreSQL table, over one of the program's connections, for all drivers.

Every operation is one statement without session state, so it works through a pooler in transaction mode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar
from uuid import UUID

from fenced.errors import Indeterminate, Misuse, StaleToken, Unavailable, shown
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
    write_number,
)
from fenced.guards.spec import Spec, check_identifier, literal
from fenced.stores.postgresql.guard.claiming import assignments, given_back
from fenced.stores.postgresql.guard.refusals import read
from fenced.stores.postgresql.guard.sessions import PostgresqlSession
from fenced.stores.postgresql.guard.tables import PostgresqlTable, is_open, text_literal, wrapped
from fenced.stores.postgresql.guard.triggers import guard_of, quoted

T = TypeVar("T")
CHANNEL = "fenced_work"
IDLE_SECONDS = 60.0
"""How long INSERTs notify after a worker has begun to wait."""
_HOLDERS = """WITH RECURSIVE h AS (
  (SELECT claim_holder FROM {table} WHERE claim_holder IS NOT NULL ORDER BY 1 LIMIT 1)
  UNION ALL SELECT (SELECT claim_holder FROM {table} WHERE claim_holder > h.claim_holder ORDER BY 1 LIMIT 1)
  FROM h WHERE h.claim_holder IS NOT NULL
) SELECT claim_holder FROM h WHERE claim_holder IS NOT NULL"""


class PostgresqlClaims:
    """The operations of claims on one table. The database decides about every one of them."""

    def __init__(self, spec: Spec, table: PostgresqlTable, session: PostgresqlSession) -> None:
        assert spec.claims is not None
        self._claiming: Claiming = spec.claims
        self._guard = guard_of(spec)
        self._table = quoted(self._guard)
        self._key = f'"{spec.claims.key}"'
        self._spec = spec
        self._at = table
        self._session = session
        self._made: tuple[ClaimTerms, int, str] | None = None

    def is_on(self, connection: object) -> bool:
        return getattr(self._session, "connection", None) is connection

    async def begin_work(self, realm: str) -> bool:
        call = f"SELECT fenced_guard.begin_work({literal(self._guard)}, {literal(realm)})"
        ((minted,),) = await self._part(lambda: self._session.run(call))
        return bool(minted)

    async def claim(self, terms: ClaimTerms, limit: int, where: Mapping[str, object] | None) -> list[Row]:
        values = _Values(self._session)
        if where is not None:
            statement = self._claim(terms, limit, where, values)
        elif (made := self._made) is not None and made[:2] == (terms, limit):
            statement = made[2]  # a worker sends the same one again and again
        else:
            statement = self._claim(terms, limit, None, values)
            self._made = (terms, limit, statement)
        return await self._part(lambda: self._session.records(statement, values.found))

    def _claim(
        self, terms: ClaimTerms, limit: int, where: Mapping[str, object] | None, values: _Values
    ) -> str:
        """One statement, with a literal LIMIT and `= ANY (ARRAY(...))`: with a parameter the server plans it each
        time, and IN becomes a join over the whole table."""
        claiming = self._claiming
        if where is None:
            ready = (
                f"({claiming.ready}) AND claim_attempts < {claiming.max_attempts} "
                "AND (claim_at IS NULL OR claim_at <= statement_timestamp())"
            )
        else:
            ready = values.equal(where)
        sets = [f"claim_holder = '{UUID(terms.holder)}'", *assignments(claiming.taken)]
        if terms.token is not None:
            sets.append(f"claim_token = {terms.token}")
            ready += f" AND fenced_guard.check_worker({literal(terms.realm)})"
        chosen = (
            f"SELECT {self._key} FROM {self._table} WHERE {ready} AND claim_holder IS NULL "
            f"ORDER BY {claiming.order} LIMIT {limit:d} FOR NO KEY UPDATE SKIP LOCKED"
        )
        found = "= ANY (ARRAY(" + chosen + "))" if limit > 1 else f"= ({chosen})"
        update = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._key} {found} RETURNING *"
        if limit == 1:
            return update
        return f"WITH claimed AS ({update}) SELECT * FROM claimed ORDER BY {claiming.order}"

    async def holders(self) -> list[str]:
        rows = await self._part(lambda: self._session.run(_HOLDERS.format(table=self._table)))
        return [UUID(str(holder)).hex for (holder,) in rows]

    async def give_back(self, over: Sequence[str] | None) -> int:
        """One statement: it finds the workers, asks about their leases and clears their rows, each under its lock."""
        if over is None:
            holders = f"ARRAY({_HOLDERS.format(table=self._table)})"
        else:
            holders = "ARRAY[" + ", ".join(f"'{UUID(holder)}'" for holder in over) + "]::uuid[]"
        dead = f"(SELECT fenced_guard.over_workers({literal(self._guard)}, {holders}))::uuid[]"
        sets = ["claim_holder = NULL", "claim_at = NULL", *given_back(self._claiming)]
        statement = (
            f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._key} = ANY (ARRAY(SELECT {self._key} "
            f"FROM {self._table} WHERE claim_holder = ANY ({dead}) LIMIT {GIVEN_BACK_AT_ONCE} "
            "FOR NO KEY UPDATE SKIP LOCKED)) RETURNING 1"
        )
        return len(await self._part(lambda: self._session.run(statement)))

    async def write(
        self, row: ClaimedKey, count: int, columns: Mapping[str, object], ends: Ends | None, *, repeat: bool
    ) -> None:
        values = _Values(self._session)
        sets = [f"{_column(name)} = {values.add(value)}" for name, value in columns.items()]
        if ends is not None:
            sets += ["claim_holder = NULL", *self._ends(ends, columns)]
        number = write_number(row.token, count)
        # A parameter: the driver prepares the statement once.
        sets.append(f"claim_write = {values.add(number)}")
        # A repeat must not be applied again: then the row carries the same number, and nothing matches.
        unless = f" AND claim_write < {number}" if repeat else ""
        if ends is not None and ends.held_by is not None:
            unless += f" AND claim_holder = '{UUID(ends.held_by)}'"
        alone = self._session.state() == "idle"
        statement = (
            f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._key} = {values.add(row.key)}{unless} "
            "RETURNING 1"
        )
        try:
            rows = await self._part(lambda: self._session.run(statement, values.found))
        except Unavailable as error:
            if not alone:
                raise
            # One statement commits with its answer: if that is lost, nobody knows whether it was applied.
            raise Indeterminate(f"{error}; call the same method again") from error
        if rows or (ends is not None and ends.held_by is not None):
            return
        if not (repeat and await self._has(row, number)):
            raise StaleToken(f"{row.name}: token {row.token} is stale: the row is gone", name=row.name)

    def _ends(self, ends: Ends, columns: Mapping[str, object]) -> list[str]:
        if ends.after is None and not ends.dead:
            return ["claim_at = NULL"]
        given = self._claiming.dead if ends.dead else self._claiming.back
        after = f"clock_timestamp() + {float(ends.after or 0)!r} * interval '1 s'"
        at = "NULL" if ends.dead else after
        return [f"claim_at = {at}", *assignments(tuple(one for one in given if one[0] not in columns))]

    async def _has(self, row: ClaimedKey, number: int) -> bool:
        """Whether this write was applied. StaleToken if a later claim has the row."""
        look = f"SELECT claim_write FROM {self._table} WHERE {self._key} = {self._session.place(1)}"
        rows = await self._part(lambda: self._session.run(look, [row.key]))
        if rows and rows[0][0] == number:
            return True
        seen = rows[0][0] >> WRITE_BITS if rows else None
        if seen is not None and seen != row.token:
            says = (
                f"{row.name}: token {row.token} is stale: {seen} has been seen; whether the write was applied before "
                "that is not known"
            )
            raise StaleToken(says, name=row.name, mark=seen)
        return False

    async def enter(self, row: ClaimedKey) -> None:
        key = _key_literal(row.key)
        await self._begin(
            f"SELECT fenced_guard.announce_claim({literal(self._guard)}, {text_literal(row.name)}, '{row.realm}', "
            f"{row.token}, (SELECT claim_write FROM {self._table} WHERE {self._key} = {key} FOR NO KEY UPDATE))"
        )

    async def leave(self, error: BaseException | None) -> None:
        await self._at.leave(error)

    async def revoke(self, key: object) -> bool:
        values = _Values(self._session)
        sets = [
            "claim_holder = NULL",
            "claim_at = NULL",
            *given_back(self._claiming),
            f"claim_write = {_closed()}",
        ]
        statement = (
            f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._key} = {values.add(key)} "
            "AND claim_holder IS NOT NULL RETURNING 1"
        )
        return bool(await self._part(lambda: self._session.run(statement, values.found)))

    async def revive(self, where: Mapping[str, object]) -> int:
        values = _Values(self._session)
        sets = [
            "claim_attempts = 0",
            "claim_at = NULL",
            *assignments(self._claiming.back),
            f"claim_write = {_closed()}",
        ]
        chosen = f" AND {values.equal(where)}" if where else ""
        statement = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._is_dead()}{chosen} RETURNING 1"
        return len(await self._part(lambda: self._session.run(statement, values.found)))

    def _is_dead(self) -> str:
        """Which rows are dead letters: their attempts are used up, and they look as `dead` leaves them."""
        claiming = self._claiming
        looks = " AND ".join(assignments(claiming.dead)).replace("= NULL", "IS NULL") or f"({claiming.ready})"
        return f"claim_holder IS NULL AND claim_attempts >= {claiming.max_attempts} AND {looks}"

    async def status(self, limit: int) -> WorkStatus:
        return await self._part(lambda: self._status(limit))

    async def _status(self, limit: int) -> WorkStatus:
        claiming = self._claiming
        ready = f"claim_holder IS NULL AND ({claiming.ready}) AND claim_attempts < {claiming.max_attempts}"
        due = "(claim_at IS NULL OR claim_at <= clock_timestamp())"
        ((now, later, held, dead, minted),) = await self._session.run(
            f"SELECT count(*) FILTER (WHERE {ready} AND {due}), count(*) FILTER (WHERE {ready} AND NOT {due}), "
            f"count(*) FILTER (WHERE claim_holder IS NOT NULL), count(*) FILTER (WHERE {self._is_dead()}), "
            f"to_regclass('fenced.attempt') IS NOT NULL FROM {self._table}"
        )
        oldest = await self._session.records(
            f"SELECT * FROM {self._table} WHERE {ready} AND {due} ORDER BY {claiming.order} LIMIT 1"
        )
        who = "(SELECT holder FROM fenced.attempt a WHERE a.id = claim_holder)" if minted else "NULL::text"
        try:
            rows = await self._session.records(self._claims(who, limit))
        except Exception:  # noqa: BLE001 - this role may not read the authority's table
            rows = []
        claims = [
            ClaimView(
                self.name_of(row),
                UUID(str(row["claim_holder"])).hex,
                row["claim_at"],
                row["claim_attempts"],
                row["fenced_who"],
            )
            for row in rows
        ]
        return WorkStatus(
            self._guard, now, later, held, dead, self.name_of(oldest[0]) if oldest else None, tuple(claims)
        )

    def _claims(self, who: str, limit: int) -> str:
        return (
            f"SELECT *, {who} AS fenced_who FROM {self._table} WHERE claim_holder IS NOT NULL "
            f"ORDER BY claim_at LIMIT {limit:d}"
        )

    def name_of(self, row: Mapping[str, Any]) -> str:
        return self._spec.name_for(**{column: row[column] for column in self._spec.columns})

    async def wait_for_rows(self, seconds: float) -> bool | None:
        """INSERTs notify only while a worker waits, so each says from time to time that it does."""
        if self._session.state() != "idle":
            return None
        call = f"SELECT fenced_guard.idle_until({literal(self._guard)}, {IDLE_SECONDS + seconds})"
        await self._part(lambda: self._session.run(call))
        return await self._session.notified(CHANNEL, self._guard, seconds)

    async def _begin(self, first: str) -> None:
        """Begin a transaction with this statement of ours, which announces."""
        self._at.expect_idle()
        try:
            await self._session.begin(first)
        except BaseException as error:
            answer = await self._at.undo(error)
            if isinstance(error, Exception):
                raise wrapped(error, answer) from error
            raise

    async def _part(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run statements of ours: in the program's transaction if there is one, and else in one of their own.

        Outside of the program's transaction a refusal is recorded. Inside, the program rolls back, or `leave` does.
        """
        joins = is_open(self._session)
        try:
            found = await work()
            if not joins and self._session.state() == "open":  # the driver has begun one implicitly
                await self._session.commit()
            return found
        except BaseException as error:
            answer = read(error) if joins else await self._at.undo(error)
            if isinstance(error, Exception):
                raise wrapped(error, answer) from error
            raise


class _Values:
    """The parameters of a statement, as the driver wants them."""

    def __init__(self, session: PostgresqlSession) -> None:
        self._session = session
        self.found: list[object] = []

    def add(self, value: object) -> str:
        self.found.append(value)
        return self._session.place(len(self.found))

    def equal(self, where: Mapping[str, object]) -> str:
        return " AND ".join(f"{_column(name)} = {self.add(value)}" for name, value in where.items()) or "true"


@lru_cache(maxsize=256)
def _column(name: str) -> str:
    if name.startswith("claim_"):
        raise Misuse(f"{name} is a column of the guard")
    return f'"{check_identifier(name, "a column")}"'


def _closed() -> str:
    """The next number of an operator's write under the row's own token."""
    return f"greatest(claim_write, (claim_token << {WRITE_BITS}) + {CLOSED}) + 1"


def _key_literal(key: object) -> str:
    if isinstance(key, bool) or not isinstance(key, int | str | UUID):
        raise Misuse(f"the key of a claimed row is an int, a str or a UUID, not {shown(key)}")
    return str(key) if isinstance(key, int) else text_literal(str(key))
