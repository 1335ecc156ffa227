"""The reference guard passes its own kit."""

import pytest

from fenced.errors import MissingStamp
from fenced.stores.memory.guard import MemoryCells, MemoryValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.values.contracts import NamedValues, Runtime, Trait
from fenced.values.decision import Rule

BACKEND = "memory"


class Harness:
    def __init__(self, runtime: Runtime, guard_type: type[MemoryValues] = MemoryValues) -> None:
        self.runtime = runtime
        self._guard_type = guard_type
        self._cells: dict[Rule, MemoryCells] = {}
        self._guard = guard_type()

    @property
    def traits(self) -> tuple[Trait, ...]:
        return self._guard.traits

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        cells = self._cells.setdefault(rule, MemoryCells())
        self._guard = self._guard_type(rule=rule, mode=mode, cells=cells, runtime=self.runtime)
        return self._guard

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        """Another guard object on the same dictionary, which lasts as long as its process."""
        return self._guard_type(rule=rule, cells=self._guard.cells, runtime=self.runtime)

    async def write_raw(self, name: str, value: bytes) -> bool:
        try:
            await self._guard.write(None, name, value)
        except MissingStamp:
            return False
        return True

    async def close(self) -> None:
        return


# proves guard memory: one-process, mandatory, many-names, audit-lags
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_memory(check: Check[GuardHarness], colour: Colour) -> None:
    run(check, Harness, colour)
