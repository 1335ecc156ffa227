"""The outage kit for guards, on etcd."""

from __future__ import annotations

import pytest

from fenced.drills.relay import Proxy
from fenced.drills.relay.proxy import http2_reply
from fenced.guards import cellguard
from fenced.testing import Check, Colour
from fenced.testing.kit import CheckFailed
from fenced.values.contracts import Runtime
from fenced.values.decision import Rule
from fenced_testkit import GUARD_OUTAGE_CHECKS, GuardOutageHarness
from fenced_testkit.servers import EtcdServer
from tests.guard_outage_harness import GuardedHarness, every_guard_outage, run_outage
from tests.outage_harness import own_server

pytestmark = pytest.mark.xdist_group("etcd")
server = own_server(EtcdServer)


class Harness(GuardedHarness):
    def __init__(self, runtime: Runtime, server: EtcdServer) -> None:
        super().__init__(runtime, server, Proxy(server.host, server.port, http2_reply))

    def _url(self, where: str, place: str, rule: Rule) -> str:
        return f"etcd://{where}?prefix={place}&rule={rule}"


@every_guard_outage
def test_outages(check: Check[GuardOutageHarness], colour: Colour, server: EtcdServer) -> None:
    run_outage(check, lambda runtime: Harness(runtime, server), colour)


def test_a_planted_bug_is_caught(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation's id is not looked for in the cell: a write whose reply was lost happens again."""
    monkeypatch.setattr(cellguard, "_happened", lambda operation, this: False)
    check = next(each for each in GUARD_OUTAGE_CHECKS if each.name.startswith("a_lost_reply_is_settled"))
    with pytest.raises(CheckFailed, match="once"):
        run_outage(check, lambda runtime: Harness(runtime, server), "blocking")
