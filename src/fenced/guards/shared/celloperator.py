"""What operators do with a guard over cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fenced.contracts import Operator
from fenced.errors import Misuse
from fenced.guards.shared.answers import check_pattern
from fenced.rollout import QUIET_SECONDS, DatabaseStatus, Decision

if TYPE_CHECKING:
    from fenced.guards.shared.guardedcells import GuardedCells


class CellOperator(Operator):
    """What operators do with a guard over cells."""

    def __init__(self, guard: GuardedCells) -> None:
        self.kind = guard.kind
        self._guard = guard

    async def status(self, table: str | None = None, quiet_for: float = QUIET_SECONDS) -> DatabaseStatus:
        return await self._guard.status(quiet_for)

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        return list(self._guard.records)[-limit:]

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
