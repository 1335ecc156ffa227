"""Claims on a table of MariaDB or MySQL, over one of the program's connections, for all drivers.

There is no UPDATE ... RETURNING, so a claim is a transaction: it locks the rows that nobody has locked, and then writes
them. A write of the claimant is one statement, which carries its stamp in the row. Nothing is kept in the session but
what `enter` announces, until `leave`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC
from functools import lru_cache
from typing import Any, TypeVar

from fenced.errors import Contended, Indeterminate, Misuse, OutOfOrder, StaleToken, Unavailable
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
from fenced.guards.spec import Spec, check_identifier
from fenced.stores.mariadb.guard import schema
from fenced.stores.mariadb.guard.claiming import assignments, given_back, order_of
from fenced.stores.mariadb.guard.refusals import interferes, wrapped
from fenced.stores.mariadb.guard.sessions import MariadbSession
from fenced.stores.mariadb.guard.tables import REPEATS, MariadbTable
from fenced.stores.mariadb.wire.connection import literal

T = TypeVar("T")
Work = Callable[[MariadbSession], Awaitable[T]]
_NOW = "UTC_TIMESTAMP(6)"
_CLOSED = f"GREATEST(claim_write, claim_token * {1 << WRITE_BITS} + {CLOSED}) + 1"
"""The next number of an operator's write under the row's own token."""
_REVOKED = "a later write under the same claim was applied before, or an operator has revoked the claim"


class MariadbClaims:
    """The operations of claims on one table. The database decides about every one of them."""

    def __init__(self, spec: Spec, table: MariadbTable, session: MariadbSession) -> None:
        assert spec.claims is not None
        self._claiming: Claiming = spec.claims
        self._spec = spec
        named, _, plain = spec.table.rpartition(".")
        self._guard = f"{literal(named) if named else 'DATABASE()'}, '{plain}'"
        self._table = f"`{named}`.`{plain}`" if named else f"`{plain}`"
        self._key = f"`{spec.claims.key}`"
        self._at = table
        self._session = session

    def is_on(self, connection: object) -> bool:
        return getattr(self._session, "connection", None) is connection

    async def begin_work(self, realm: str) -> bool:
        call = f"CALL fenced_guard.begin_work({self._guard}, {literal(realm)})"
        await self._part(lambda session: session.run(call))
        return False

    async def claim(self, terms: ClaimTerms, limit: int, where: Mapping[str, object] | None) -> list[Row]:
        assert terms.token is not None
        claiming, values = self._claiming, list((where or {}).values())
        due = f"claim_attempts < {claiming.max_attempts} AND (claim_at IS NULL OR claim_at <= {_NOW})"
        ready = f"claim_busy = 0 AND {due}" if where is None else f"claim_holder IS NULL AND {_equal(where)}"
        chosen = (
            f"SELECT {self._key} FROM {self._table} WHERE {ready} ORDER BY {order_of(claiming)} LIMIT {limit:d} "
            "FOR UPDATE SKIP LOCKED"
        )
        sets = [
            f"claim_holder = '{terms.realm}:{terms.holder}'",
            f"claim_token = {terms.token}",
            *map(_escaped, assignments(claiming.taken)),
        ]
        mine = f"claim_holder = '{terms.holder}' AND claim_write = {terms.token << WRITE_BITS}"

        async def work(session: MariadbSession) -> list[Row]:
            keys = [key for (key,) in await session.run(chosen, values)]
            if not keys:
                return []
            some = f"{self._key} IN ({', '.join(['%s'] * len(keys))})"
            # The rows are locked, and nobody has them: the second condition is for a connection that commits each
            # statement although it calls that a transaction.
            await session.change(
                f"UPDATE {self._table} SET {', '.join(sets)} WHERE {some} AND claim_holder IS NULL", keys
            )
            rows = await session.records(f"SELECT * FROM {self._table} WHERE {some} AND {mine}", keys)
            order = {key: place for place, key in enumerate(keys)}
            return sorted(rows, key=lambda row: order[row[claiming.key]])

        return await self._part(work, begins=True)

    async def holders(self) -> list[str]:
        look = f"SELECT DISTINCT claim_holder FROM {self._table} WHERE claim_holder IS NOT NULL"
        return [holder for (holder,) in await self._part(lambda session: session.run(look))]

    async def give_back(self, over: Sequence[str] | None) -> int:
        """A row that its worker is writing at this moment is locked, and skipped."""
        assert over is not None
        chosen = (
            f"SELECT {self._key} FROM {self._table} WHERE claim_holder IN ({', '.join(map(literal, over))}) "
            f"LIMIT {GIVEN_BACK_AT_ONCE} FOR UPDATE SKIP LOCKED"
        )
        sets = [
            "claim_holder = CONCAT('~', claim_holder)",
            "claim_at = NULL",
            *map(_escaped, given_back(self._claiming)),
        ]

        async def work(session: MariadbSession) -> int:
            keys = [key for (key,) in await session.run(chosen)]
            if not keys:
                return 0
            some = f"{self._key} IN ({', '.join(['%s'] * len(keys))})"
            update = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {some} AND claim_holder IS NOT NULL"
            return await session.change(update, keys)

        return await self._part(work, begins=True)

    async def write(
        self, row: ClaimedKey, count: int, columns: Mapping[str, object], ends: Ends | None, *, repeat: bool
    ) -> None:
        sets = [f"{_column(name)} = %s" for name in columns]
        if ends is not None:
            sets += ["claim_holder = NULL", *self._ends(ends, columns)]
        number = write_number(row.token, count)
        sets.append(f"claim_write = {number}")
        # A repeat must not be applied again: then the row carries the same number, and nothing matches.
        unless = f" AND claim_write < {number}" if repeat else ""
        held = ends is not None and ends.held_by is not None
        if ends is not None and ends.held_by is not None:
            unless += f" AND claim_holder = {literal(ends.held_by)}"
        update = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {self._key} = %s{unless}"
        values = [*columns.values(), row.key]

        async def work(session: MariadbSession) -> list[tuple[Any, ...]] | None:
            if await session.change(update, values) or held:
                return None
            return await session.run(self._look("LOCK IN SHARE MODE"), [row.key])

        joins = await self._joins()
        try:
            seen = await self._part(work, joins=joins)
        except OutOfOrder as error:
            raise _revoked(error) from error.__cause__
        except Unavailable as error:
            if joins:
                raise
            # One statement commits with its answer: if that is lost, nobody knows whether it was applied.
            raise Indeterminate(f"{error}; call the same method again") from error
        if seen is not None:
            _settle(row, number, seen, repeat=repeat)

    def _look(self, lock: str) -> str:
        return f"SELECT claim_write FROM {self._table} WHERE {self._key} = %s {lock}"

    def _ends(self, ends: Ends, columns: Mapping[str, object]) -> list[str]:
        if ends.after is None and not ends.dead:
            return ["claim_at = NULL"]
        given = self._claiming.dead if ends.dead else self._claiming.back
        at = "NULL" if ends.dead else f"{_NOW} + INTERVAL {float(ends.after or 0):.6f} SECOND"
        own = tuple(one for one in given if one[0] not in columns)
        return [f"claim_at = {at}", *map(_escaped, assignments(own))]

    async def enter(self, row: ClaimedKey) -> None:
        self._at.expect_idle()
        name = literal(row.name)
        try:
            await self._at.begin(f"CALL fenced_guard.enter_claim({self._guard}, {name}, {row.token})")
            # The lock keeps the row as it is until this transaction ends.
            found = await self._session.run(self._look("FOR UPDATE"), [row.key])
            seen = found[0][0] if found else None
            if seen is None or seen >> WRITE_BITS != row.token or seen & ((1 << WRITE_BITS) - 1) >= CLOSED:
                token = "NULL" if seen is None else str(seen >> WRITE_BITS)
                numbers = f"{token}, {'NULL' if seen is None else seen}, {row.token << WRITE_BITS}"
                await self._session.run(
                    f"CALL fenced_guard.rule_on_write({self._guard}, {name}, FALSE, {numbers})"
                )
        except BaseException as error:
            try:
                answer = await self._at.undo(error)
            except OutOfOrder as refused:
                raise _revoked(refused) from error
            if isinstance(error, Exception):
                raise wrapped(error, answer) from error
            raise

    async def leave(self, error: BaseException | None) -> None:
        await self._at.leave(error)

    async def revoke(self, key: object) -> bool:
        sets = [
            "claim_holder = NULL",
            "claim_at = NULL",
            *map(_escaped, given_back(self._claiming)),
            f"claim_write = {_CLOSED}",
        ]
        which = f"{self._key} = %s AND claim_holder IS NOT NULL"
        update = f"UPDATE {self._table} SET {', '.join(sets)} WHERE {which}"
        return bool(await self._part(lambda session: session.change(update, [key])))

    async def revive(self, where: Mapping[str, object]) -> int:
        sets = ["claim_at = NULL", *assignments(self._claiming.back), f"claim_write = {_CLOSED}"]
        # Assigned from left to right: the attempts come last.
        found = f"{', '.join(sets)}, claim_attempts = 0 WHERE {self._is_dead()}"
        update = f"UPDATE {self._table} SET {_escaped(found) if where else found} AND {_equal(where)}"
        return await self._part(lambda session: session.change(update, [*where.values()]))

    def _is_dead(self) -> str:
        """Which rows are dead letters: their attempts are used up, and they look as `dead` leaves them."""
        claiming = self._claiming
        looks = " AND ".join(assignments(claiming.dead)).replace("= NULL", "IS NULL") or f"({claiming.ready})"
        return f"claim_holder IS NULL AND claim_attempts >= {claiming.max_attempts} AND {looks}"

    async def status(self, limit: int) -> WorkStatus:
        return await self._part(lambda session: self._status(session, limit))

    async def _status(self, session: MariadbSession, limit: int) -> WorkStatus:
        ready = f"claim_busy = 0 AND claim_attempts < {self._claiming.max_attempts}"
        due = f"(claim_at IS NULL OR claim_at <= {_NOW})"
        counted = (
            f"{ready} AND {due}",
            f"{ready} AND NOT {due}",
            "claim_holder IS NOT NULL",
            self._is_dead(),
        )
        sums = ", ".join(f"COALESCE(SUM({condition}), 0)" for condition in counted)
        ((now, later, held, dead),) = await session.run(f"SELECT {sums} FROM {self._table}")
        oldest = await session.records(
            f"SELECT * FROM {self._table} WHERE {ready} AND {due} ORDER BY {order_of(self._claiming)} LIMIT 1"
        )
        rows = await session.records(
            f"SELECT * FROM {self._table} WHERE claim_holder IS NOT NULL ORDER BY claim_at LIMIT {limit:d}"
        )
        claims = [
            ClaimView(
                self.name_of(row),
                row["claim_holder"],
                row["claim_at"].replace(tzinfo=UTC),
                row["claim_attempts"],
            )
            for row in rows
        ]
        name = self.name_of(oldest[0]) if oldest else None
        return WorkStatus(self._spec.table, int(now), int(later), int(held), int(dead), name, tuple(claims))

    def name_of(self, row: Mapping[str, Any]) -> str:
        return self._spec.name_for(**{column: row[column] for column in self._spec.columns})

    async def wait_for_rows(self, seconds: float) -> bool | None:
        return None  # these servers notify nobody

    async def _joins(self) -> bool:
        """Whether the program has a transaction on its connection."""
        state = self._session.state()
        return state == "open" or (state == "unknown" and await schema.is_open(self._session))

    async def _part(self, work: Work[T], *, begins: bool = False, joins: bool | None = None) -> T:
        """Run statements of ours: in the program's transaction if there is one, and else in one of their own.

        Inside of the program's transaction nothing records a refusal: the program rolls back, or `leave` does.
        """
        if not (await self._joins() if joins is None else joins):
            return await self._session.together(lambda plain: self._alone(plain, work, begins))
        try:
            return await work(self._session)
        except Exception as error:
            raise await self._at.refusal_within(error) from error

    async def _alone(self, plain: MariadbSession, work: Work[T], begins: bool) -> T:
        """A deadlock's victim is repeated: nothing of it was applied."""
        table = MariadbTable(self._spec, plain)
        for _ in range(REPEATS):
            try:
                if begins:
                    await plain.run("START TRANSACTION")
                found = await work(plain)
                if begins or plain.state() != "idle":  # the driver may have begun one implicitly
                    await plain.run("COMMIT")
                return found
            except BaseException as error:
                answer = await table.undo(error)
                if not isinstance(error, Exception):
                    raise
                if not interferes(answer):
                    raise wrapped(error, answer) from error
                last = error
        raise Contended(f"newer commits interfered {REPEATS} times; try again: {last}") from last


