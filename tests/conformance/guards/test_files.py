"""The guard over files passes the kit: values are plain files below the folder, their marks are beside them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fenced.guards.cells import Cell
from fenced.stores.files.guard.folder import GuardedFolder
from fenced.stores.files.guard.values import TRAITS, FileCells, FileValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.values.contracts import NamedValues, Runtime
from fenced.values.decision import Rule

BACKEND = "file"


class Harness:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.traits = TRAITS
        self._top = tempfile.TemporaryDirectory()
        self._rule: Rule = "retry"

    @property
    def _cells(self) -> FileCells:
        folder = Path(self._top.name, self._rule)
        folder.mkdir(exist_ok=True)
        return FileCells(GuardedFolder(folder), self.runtime)

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        guard = FileValues(self._cells, self.runtime, "file:", rule=rule, mode=mode)
        await guard.open()
        return guard

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        guard = FileValues(self._cells, self.runtime, "file:", rule=rule, mode="observe")
        await guard.open()  # what is there keeps its own mode
        return guard

    async def write_raw(self, name: str, value: bytes) -> bool:
        """As a program would that knows the format and not the rules."""
        cells = self._cells
        version, blob = await cells.get(f"n/{name}")
        cell = Cell.unpacked(name, blob).changed("by hand", None, value)
        return bool(await cells.swap([(f"n/{name}", version, cell.packed())]))

    async def close(self) -> None:
        self._top.cleanup()


# proves guard file: audit-lags, mode-lag
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_files(check: Check[GuardHarness], colour: Colour) -> None:
    run(check, Harness, colour)
