"""The guard over ZooKeeper passes the kit."""

import pytest

from fenced.guards.zookeeper.values import ZooKeeperValues
from fenced.registry import BUILT_IN
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from tests.cell_harness import CellHarness

BACKEND = "zookeeper"


# proves guard zookeeper: many-names, audit-local, cooperative
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_zookeeper(check: Check[GuardHarness], colour: Colour, zookeeper_url: str) -> None:
    def place(word: str, options: str) -> str:
        return f"{zookeeper_url}/{word}?{options}"

    run(check, lambda runtime: CellHarness(runtime, ZooKeeperValues.at, place), colour)


def test_zookeepers_is_the_same_guard_over_tls() -> None:
    """The authority's tests show the wire over TLS."""
    table = BUILT_IN["fenced.guards"]
    assert table["zookeepers"] == table[BACKEND]
