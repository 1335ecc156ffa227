"""The outage kit on the service: an instance before SQLite that is cut off, killed and frozen."""

import pytest

from fenced.contracts import Colour, Runtime
from fenced.testing import Check, OutageHarness, run
from fenced.testing.servers import ServiceServer
from tests.outage_harness import ProxiedHarness, every_outage, own_server

pytestmark = pytest.mark.xdist_group("service")
server = own_server(ServiceServer)

WORDS = {
    "ask": b"POST /v1/leases?",
    "renew": b"POST /v1/leases/renew",
    "release": b"POST /v1/leases/release",
    "withdraw": b"POST /v1/leases/withdraw",
}


class Harness(ProxiedHarness):
    def __init__(self, runtime: Runtime, server: ServiceServer) -> None:
        super().__init__(runtime, server, "http://{}:{}".format, WORDS)


@every_outage
def test_outages(check: Check[OutageHarness], colour: Colour, server: ServiceServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)
