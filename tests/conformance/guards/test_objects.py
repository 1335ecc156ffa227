"""The guard over objects passes the kit, on a real S3 interface through obstore and boto3."""

from __future__ import annotations

import itertools

import pytest

from fenced.contracts import NamedValues, Runtime
from fenced.decision import Rule
from fenced.guards.objects.cells import TRAITS, ObjectCells
from fenced.guards.objects.values import ObjectValues
from fenced.guards.shared.cells import Cell
from fenced.testing import GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.testing.servers import SeaweedServer
from tests.colours import alternating

BACKEND = "s3"
pytestmark = pytest.mark.xdist_group("objects")


class Harness:
    _numbers = itertools.count()

    def __init__(self, runtime: Runtime, server: SeaweedServer) -> None:
        self.runtime = runtime
        self.traits = TRAITS
        self._server = server
        self._of_rule: dict[Rule, str] = {}
        self._rule: Rule = "retry"

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        self._of_rule.setdefault(rule, f"kit/{next(self._numbers)}-{rule}")
        return await self._open(f"&rule={rule}&mode={mode}")

    async def reopen(self) -> NamedValues:
        return await self._open("&mode=observe")  # what is there keeps its own rule and mode

    async def _open(self, options: str) -> ObjectValues:
        guard = self._at(options)
        await guard.open()
        return guard

    def _at(self, options: str = "") -> ObjectValues:
        return ObjectValues.at(self._server.url(self._of_rule[self._rule]) + options, self.runtime)

    async def write_raw(self, name: str, value: bytes) -> bool:
        """As a program would that knows the format and not the rules."""
        cells: ObjectCells = self._at().cells
        version, blob = await cells.get(f"n/{name}")
        cell = Cell.unpacked(name, blob).changed("by hand", None, value)
        return bool(await cells.swap([(f"n/{name}", version, cell.packed())]))

    async def close(self) -> None:
        return


# proves guard s3: audit-local, mode-lag
@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_CHECKS))
def test_objects(check: Check[GuardHarness], colour: Colour, seaweed_server: SeaweedServer) -> None:
    run(check, lambda runtime: Harness(runtime, seaweed_server), colour)
