"""The guard over etcd passes the kit."""

import pytest

from fenced.stores.etcd.guard.values import EtcdValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from tests.cell_harness import CellHarness

BACKEND = "etcd"


# proves guard etcd: many-names, audit-lags, cooperative
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_etcd(check: Check[GuardHarness], colour: Colour, etcd_url: str) -> None:
    place = f"{etcd_url}?prefix={{}}&{{}}"
    run(check, lambda runtime: CellHarness(runtime, EtcdValues.at, place), colour)
