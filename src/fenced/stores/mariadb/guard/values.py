"""Named values in a guarded table of MariaDB or MySQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, TypeVar

from fenced.errors import Conflict, Contended, FencedError
from fenced.guards.answers import expect_rule
from fenced.guards.spec import Spec
from fenced.guards.tablevalues import TableValues
from fenced.net.pool import ConnectionBroken
from fenced.stores.mariadb.address import MariadbAddress
from fenced.stores.mariadb.guard import schema
from fenced.stores.mariadb.guard.install import CREATE_VALUES, OWN_TABLE, text
from fenced.stores.mariadb.guard.operator import MariadbOperator
from fenced.stores.mariadb.guard.refusals import interferes, read
from fenced.stores.mariadb.guard.sessions import WireSession
from fenced.stores.mariadb.guard.tables import MariadbTable
from fenced.stores.mariadb.wire.connection import MariadbConnection, connect
from fenced.stores.mariadb.wire.failures import ServerRefusal
from fenced.values import timing
from fenced.values.contracts import (
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

T = TypeVar("T")

_HERE = "scope = CAST(DATABASE() AS BINARY)"
TRIES = 50
"""How often an operation is tried that conflicts with another one on the same rows."""


class MariadbValues(TableValues[WireSession]):
    """Values under names in one table."""

    traits: tuple[Trait, ...] = (
        Trait("durable-marks", "Marks and values are committed together, as durably as the server commits."),
        Trait("mandatory", "Triggers decide every write to the table, also one typed into a shell."),
        MANY_NAMES,
        SEVERAL_LEASES,
        PROOFS,
        STILL_HELD,
        Trait(
            "modes-wait",
            "A change of a mode waits for open transactions that have met the guard, and then binds every later one.",
        ),
        Trait(
            "waits-for-older",
            "A successor waits until the transaction of an older token ends; the server ends it when its lease is over "
            "and its program is silent.",
        ),
        Trait(
            "shell-unrecorded",
            "Only our wrapper records a refusal; a refusal elsewhere, as in the mariadb shell, is not recorded.",
        ),
        Trait(
            "privileged-bypass",
            "A user with TRIGGER, DROP, ALTER or SUPER can bypass the guard; so can one that sets its variables.",
        ),
    )
    TABLE = OWN_TABLE
    READ = f"SELECT value, version FROM {OWN_TABLE} WHERE name = %s"
    WRITE = (
        f"INSERT INTO {OWN_TABLE} (name, value, version) VALUES (%s, %s, 1) "
        "ON DUPLICATE KEY UPDATE value = VALUES(value), version = version + 1"
    )
    MODES = f"SELECT pattern, mode FROM fenced_guard.mode WHERE {_HERE} AND tbl = %s"
    ERRORS: ClassVar[Any] = (ServerRefusal, ConnectionBroken)

    def __init__(
        self,
        url: str,
        runtime: Runtime,
        *,
        rule: Rule | None = None,
        mode: str = "enforce",
        mandatory: bool = True,
        isolation: str | None = None,
    ) -> None:
        self._address = MariadbAddress(url)
        super().__init__(self._address.url, runtime, rule=rule, mode=mode, mandatory=mandatory)
        self._isolation = isolation

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> MariadbValues:
        return cls(url, runtime)

    async def _connect(self) -> WireSession:
        until = timing.call_until(self._runtime.now(), None)
        return WireSession(await connect(self._address, self._runtime, until, self._greet), self._runtime)

    async def _greet(self, connection: MariadbConnection, until: float) -> None:
        if self._isolation is not None:
            await connection.run([f"SET SESSION TRANSACTION ISOLATION LEVEL {self._isolation}"], until)

    def _close(self, session: WireSession) -> None:
        session.close()

    def _is_idle(self, session: WireSession) -> bool:
        return session.state() == "idle"

    def _table(self, session: WireSession) -> MariadbTable:
        return MariadbTable(self._spec, session, self._mandatory)

    def _typed(self, error: Any) -> FencedError:
        return read(error).typed()

    async def _open(self, session: WireSession) -> None:
        await session.run(CREATE_VALUES)
        found = await schema.look(session)
        there = found and await session.run(
            f"SELECT rule, mandatory FROM fenced_guard.guard WHERE {_HERE} AND tbl = '{OWN_TABLE}'"
        )
        if not found or not there:
            await self._table(session).install(self._mode)
            return
        rule, mandatory = text(there[0][0]), bool(there[0][1])
        expect_rule(self.url, rule, self._spec.rule)
        cooperative = self._mandatory and not mandatory  # an earlier client opened it as cooperative
        self._mandatory = self._mandatory or mandatory
        if cooperative or found.schema.version < schema.VERSION:
            spec = Spec(OWN_TABLE, self._spec.name, rule)  # type: ignore[arg-type]
            await MariadbTable(spec, session, self._mandatory).install(None, replace=True)

    async def _miss(self, session: WireSession, names: Sequence[str]) -> None:
        for name in names:
            await session.run(f"CALL fenced_guard.miss(DATABASE(), '{OWN_TABLE}', %s)", (name,))

    async def _put(self, table: Any, name: str, value: bytes, expect: int | None) -> int:
        """Write, and compare the version afterwards, so that a bad stamp is refused before a wrong version is."""
        await table.run(self.WRITE, (name, value))
        ((version,),) = await table.run(
            f"SELECT version FROM {OWN_TABLE} WHERE name = %s FOR UPDATE", (name,)
        )
        if expect is not None and version != expect + 1:
            raise Conflict(f"{name}: version {version - 1}, not {expect}")
        return int(version)

    async def _written(
        self, credential: Credential | None, values: dict[str, bytes], expect: int | None
    ) -> list[int]:
        for tried in range(1, TRIES + 1):
            try:
                return await super()._written(credential, values, expect)
            except (Contended, Conflict) as error:
                # Do not retry a wrong version, which has no cause: no other commit interfered.
                if error.__cause__ is None or not interferes(read(error.__cause__)) or tried == TRIES:
                    raise
        raise AssertionError

    async def modes(self) -> dict[str, str]:
        return {pattern: text(mode) for pattern, mode in _texts(await super().modes())}

    async def highest(self) -> int:
        return await self._on_session(self._highest)

    async def _highest(self, session: WireSession) -> int:
        await schema.installed(session)
        ((token,),) = await session.run(
            f"SELECT GREATEST(COALESCE((SELECT MAX(token) FROM fenced_guard.mark WHERE {_HERE}), 0), "
            f"COALESCE((SELECT floor FROM fenced_guard.trust WHERE {_HERE}), 0))"
        )
        return int(token)

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await self._on_session(lambda session: work(MariadbOperator(session)))


def _texts(modes: dict[Any, Any]) -> list[tuple[str, Any]]:
    return [(text(pattern), mode) for pattern, mode in modes.items()]
