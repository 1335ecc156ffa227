"""The guard over DynamoDB passes the kit, on emulators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from fenced.guards.cellguard import CellGuard
from fenced.guards.options import options_in
from fenced.stores.dynamodb.guard.cells import DynamoMarks
from fenced.stores.dynamodb.guard.values import DynamoValues
from fenced.stores.memory.guard import MemoryCells
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.values.contracts import Runtime
from fenced_testkit.servers import DynamoServer
from tests.cell_harness import CellHarness
from tests.colours import alternating

BACKEND = "dynamodb"
pytestmark = pytest.mark.xdist_group("dynamodb")


def on(server: DynamoServer, check: Check[GuardHarness], colour: Colour) -> None:
    place = server.url("{}") + "&{}"
    run(check, lambda runtime: CellHarness(runtime, DynamoValues.at, place), colour)


(LONG,) = (check for check in GUARD_CHECKS if check.name == "agrees_with_the_decision")
"""Thousands of requests, which differ in what the cells contain alone: it runs in memory, in both colours."""
SHORT = [check for check in GUARD_CHECKS if check is not LONG]


# proves guard dynamodb: many-names, audit-lags, mode-lag, cooperative
@pytest.mark.parametrize(("check", "colour"), alternating(SHORT))
def test_dynamodb(check: Check[GuardHarness], colour: Colour, dynamo_server: DynamoServer) -> None:
    on(dynamo_server, check, colour)


class CellsInMemory(MemoryCells):
    """Cells without requests, which take most of the time."""

    async def prove(self) -> bool:
        return True

    async def swap(self, changes: Sequence[tuple[str, int, bytes | None]], writes: None = None) -> object:  # type: ignore[override]
        return await super().swap(changes)


_places: dict[str, CellsInMemory] = {}


class MarksInMemory(DynamoMarks):
    @classmethod
    def at(cls, url: str, runtime: Runtime) -> CellGuard:
        cells = _places.setdefault(url.partition("?")[0], CellsInMemory())
        return cls(cells, runtime, url, **options_in(url))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "colour"), [*alternating(SHORT, COLOURS[::-1]), *((LONG, colour) for colour in COLOURS)]
)
def test_the_other_colour(check: Check[GuardHarness], colour: Colour) -> None:
    run(check, lambda runtime: CellHarness(runtime, MarksInMemory.at, "dynamodb://{}?{}"), colour)


ON_THE_WIRE = ("several_names_all_or_none", "the_newer_token_wins")
"""One cell and several: in both colours, and on the emulator that the tests use where npm is missing."""
WIRE_CHECKS = [check for check in GUARD_CHECKS if check.name in ON_THE_WIRE]
assert len(WIRE_CHECKS) == len(ON_THE_WIRE)


@pytest.mark.parametrize("check", WIRE_CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("colour", COLOURS)
def test_the_wire_in_both_colours(
    check: Check[GuardHarness], colour: Colour, dynamo_server: DynamoServer
) -> None:
    on(dynamo_server, check, colour)


@pytest.fixture(scope="module")
def moto() -> Iterator[DynamoServer]:
    with DynamoServer(emulator="moto") as server:
        yield server


@pytest.mark.usefixtures("dynamo_server")  # for the environment
@pytest.mark.parametrize(("check", "colour"), alternating(WIRE_CHECKS))
def test_on_moto(check: Check[GuardHarness], colour: Colour, moto: DynamoServer) -> None:
    on(moto, check, colour)
