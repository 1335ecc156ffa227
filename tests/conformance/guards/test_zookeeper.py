"""The guard over ZooKeeper passes the kit."""

import pytest

from fenced.stores.zookeeper.guard.values import ZooKeeperValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from tests.cell_harness import CellHarness

BACKEND = "zookeeper"


# proves guard zookeeper: many-names, audit-lags, cooperative
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_zookeeper(check: Check[GuardHarness], colour: Colour, zookeeper_url: str) -> None:
    place = f"{zookeeper_url}/{{}}?{{}}"
    run(check, lambda runtime: CellHarness(runtime, ZooKeeperValues.at, place), colour)
