"""The outage kit for guards, on etcd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fenced import timing
from fenced.decision import Rule
from fenced.guards.etcd.values import EtcdCells
from fenced.testing import COLOURS, GUARD_OUTAGE_CHECKS, Check, Colour, GuardOutageHarness, run
from fenced.testing.faults import Proxy
from fenced.testing.faults.proxy import http2_reply
from fenced.testing.kit import CheckFailed
from fenced.testing.servers import EtcdServer
from fenced.wire.etcd.messages import TXN, TxnReply
from tests.guard_outage_harness import CellOutageHarness

pytestmark = pytest.mark.xdist_group("etcd")


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


def test_a_planted_bug_is_caught(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that the wire repeats after a lost reply fails its own compares, and the write happens again."""

    async def write_repeatedly(cells: EtcdCells, request: bytes) -> TxnReply:
        return TxnReply(await cells.wire.call(TXN, request, cells._until()))

    monkeypatch.setattr(EtcdCells, "_write", write_repeatedly)
    check = next(each for each in GUARD_OUTAGE_CHECKS if each.name.startswith("a_lost_reply_is_settled"))
    proxy = Proxy(server.host, server.port, http2_reply)
    with pytest.raises(CheckFailed, match="once"):
        run(check, lambda runtime: CellOutageHarness(runtime, server, proxy, address), "blocking")
