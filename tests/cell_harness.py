"""What the bindings of guards over cells on a server share: guards at one address, each rule in a place of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from fenced.guards.cellguard import CellGuard
from fenced.guards.cells import Cell
from fenced.values.contracts import NamedValues, Runtime
from fenced.values.decision import Rule

At = Callable[[str, Runtime], CellGuard]


class CellHarness:
    """`place`: the address of a guard, with two `{}`: for a random word and for the options."""

    def __init__(self, runtime: Runtime, at: At, place: str) -> None:
        self.runtime = runtime
        self.traits = at.__self__.traits  # type: ignore[attr-defined]
        self._at = at
        self._place = place
        self._word = secrets.token_hex(8)
        self._rule: Rule = "retry"
        self._opened: list[CellGuard] = []

    async def _open(self, rule: Rule | None, mode: str) -> CellGuard:
        options = f"mode={mode.replace('%', '%25')}" + (f"&rule={rule}" if rule else "")
        guard = self._at(self._place.format(f"{self._word}-{self._rule}", options), self.runtime)
        self._opened.append(guard)
        await guard.open()
        return guard

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        return await self._open(rule, mode)

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        return await self._open(rule, "observe")  # what is there keeps its own mode

    async def write_raw(self, name: str, value: bytes) -> bool:
        """As a program would that knows the format and not the rules."""
        cells = self._opened[-1].cells
        version, blob = await cells.get(f"n/{name}")
        cell = Cell.unpacked(name, blob).changed("by hand", None, value)
        return bool(await cells.swap([(f"n/{name}", version, cell.packed())]))

    async def close(self) -> None:
        for guard in self._opened:
            await guard.close()
