"""The outage kit for guards, on ZooKeeper."""

from __future__ import annotations

import pytest

from fenced.testing import Check, Colour
from fenced.values.decision import Rule
from fenced_testkit import GuardOutageHarness
from fenced_testkit.servers import ZooKeeperServer
from tests.guard_outage_harness import GuardedHarness, every_guard_outage, run_outage
from tests.outage_harness import own_server

pytestmark = pytest.mark.xdist_group("zookeeper")
server = own_server(ZooKeeperServer)


class Harness(GuardedHarness):
    def _url(self, where: str, place: str, rule: Rule) -> str:
        return f"zookeeper://{where}/{place}?rule={rule}"


@every_guard_outage
def test_outages(check: Check[GuardOutageHarness], colour: Colour, server: ZooKeeperServer) -> None:
    run_outage(check, lambda runtime: Harness(runtime, server), colour)
