"""The guard over etcd passes the kit."""

import pytest

from fenced.guards.etcd.values import EtcdValues
from fenced.registry import BUILT_IN
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from tests.cell_harness import CellHarness

BACKEND = "etcd"


# proves guard etcd: many-names, audit-local, cooperative
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_etcd(check: Check[GuardHarness], colour: Colour, etcd_url: str) -> None:
    def place(word: str, options: str) -> str:
        return f"{etcd_url}?prefix={word}&{options}"

    run(check, lambda runtime: CellHarness(runtime, EtcdValues.at, place), colour)


def test_etcds_is_the_same_guard_over_tls() -> None:
    """The authority's tests show the wire over TLS."""
    table = BUILT_IN["fenced.guards"]
    assert table["etcds"] == table[BACKEND]
