"""The outage kit on Redis."""

import secrets
from collections.abc import Iterator

import pytest

from fenced.authorities.redis import RedisAuthority
from fenced.authorities.redis.scripts import Script
from fenced.contracts import Authority, Colour, Runtime
from fenced.testing import COLOURS, OUTAGE_CHECKS, Check, OutageHarness, run
from fenced.testing.faults import Proxy
from fenced.testing.servers import RedisServer

pytestmark = pytest.mark.xdist_group("serial")


class Harness:
    def __init__(self, runtime: Runtime, server: RedisServer) -> None:
        self.runtime = runtime
        self.server = server
        self.proxy = Proxy(server.host, server.port)
        self._namespace = secrets.token_hex(8)
        self.words = {name: Script(name, "any").sha.encode() for name in ("ask", "renew", "release")}
        self._opened: list[RedisAuthority] = []

    async def authority(self) -> Authority:
        return await self._open(f"redis://{self.proxy.host}:{self.proxy.port}/0")

    async def direct(self) -> Authority:
        return await self._open(self.server.url())

    async def _open(self, url: str) -> Authority:
        authority = RedisAuthority.at(url, self.runtime, self._namespace)
        self._opened.append(authority)
        await authority.open()
        return authority

    async def close(self) -> None:
        for authority in self._opened:
            await authority.close()
        self.proxy.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", OUTAGE_CHECKS, ids=lambda check: check.name)
def test_outages(check: Check[OutageHarness], colour: Colour, server: RedisServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)
