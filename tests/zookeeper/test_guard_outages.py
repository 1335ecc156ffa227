"""The outage kit for guards, on ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fenced import timing
from fenced.decision import Rule
from fenced.testing import COLOURS, GUARD_OUTAGE_CHECKS, Check, Colour, GuardOutageHarness, run
from fenced.testing.faults import Proxy
from fenced.testing.servers import ZooKeeperServer
from tests.guard_outage_harness import CellOutageHarness

pytestmark = pytest.mark.xdist_group("zookeeper")


def address(host: str, port: int, place: str, rule: Rule) -> str:
    return f"zookeeper://{host}:{port}/{place}?rule={rule}"


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer() as server:
        yield server


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_OUTAGE_CHECKS, ids=lambda check: check.name)
def test_outages(
    check: Check[GuardOutageHarness], colour: Colour, server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check.name == "a_frozen_server":
        monkeypatch.setattr(timing, "CALL_SECONDS", 1.0)
    proxy = Proxy(server.host, server.port)
    run(check, lambda runtime: CellOutageHarness(runtime, server, proxy, address), colour)
