"""The outage kit for guards, on Redis."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from fenced import timing
from fenced.decision import Rule
from fenced.guards.redis.scripts import COMMANDS
from fenced.testing import COLOURS, GUARD_OUTAGE_CHECKS, Check, Colour, GuardOutageHarness, run
from fenced.testing.faults import Proxy
from fenced.testing.servers import RedisServer
from tests.guard_outage_harness import CellOutageHarness, is_used_after_a_fork

pytestmark = pytest.mark.xdist_group("redis")


class Harness(CellOutageHarness):
    word = COMMANDS.sha.encode()


def address(host: str, port: int, place: str, rule: Rule) -> str:
    return f"redis://{host}:{port}?tag={place}&rule={rule}"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", GUARD_OUTAGE_CHECKS, ids=lambda check: check.name)
def test_outages(
    check: Check[GuardOutageHarness], colour: Colour, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check.name == "a_frozen_server":
        monkeypatch.setattr(timing, "CALL_SECONDS", 1.0)
    proxy = Proxy(server.host, server.port)
    run(check, lambda runtime: Harness(runtime, server, proxy, address), colour)


def test_forks(server: RedisServer) -> None:
    is_used_after_a_fork(address(server.host, server.port, secrets.token_hex(8), "retry"))
