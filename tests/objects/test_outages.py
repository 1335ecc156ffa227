"""The outage kit for guards, on an S3 interface."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from fenced.contracts import NamedValues, Runtime
from fenced.decision import Rule
from fenced.errors import Indeterminate, StaleToken, Unavailable
from fenced.guards.objects.buckets import ObstoreBucket
from fenced.guards.objects.cells import ObjectCells
from fenced.guards.objects.values import ObjectValues
from fenced.objects import ObjectGuard
from fenced.testing import GUARD_OUTAGE_CHECKS, Check, Colour, GuardOutageHarness, run
from fenced.testing.faults import Proxy
from fenced.testing.servers import SeaweedServer, Server
from fenced.testing.servers.base import Endpoint
from tests.colours import alternating
from tests.objects.test_objects import NAME, config_is_known, s3_store, stamp

pytestmark = pytest.mark.xdist_group("objects")


class Harness:
    word = b"PUT /"

    def __init__(self, runtime: Runtime, server: SeaweedServer) -> None:
        self.runtime = runtime
        self.server: Server = server
        self.proxy = Proxy(server.host, server.port)
        self._prefix = secrets.token_hex(8)

    async def guard(self, rule: Rule = "retry") -> NamedValues:
        return await self._open(self.proxy, rule)

    async def direct(self, rule: Rule = "retry") -> NamedValues:
        return await self._open(self.server, rule)

    async def _open(self, place: Endpoint, rule: Rule) -> NamedValues:
        store = s3_store(f"http://{place.host}:{place.port}", timeout="3s")
        bucket = ObstoreBucket(store, f"{self._prefix}{rule}/", self.runtime)
        guard = ObjectValues(ObjectCells(bucket), self.runtime, "s3:", rule=rule)
        await guard.open()
        return guard

    async def close(self) -> None:
        self.proxy.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedServer]:
    with SeaweedServer() as server:
        yield server


@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_OUTAGE_CHECKS))
def test_outages(check: Check[GuardOutageHarness], colour: Colour, server: SeaweedServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)


def test_a_write_that_was_sent_is_unknown(server: SeaweedServer) -> None:
    """One that was not sent has not happened."""
    guard = ObjectGuard(s3_store(server.endpoint(), timeout="3s"), prefix="sent", rule="sequenced")
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
