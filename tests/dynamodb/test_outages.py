"""The outage kit for guards, on an emulator of DynamoDB."""

from __future__ import annotations

import pytest

from fenced.drills.relay import Proxy
from fenced.testing import Check, Colour
from fenced.values.contracts import Runtime
from fenced.values.decision import Rule
from fenced_testkit import GUARD_OUTAGE_CHECKS, GuardOutageHarness
from fenced_testkit.servers import DynamoServer
from fenced_testkit.servers.dynamodb import KEYS, REGION, TABLE
from tests.colours import alternating
from tests.guard_outage_harness import GuardedHarness, run_outage
from tests.outage_harness import own_server

pytestmark = pytest.mark.xdist_group("dynamodb")
server = own_server(DynamoServer)


class Harness(GuardedHarness):
    word = b"PutItem"

    def __init__(self, runtime: Runtime, server: DynamoServer) -> None:
        super().__init__(runtime, server, Proxy(server.host, server.port))

    def _url(self, where: str, place: str, rule: Rule) -> str:
        return f"dynamodb://{TABLE}/{place}?endpoint=http://{where}&region={REGION}&rule={rule}"


@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_OUTAGE_CHECKS))
def test_outages(
    check: Check[GuardOutageHarness], colour: Colour, server: DynamoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in KEYS.items():
        monkeypatch.setenv(variable, value)
    if check.name == "a_killed_server" and not server.durable:
        pytest.skip("moto keeps its tables in memory; dynoxide, which `make test` installs by npm, does not")
    run_outage(check, lambda runtime: Harness(runtime, server), colour)
