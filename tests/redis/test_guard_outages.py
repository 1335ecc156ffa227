"""The outage kit for guards, on Redis."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from fenced import timing
from fenced.contracts import NamedValues, Runtime
from fenced.decision import Rule
from fenced.guards.redis.scripts import COMMANDS
from fenced.guards.redis.values import RedisValues
from fenced.testing import COLOURS, GUARD_OUTAGE_CHECKS, Check, Colour, GuardOutageHarness, run
from fenced.testing.faults import Proxy
from fenced.testing.servers import RedisServer, Server

pytestmark = pytest.mark.xdist_group("redis")


class Harness:
    word = COMMANDS.sha.encode()

    def __init__(self, runtime: Runtime, server: RedisServer) -> None:
        self.runtime = runtime
        self.server: Server = server
        self.proxy = Proxy(server.host, server.port)
        self._prefix = secrets.token_hex(8)
        self._opened: list[RedisValues] = []

    async def guard(self, rule: Rule = "retry") -> NamedValues:
        return await self._open(f"redis://{self.proxy.host}:{self.proxy.port}", rule)

    async def direct(self, rule: Rule = "retry") -> NamedValues:
        return await self._open(f"redis://{self.server.host}:{self.server.port}", rule)

    async def _open(self, url: str, rule: Rule) -> NamedValues:
        guard = RedisValues(url, self.runtime, tag=self._prefix + rule, rule=rule)
        self._opened.append(guard)
        await guard.open()
        return guard

    async def close(self) -> None:
        for guard in self._opened:
            await guard.close()
        self.proxy.stop()


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
    run(check, lambda runtime: Harness(runtime, server), colour)
