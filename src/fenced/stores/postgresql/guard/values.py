"""Named values in a guarded PostgreSQL table, for drills and for programs without tables.

Programs with tables use `fenced.sql.Guard`, which works on their own connections.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from fenced.errors import Conflict, Contended, Misuse, redacted, shown
from fenced.guards.answers import check_value, expect_rule
from fenced.guards.spec import Spec
from fenced.runtime import forking
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
    Versioned,
)
from fenced.values.decision import Mark, Mode, Rule
from fenced.values.model import Credential, check_name

if TYPE_CHECKING:
    from psycopg import IsolationLevel

T = TypeVar("T")
_Session = PsycopgSession

IDLE_SECONDS = 5.0
"""Our own transactions never wait for the program. One that is idle for this long belongs to a paused process."""
TRIES = 50
"""How often an operation is tried that conflicts with another one on the same rows."""
_READ = f"SELECT value, version FROM {OWN_TABLE} WHERE name = %s"
_WRITE = f"""
INSERT INTO {OWN_TABLE} AS v (name, value, is_bytes, version) VALUES (%s, %s, true, 1)
ON CONFLICT (name) DO UPDATE SET value = excluded.value, version = v.version + 1
RETURNING version"""
_MISS = f"SELECT fenced_guard.decide('{OWN_TABLE}', %s)"
_INSTALLED = "SELECT rule, mandatory FROM fenced_guard.guard WHERE guard = %s"
_MARK = "SELECT token, grant_id, seq FROM fenced_guard.mark WHERE name = %s"
_HIGHEST = (
    "SELECT greatest((SELECT max(token) FROM fenced_guard.mark), (SELECT floor FROM fenced_guard.trust))"
)
_MODES = "SELECT pattern, mode FROM fenced_guard.mode WHERE guard = %s"


class PostgresqlValues:
    """Values under names in one PostgreSQL table. With `mandatory`, triggers decide every write; otherwise the guard
    decides only its own."""

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
        self.url = str(redacted(url))
        lacks = {"mandatory": mandatory, "announces-separately": isolation is not None}
        self.traits = tuple(trait for trait in self.traits if lacks.get(trait.key, True))
        self._address = url
        self._runtime = runtime
        self._spec = Spec(OWN_TABLE, "{name}", rule)
        self._mandatory = mandatory
        self._mode = str(Mode.parse(mode))
        self._isolation = isolation
        self._idle: list[_Session] = []
        forking.register(self)

    def _before_fork(self) -> None:
        while self._idle:
            _close(self._idle.pop())

    def _forked(self) -> None:
        return

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> PostgresqlValues:
        try:
            psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise Misuse(f"{shown(redacted(url))}: {error}") from error
        return cls(url, runtime)

    async def open(self) -> None:
        """Create what is missing. An installed guard keeps its mode and its rule."""
        await self._on_session(self._open)

    async def _open(self, session: _Session) -> None:
        found = await schema.look(session)
        there = await session.run(_INSTALLED, (OWN_TABLE,)) if found else []
        if not found or not there:
            await self._on(session).install(self._mode)
            return
        rule, mandatory = there[0]
        expect_rule(self.url, rule, self._spec.rule)
        cooperative = self._mandatory and not mandatory  # an earlier client opened it as cooperative
        self._mandatory = self._mandatory or mandatory
        if cooperative or found.schema.version < schema.SCHEMA.version:
            spec = Spec(OWN_TABLE, self._spec.name, rule)
            await PostgresqlTable(spec, session, self._mandatory).install(None, replace=True)

    def _on(self, session: _Session) -> PostgresqlTable:
        return PostgresqlTable(self._spec, session, self._mandatory)

    async def _on_session(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """One operation on a separate connection. It is reused afterwards, unless a transaction was left open on it."""
        session = self._idle.pop() if self._idle else await self._connect()
        usable = False
        try:
            answer = await work(session, *args)
            usable = True
            return answer
        except psycopg.Error as error:
            raise typed(error) from error
        finally:
            if usable or session.state() == "idle":
                self._idle.append(session)
            else:
                _close(session)

    async def _connect(self) -> _Session:
        try:
            return await self._connected()
        except psycopg.Error as error:
            raise typed(error) from error

    async def _connected(self) -> _Session:
        if self._runtime.colour == "asyncio":
            suspending = await psycopg.AsyncConnection.connect(
                self._address, autocommit=True, prepare_threshold=None
            )
            await suspending.set_isolation_level(self._isolation)
            return AsyncPsycopgSession(suspending)
        blocking = psycopg.connect(self._address, autocommit=True, prepare_threshold=None)
        blocking.isolation_level = self._isolation
        return PsycopgSession(blocking)

    async def announce(self, credential: Credential) -> None:
        await self._on_session(self._announce, credential)

    async def _announce(self, session: _Session, credential: Credential) -> None:
        await self._on(session).announce(credential)

    async def read(self, credential: Credential, name: str) -> Versioned:
        return await self._on_session(self._read, credential, check_name(name))

    async def _read(self, session: _Session, credential: Credential, name: str) -> Versioned:
        await self._announce(session, replace(credential, names=(name,)))
        return await self._value(session, name)

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        return await self._on_session(self._peek, check_name(name), at_least)

    async def _peek(self, session: _Session, name: str, at_least: int) -> Versioned:
        if at_least:
            await self._on(session).peek(name, at_least)
        return await self._value(session, name)

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        (version,) = await self._repeated(credential, {check_name(name): value}, expect)
        return version

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        await self._repeated(credential, values, None)

    async def _repeated(
        self, credential: Credential | None, values: dict[str, bytes], expect: int | None
    ) -> list[int]:
        values = {check_name(name): check_value(value) for name, value in values.items()}
        if credential is not None:
            credential = replace(credential, names=tuple(values), left=IDLE_SECONDS)
        for tried in range(1, TRIES + 1):
            try:
                return await self._on_session(self._write, credential, values, expect)
            except (Contended, Conflict) as error:
                # Do not retry a wrong version, which has no cause: no other commit interfered. Nor a lock timeout,
                # which has already used up the guard's patience.
                waited = error.__cause__ is not None and sqlstate_of(error.__cause__) == LOCK_TIMEOUT
                if error.__cause__ is None or waited or tried == TRIES:
                    raise
        raise AssertionError

    async def _write(
        self,
        session: _Session,
        credential: Credential | None,
        values: dict[str, bytes],
        expect: int | None,
    ) -> list[int]:
        """One guarded transaction."""
        table = self._on(session)
        if credential is None:
            await session.begin("SELECT 1")
        else:
            await table.enter(credential)
        try:
            if credential is None and not self._mandatory:
                for name in values:
                    await session.run(_MISS, (name,))
            versions = [
                await self._put(session, name, value, expect) for name, value in sorted(values.items())
            ]
        except BaseException as error:
            await table.leave(error)
            raise
        await table.leave(None)
        return versions

    async def _put(self, session: _Session, name: str, value: bytes, expect: int | None) -> int:
        """Write, and compare the version afterwards, so that a bad stamp is refused before a wrong version is."""
        ((version,),) = await session.run(_WRITE, (name, value))
        if expect is not None and version != expect + 1:
            raise Conflict(f"{name}: version {version - 1}, not {expect}")
        return int(version)

    async def _value(self, session: _Session, name: str) -> Versioned:
        rows = await session.run(_READ, (check_name(name),))
        return Versioned(*rows[0]) if rows else Versioned(None, 0)

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        await self._on_session(self._set_mode, mode, pattern)

    async def _set_mode(self, session: _Session, mode: str, pattern: str) -> None:
        pending = await self._on(session).set_mode(mode, pattern)
        if pending:
            raise Contended(
                f"the mode is set, but does not bind transactions that began before it: {'; '.join(pending)}"
            )

    async def adopt(self, realm: str) -> None:
        await self._on_session(self._adopt, realm)

    async def _adopt(self, session: _Session, realm: str) -> None:
        await self._on(session).adopt(realm)

    async def mark(self, name: str) -> Mark | None:
        rows = await self._on_session(_run, _MARK, (name,))
        return Mark(*rows[0]) if rows else None

    async def highest(self) -> int:
        ((token,),) = await self._on_session(_run, _HIGHEST, ())
        return int(token)

    async def modes(self) -> dict[str, str]:
        return dict(await self._on_session(_run, _MODES, (OWN_TABLE,)))

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await self._on_session(lambda session: work(PostgresqlOperator(session)))

    async def close(self) -> None:
        self._before_fork()


def _close(session: _Session) -> None:
    if isinstance(session, AsyncPsycopgSession):
        step(session.connection.close())  # a coroutine that never suspends
    else:
        session.connection.close()


async def _run(session: _Session, sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
    return await session.run(sql, parameters)
