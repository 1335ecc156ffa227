"""What operators do with a guard that has one configuration for all names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fenced.errors import Misuse
from fenced.guards.answers import check_pattern
from fenced.guards.cells import CONFIG
from fenced.values.contracts import Operator
from fenced.values.rollout import QUIET_SECONDS, DatabaseStatus, Decision

if TYPE_CHECKING:
    from fenced.guards.guardedcells import GuardedCells


EXTENT_MAX = 1000
"""How many cells are read for the highest mark: each may be a request."""


class Configured(Protocol):
    """A guard with one configuration."""

    async def modes(self) -> dict[str, str]: ...
    async def set_mode(self, mode: str, pattern: str = "*") -> None: ...
    async def unset_mode(self, pattern: str) -> bool: ...
    async def adopt(self, realm: str) -> None: ...


class ConfigOperator(Operator):
    """Changes the configuration of a guard."""

    def __init__(self, guard: Configured, kind: str) -> None:
        self.kind = kind
        self._guard = guard

    async def modes(self, table: str | None = None) -> dict[str, str]:
        return await self._guard.modes()

    async def set_mode(
        self, table: str | None, mode: str, pattern: str = "*", wait: float = 0.0
    ) -> tuple[str, ...]:
        await self._guard.set_mode(mode, pattern)
        return ()

    async def adopt(self, realm: str) -> None:
        await self._guard.adopt(realm)

    async def unset_mode(self, table: str | None, pattern: str) -> bool:
        if check_pattern(pattern) == "*":
            raise Misuse("the mode of * is the guard's own: set another one")
        return await self._guard.unset_mode(pattern)


class CellOperator(ConfigOperator):
    """What operators do with a guard over cells."""

    def __init__(self, guard: GuardedCells) -> None:
        super().__init__(guard, guard.kind)
        self._cells = guard

    async def status(self, table: str | None = None, quiet_for: float = QUIET_SECONDS) -> DatabaseStatus:
        return await self._cells.status(quiet_for)

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        return (await self._cells.decisions.read())[1][-limit:]

    async def figures(self) -> DatabaseStatus:
        return await self._cells.figures()

    async def extent(self) -> tuple[int, int]:
        found = [key for key in await self._cells.cells.keys() if key != CONFIG]
        return len(found), await self._cells.highest() if len(found) <= EXTENT_MAX else 0

    async def tidy(self, keep: int = 10_000) -> dict[str, int]:
        return {"idle cells of decisions": await self._cells.decisions.fold()}
