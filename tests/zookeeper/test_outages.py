"""The outage kit on ZooKeeper."""

from collections.abc import Iterator

import pytest

from fenced.contracts import Colour, Runtime
from fenced.errors import Indeterminate
from fenced.model import Busy, Ended, Kept
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing import COLOURS, OUTAGE_CHECKS, Check, OutageHarness, run
from fenced.testing.faults import Fault
from fenced.testing.kit import asking, granted
from fenced.testing.servers import ZooKeeperServer
from tests.outage_harness import ProxiedHarness
from tests.shifted import Shifted
from tests.zookeeper.acting import WORDS

pytestmark = pytest.mark.xdist_group("serial")


class Harness(ProxiedHarness):
    def __init__(self, runtime: Runtime, server: ZooKeeperServer) -> None:
        super().__init__(runtime, server, "zookeeper://{}:{}".format, WORDS)


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer() as server:
        yield server


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", OUTAGE_CHECKS, ids=lambda check: check.name)
def test_outages(check: Check[OutageHarness], colour: Colour, server: ZooKeeperServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)


def test_an_unknown_ask_that_nobody_withdraws_lapses(server: ZooKeeperServer) -> None:
    """Its session goes on with another lease: its own client finds the ghost, and ends it when its time is over."""
    runtime = Shifted(BlockingRuntime())
    harness = Harness(runtime, server)
    one, onlooker = step(harness.authority()), step(harness.direct())
    kept, lost = asking(runtime, "kept"), asking(runtime, "orders")
    step(granted(one, kept))
    harness.proxy.on(harness.words["ask"], Fault.LOSE_REPLY, times=2)
    with pytest.raises(Indeterminate):
        step(one.ask(lost))
    assert isinstance(step(onlooker.ask(asking(runtime, "orders"))), Busy)
    for _ in range(2):
        runtime.ahead += 6
        assert step(one.renew([kept.secret])) == [Kept(10.0)]
    step(granted(onlooker, asking(runtime, "orders")))
    assert step(one.ask(lost)) == Ended("expired")
    step(harness.close())
