"""Values under names in a guarded table of a SQL store, written once over the engine's `TableGuard`.

They are for drills and for programs without tables. Programs with tables use `fenced.sql.Guard`, which works on their
own connections.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from fenced.errors import Conflict, Contended, FencedError
from fenced.guards.answers import check_value
from fenced.guards.engine import TableGuard
from fenced.guards.spec import Spec
from fenced.runtime import forking
from fenced.values.contracts import Runtime, Trait, Versioned
from fenced.values.decision import Mark, Mode, Rule
from fenced.values.model import Credential, check_name

S = TypeVar("S")
"""The engine's session on one connection."""
T = TypeVar("T")

IDLE_SECONDS = 5.0
"""Our own transactions never wait for the program. One that is idle for this long belongs to a paused process."""


class TableValues(Generic[S]):
    """Values under names in one table. With `mandatory`, triggers decide every write; otherwise the guard decides only
    its own. A store supplies its statements, its errors, its connections and the guard of its table."""

    traits: tuple[Trait, ...]
    TABLE: ClassVar[str]
    READ: ClassVar[str]
    """The value and the version of a name."""
    WRITE: ClassVar[str]
    """Takes a name and a value; returns the new version."""
    MODES: ClassVar[str]
    """Pattern and mode of each setting of a guard."""
    ERRORS: ClassVar[type[Exception]]
    """The errors of the driver."""

    def __init__(self, url: str, runtime: Runtime, *, rule: Rule | None, mode: str, mandatory: bool) -> None:
        self.url = url
        if not mandatory:
            self.traits = tuple(trait for trait in self.traits if trait.key != "mandatory")
        self._runtime = runtime
        self._spec = Spec(self.TABLE, "{name}", rule)
        self._mode = str(Mode.parse(mode))
        self._mandatory = mandatory
        self._idle: list[S] = []
        forking.register(self)

    def with_rule(self, rule: Rule) -> Self:
        """The same values for a program that names their rule; before `open`."""
        ruled = copy.copy(self)
        ruled._spec, ruled._idle = replace(self._spec, rule=rule), []
        forking.register(ruled)
        return ruled

    # What a store supplies.

    def _typed(self, error: Any) -> FencedError:
        raise NotImplementedError

    async def _connect(self) -> S:
        raise NotImplementedError

    def _close(self, session: S) -> None:
        raise NotImplementedError

    def _is_idle(self, session: S) -> bool:
        """Whether no transaction is open on it."""
        raise NotImplementedError

    def _table(self, session: S) -> TableGuard:
        raise NotImplementedError

    async def _open(self, session: S) -> None:
        """Create what is missing. An installed guard keeps its mode and its rule."""
        raise NotImplementedError

    async def _miss(self, session: S, names: Sequence[str]) -> None:
        """Judge a write without a stamp, where no trigger does."""
        raise NotImplementedError

    # What all share.

    def _before_fork(self) -> None:
        while self._idle:
            self._close(self._idle.pop())

    def _forked(self) -> None:
        return

    async def _on_session(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """One operation on a separate connection. It is reused afterwards, unless a transaction was left open on it.

        No lock: an operation takes its connection out of the list in one step, so no two have the same.
        """
        try:
            try:
                session = self._idle.pop()
            except IndexError:
                session = await self._connect()
            usable = False
            try:
                answer = await work(session, *args)
                usable = True
                return answer
            finally:
                if usable or self._is_idle(session):
                    self._idle.append(session)
                else:
                    self._close(session)  # which rolls back
        except self.ERRORS as error:
            raise self._typed(error) from error

    async def open(self) -> None:
        await self._on_session(self._open)

    async def announce(self, credential: Credential) -> None:
        await self._on_session(self._announce, credential)

    async def _announce(self, session: S, credential: Credential) -> None:
        await self._table(session).announce(credential)

    async def read(self, credential: Credential, name: str) -> Versioned:
        return await self._on_session(self._read, credential, check_name(name))

    async def _read(self, session: S, credential: Credential, name: str) -> Versioned:
        await self._announce(session, replace(credential, names=(name,)))
        return await self._value(session, name)

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        return await self._on_session(self._peek, check_name(name), at_least)

    async def _peek(self, session: S, name: str, at_least: int) -> Versioned:
        if at_least:
            await self._table(session).peek(name, at_least)
        return await self._value(session, name)

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        (version,) = await self._checked(credential, {check_name(name): value}, expect)
        return version

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        await self._checked(credential, values, None)

    async def _checked(
        self, credential: Credential | None, values: dict[str, bytes], expect: int | None
    ) -> list[int]:
        values = {check_name(name): check_value(value) for name, value in values.items()}
        if credential is not None:
            credential = replace(credential, names=tuple(values), left=IDLE_SECONDS)
        return await self._written(credential, values, expect)

    async def _written(
        self, credential: Credential | None, values: dict[str, bytes], expect: int | None
    ) -> list[int]:
        return await self._on_session(self._write, credential, values, expect)

    async def _write(
        self, session: S, credential: Credential | None, values: dict[str, bytes], expect: int | None
    ) -> list[int]:
        """One guarded transaction."""
        table = self._table(session)
        await table.enter(credential)
        try:
            if credential is None and not self._mandatory:
                await self._miss(session, tuple(values))
            # In one order for everybody, so that two writers of the same names never wait for each other.
            versions = [await self._put(table, name, values[name], expect) for name in sorted(values)]
        except BaseException as error:
            await table.leave(error)
            raise
        await table.leave(None)
        return versions

    async def _put(self, table: TableGuard, name: str, value: bytes, expect: int | None) -> int:
        """Write, and compare the version afterwards, so that a bad stamp is refused before a wrong version is."""
        ((version,),) = await table.run(self.WRITE, (name, value))
        if expect is not None and version != expect + 1:
            raise Conflict(f"{name}: version {version - 1}, not {expect}")
        return int(version)

    async def _value(self, session: S, name: str) -> Versioned:
        rows = await self._table(session).run(self.READ, (name,))
        return Versioned(*rows[0]) if rows else Versioned(None, 0)

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        pending = await self._on_table(lambda table: table.set_mode(mode, pattern))
        if pending:
            raise Contended(
                f"the mode is set, but does not bind transactions that began before it: {'; '.join(pending)}"
            )

    async def adopt(self, realm: str) -> None:
        await self._on_table(lambda table: table.adopt(realm))

    async def mark(self, name: str) -> Mark | None:
        return await self._on_table(lambda table: table.peek(name, 0))

    async def modes(self) -> dict[str, str]:
        return dict(await self._on_table(lambda table: table.run(self.MODES, (self.TABLE,))))

    async def _on_table(self, work: Callable[[TableGuard], Awaitable[T]]) -> T:
        return await self._on_session(lambda session: work(self._table(session)))

    async def close(self) -> None:
        self._before_fork()
