"""The outage kit for guards, on etcd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fenced import timing
from fenced.decision import Rule
from fenced.testing import COLOURS, GUARD_OUTAGE_CHECKS, Check, Colour, GuardOutageHarness, run
from fenced.testing.faults import Proxy
from fenced.testing.faults.proxy import http2_reply
from fenced.testing.servers import EtcdServer
from tests.guard_outage_harness import CellOutageHarness

pytestmark = pytest.mark.xdist_group("serial")


def address(host: str, port: int, place: str, rule: Rule) -> str:
    return f"etcd://{host}:{port}?prefix={place}&rule={rule}"


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_OUTAGE_CHECKS, ids=lambda check: check.name)
def test_outages(
    check: Check[GuardOutageHarness], colour: Colour, server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check.name == "a_frozen_server":
        monkeypatch.setattr(timing, "CALL_SECONDS", 1.0)
    proxy = Proxy(server.host, server.port, http2_reply)
    run(check, lambda runtime: CellOutageHarness(runtime, server, proxy, address), colour)
