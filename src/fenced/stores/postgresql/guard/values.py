"""Named values in a guarded PostgreSQL table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import psycopg

from fenced.errors import Conflict, Contended, FencedError, Misuse, redacted, shown
from fenced.guards.answers import expect_rule
from fenced.guards.spec import Spec
from fenced.guards.tablevalues import TableValues
from fenced.runtime.blocking import step
from fenced.stores.postgresql.guard import schema
from fenced.stores.postgresql.guard.install import OWN_TABLE
from fenced.stores.postgresql.guard.operator import PostgresqlOperator
from fenced.stores.postgresql.guard.refusals import LOCK_TIMEOUT, sqlstate_of, typed
from fenced.stores.postgresql.guard.sessions import AsyncPsycopgSession, PsycopgSession
from fenced.stores.postgresql.guard.tables import PostgresqlTable
from fenced.values.contracts import (
    ANNOUNCES_SEPARATELY,
    MANY_NAMES,
    PROOFS,
    SEVERAL_LEASES,
    STILL_HELD,
    Operator,
    Runtime,
    Trait,
)
from fenced.values.decision import Rule
from fenced.values.model import Credential

if TYPE_CHECKING:
    from psycopg import IsolationLevel

T = TypeVar("T")

TRIES = 50
"""How often an operation is tried that conflicts with another one on the same rows."""
_MISS = f"SELECT fenced_guard.decide('{OWN_TABLE}', %s)"
_INSTALLED = "SELECT rule, mandatory FROM fenced_guard.guard WHERE guard = %s"
_HIGHEST = (
    "SELECT greatest((SELECT max(token) FROM fenced_guard.mark), (SELECT floor FROM fenced_guard.trust))"
)


class PostgresqlValues(TableValues[PsycopgSession]):
    """Values under names in one PostgreSQL table."""

    traits: tuple[Trait, ...] = (
        Trait("durable-marks", "Marks and values are committed together, as durably as the server commits."),
        Trait("mandatory", "Triggers decide every write to the table, also one typed into psql."),
        MANY_NAMES,
        SEVERAL_LEASES,
        PROOFS,
        STILL_HELD,
        ANNOUNCES_SEPARATELY,
        Trait(
            "bounded-pause",
            "A successor that has waited five seconds for a transaction of an older token makes the server end it; "
            "if the guard's owner may not do that, `Contended` names it.",
        ),
        Trait(
            "prepared-blocks",
            "A prepared transaction keeps its marks locked until it is committed or rolled back.",
        ),
        Trait(
            "refusals-counted", "Every refusal is counted, even if it is never reported; the count survives."
        ),
        Trait(
            "shell-unrecorded",
            "Only our wrapper records a refusal in full; a refusal elsewhere is counted, and in the server's log.",
        ),
        Trait(
            "owner-bypass",
            "A role that owns the table, or may create or disable triggers, can bypass the guard; without proofs so "
            "can a role that writes its setting by hand.",
        ),
    )
    TABLE = OWN_TABLE
    READ = f"SELECT value, version FROM {OWN_TABLE} WHERE name = %s"
    WRITE = f"""
    INSERT INTO {OWN_TABLE} AS v (name, value, is_bytes, version) VALUES (%s, %s, true, 1)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value, version = v.version + 1
    RETURNING version"""
    MODES = "SELECT pattern, mode FROM fenced_guard.mode WHERE guard = %s"
    ERRORS = psycopg.Error

    def __init__(
        self,
        url: str,
        runtime: Runtime,
        *,
        rule: Rule | None = None,
        mode: str = "enforce",
        mandatory: bool = True,
        isolation: IsolationLevel | None = None,
    ) -> None:
        super().__init__(str(redacted(url)), runtime, rule=rule, mode=mode, mandatory=mandatory)
        if isolation is None:
            self.traits = tuple(trait for trait in self.traits if trait is not ANNOUNCES_SEPARATELY)
        self._address = url
        self._isolation = isolation

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> PostgresqlValues:
        try:
            psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise Misuse(f"{shown(redacted(url))}: {error}") from error
        return cls(url, runtime)

    async def _open(self, session: PsycopgSession) -> None:
        found = await schema.look(session)
        there = await session.run(_INSTALLED, (OWN_TABLE,)) if found else []
        if not found or not there:
            await self._table(session).install(self._mode)
            return
        rule, mandatory = there[0]
        expect_rule(self.url, rule, self._spec.rule)
        cooperative = self._mandatory and not mandatory  # an earlier client opened it as cooperative
        self._mandatory = self._mandatory or mandatory
        if cooperative or found.schema.version < schema.SCHEMA.version:
            spec = Spec(OWN_TABLE, self._spec.name, rule)
            await PostgresqlTable(spec, session, self._mandatory).install(None, replace=True)

    def _typed(self, error: psycopg.Error) -> FencedError:
        return typed(error)

    def _table(self, session: PsycopgSession) -> PostgresqlTable:
        return PostgresqlTable(self._spec, session, self._mandatory)

    def _is_idle(self, session: PsycopgSession) -> bool:
        return session.state() == "idle"

    async def _connect(self) -> PsycopgSession:
        if self._runtime.colour == "asyncio":
            suspending = await psycopg.AsyncConnection.connect(
                self._address, autocommit=True, prepare_threshold=None
            )
            await suspending.set_isolation_level(self._isolation)
            return AsyncPsycopgSession(suspending)
        blocking = psycopg.connect(self._address, autocommit=True, prepare_threshold=None)
        blocking.isolation_level = self._isolation
        return PsycopgSession(blocking)

    def _close(self, session: PsycopgSession) -> None:
        if isinstance(session, AsyncPsycopgSession):
            step(session.connection.close())  # a coroutine that never suspends
        else:
            session.connection.close()

    async def _miss(self, session: PsycopgSession, names: Sequence[str]) -> None:
        for name in names:
            await session.run(_MISS, (name,))

    async def _written(
        self, credential: Credential | None, values: dict[str, bytes], expect: int | None
    ) -> list[int]:
        for tried in range(1, TRIES + 1):
            try:
                return await super()._written(credential, values, expect)
            except (Contended, Conflict) as error:
                # Do not retry a wrong version, which has no cause: no other commit interfered. Nor a lock timeout,
                # which has already used up the guard's patience.
                waited = error.__cause__ is not None and sqlstate_of(error.__cause__) == LOCK_TIMEOUT
                if error.__cause__ is None or waited or tried == TRIES:
                    raise
        raise AssertionError

    async def highest(self) -> int:
        ((token,),) = await self._on_session(lambda session: session.run(_HIGHEST))
        return int(token)

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await self._on_session(lambda session: work(PostgresqlOperator(session)))
