"""The outage kit for guards, on an S3 interface."""

from __future__ import annotations

import pytest

from fenced.errors import Indeterminate, StaleToken, Unavailable
from fenced.objects import ObjectGuard
from fenced.stores.objects.guard.buckets import ObstoreBucket
from fenced.stores.objects.guard.cells import ObjectCells
from fenced.stores.objects.guard.values import ObjectValues
from fenced.testing import Check, Colour, run
from fenced.values.contracts import NamedValues
from fenced.values.decision import Rule
from fenced_testkit import GUARD_OUTAGE_CHECKS, GuardOutageHarness
from fenced_testkit.servers import SeaweedServer
from fenced_testkit.servers.base import Endpoint
from tests.bound import Bound
from tests.colours import alternating
from tests.guard_outage_harness import GuardedHarness
from tests.objects.test_objects import NAME, config_is_known, s3_store, stamp
from tests.outage_harness import own_server

pytestmark = pytest.mark.xdist_group("objects")
server = own_server(SeaweedServer)


class Harness(GuardedHarness):
    word = b"PUT /"

    def _at(self, where: Endpoint, place: str, rule: Rule) -> NamedValues:
        store = s3_store(f"http://{where.host}:{where.port}", timeout="3s")
        bucket = ObstoreBucket(store, f"{place}/", self.runtime)
        return ObjectValues(ObjectCells(bucket), self.runtime, "s3:", rule=rule)


@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_OUTAGE_CHECKS))
def test_outages(check: Check[GuardOutageHarness], colour: Colour, server: SeaweedServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)


def test_a_write_that_was_sent_is_unknown(server: SeaweedServer) -> None:
    """One that was not sent has not happened."""
    guard = Bound(ObjectGuard(prefix="sent", rule="sequenced"), s3_store(server.endpoint(), timeout="3s"))
    guard.write(stamp(5), NAME, b"one")
    with pytest.raises(Indeterminate), guard.change(stamp(5, 2), NAME) as report:
        report.body = b"two"
        config_is_known(guard)
        server.freeze()
    with pytest.raises(Unavailable):
        guard.read(stamp(6), NAME)
    server.thaw()  # the write may still arrive now, but not after the next line
    found = guard.read(stamp(6), NAME)
    assert found in (b"one", b"two")
    with pytest.raises(StaleToken):
        guard.write(stamp(5, 3), NAME, b"late")
    assert guard.peek(NAME) == found
    with pytest.raises(Indeterminate), guard.change(stamp(6), NAME) as report:
        report.body = b"three"
        config_is_known(guard)
        server.kill()
    with pytest.raises(Unavailable):
        guard.read(stamp(6), NAME)
    server.start()
    assert guard.read(stamp(6), NAME) == found, "nothing listened"
