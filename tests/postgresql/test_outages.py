"""The outage kit on PostgreSQL."""

from collections.abc import Iterator
from typing import ClassVar

import pytest

from fenced.authorities.postgresql import PostgresqlAuthority
from fenced.contracts import Authority, Colour, Runtime
from fenced.testing import COLOURS, OUTAGE_CHECKS, Check, OutageHarness, run
from fenced.testing.faults import Proxy
from fenced.testing.servers import PostgresqlServer

pytestmark = pytest.mark.xdist_group("serial")


class Harness:
    words: ClassVar = {"ask": b"fenced_ask", "renew": b"fenced_renew", "release": b"fenced_release"}

    def __init__(self, runtime: Runtime, server: PostgresqlServer, database: str) -> None:
        self.runtime = runtime
        self.server = server
        self.proxy = Proxy(server.host, server.port)
        self._database = database
        self._opened: list[PostgresqlAuthority] = []

    async def authority(self) -> Authority:
        return await self._open(self.proxy.port)

    async def direct(self) -> Authority:
        return await self._open(self.server.port)

    async def _open(self, port: int) -> Authority:
        url = self.server.url(self._database).replace(f":{self.server.port}/", f":{port}/")
        authority = PostgresqlAuthority(url, self.runtime)
        await authority.open()
        self._opened.append(authority)
        return authority

    async def close(self) -> None:
        for authority in self._opened:
            await authority.close()
        self.proxy.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with PostgresqlServer() as server:
        yield server


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", OUTAGE_CHECKS, ids=lambda check: check.name)
def test_outages(check: Check[OutageHarness], colour: Colour, server: PostgresqlServer) -> None:
    database = server.create_database()
    run(check, lambda runtime: Harness(runtime, server, database), colour)
