"""The outage kit on the service: an instance before SQLite that is cut off, killed and frozen.

Most of it does not depend on the store: before PostgreSQL and etcd the rest runs here, the whole in `make evidence`.
"""

import os
from collections.abc import Iterator

import pytest

from fenced.testing import Check, run
from fenced.values.contracts import Colour, Runtime
from fenced_testkit import OUTAGE_CHECKS, OutageHarness
from fenced_testkit.servers import ServiceServer
from tests.colours import alternating, named
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


STORE_CHECKS = ("a_late_ask_finds_its_tombstone", "a_killed_server_keeps_what_it_said")


@pytest.fixture(scope="module")
def before(request: pytest.FixtureRequest) -> Iterator[ServiceServer]:
    """An instance before another server. The etcd of Debian 12 is best-effort."""
    store = request.getfixturevalue(request.param).url()
    with ServiceServer(store=store, options=("--guarantee", "best-effort")) as started:
        yield started


@pytest.mark.parametrize("before", ["postgresql_server", "etcd_server"], indirect=True)
@pytest.mark.parametrize(
    ("check", "colour"),
    alternating(OUTAGE_CHECKS if os.environ.get("FENCED_WHOLE_KIT") else named(OUTAGE_CHECKS, *STORE_CHECKS)),
)
def test_outages_before_other_stores(
    check: Check[OutageHarness], colour: Colour, before: ServiceServer
) -> None:
    run(check, lambda runtime: Harness(runtime, before), colour)
