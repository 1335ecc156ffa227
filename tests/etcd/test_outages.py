"""The outage kit on etcd."""

import secrets
from collections.abc import Iterator

import pytest

from fenced.authorities.etcd import EtcdAuthority
from fenced.contracts import Authority, Colour, Runtime
from fenced.testing import COLOURS, OUTAGE_CHECKS, Check, OutageHarness, run
from fenced.testing.faults import Proxy, http2_reply
from fenced.testing.servers import EtcdServer

pytestmark = pytest.mark.xdist_group("serial")

KEEP_ALIVE = b"\0\0\0\0\x0a\x08"
"""A message of gRPC's with ten bytes, of which a number takes nine: a lease of ours and nothing else."""


class Harness:
    def __init__(self, runtime: Runtime, server: EtcdServer) -> None:
        self.runtime = runtime
        self.server = server
        self.proxy = Proxy(server.host, server.port, http2_reply)
        self._namespace = secrets.token_hex(8)
        self.words = {"ask": b'"state":"granted"', "renew": KEEP_ALIVE, "release": b'"state":"released"'}
        self._opened: list[EtcdAuthority] = []

    async def authority(self) -> Authority:
        return await self._open(f"etcd://{self.proxy.host}:{self.proxy.port}")

    async def direct(self) -> Authority:
        return await self._open(self.server.url())

    async def _open(self, url: str) -> Authority:
        authority = EtcdAuthority.at(url, self.runtime, self._namespace)
        self._opened.append(authority)
        await authority.open()
        return authority

    async def close(self) -> None:
        for authority in self._opened:
            await authority.close()
        self.proxy.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", OUTAGE_CHECKS, ids=lambda check: check.name)
def test_outages(check: Check[OutageHarness], colour: Colour, server: EtcdServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)