def _settle(row: ClaimedKey, number: int, found: Sequence[Sequence[int]], *, repeat: bool) -> None:
    """After a write that has changed nothing. StaleToken unless it was applied before, or a mode lets it through."""
    seen = found[0][0] if found else None
    if seen is not None and (seen == number or not repeat):
        return
    says = "the row is gone"
    if seen is not None:
        says = f"{seen >> WRITE_BITS} has been seen; whether the write was applied before that is not known"
    mark = None if seen is None else seen >> WRITE_BITS
    raise StaleToken(f"{row.name}: token {row.token} is stale: {says}", name=row.name, mark=mark)


def _revoked(refused: OutOfOrder) -> OutOfOrder:
    return OutOfOrder(
        f"{refused.name}: {_REVOKED}",
        name=refused.name,
        stamp=refused.stamp,
        mark=refused.mark,
        holder=refused.holder,
    )


def _escaped(sql: str) -> str:
    """For a statement with parameters."""
    return sql.replace("%", "%%")


def _equal(where: Mapping[str, object]) -> str:
    return " AND ".join(f"{_column(name)} = %s" for name in where) or "TRUE"


@lru_cache(maxsize=256)
def _column(name: str) -> str:
    if name.startswith("claim_"):
        raise Misuse(f"{name} is a column of the guard")
    return f"`{check_identifier(name, 'a column')}`"
