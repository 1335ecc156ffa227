"""The outage kit on PostgreSQL."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from fenced.authorities import postgresql
from fenced.authorities.postgresql import PostgresqlAuthority
from fenced.contracts import Authority, Colour, Runtime
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.runtime.pool import Pool
from fenced.testing import COLOURS, OUTAGE_CHECKS, Check, CheckFailed, OutageHarness, run
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


class NothingIsRepeated(Pool[Any]):
    """A connection that broke while it was idle fails its next request."""

    async def request(self, work: Any, until: float, *, repeatable: bool = True) -> Any:
        return await super().request(work, until, repeatable=False)


class UnknownIsNo(Pool[Any]):
    """A request without a reply is told as one that did not happen."""

    async def request(self, work: Any, until: float, *, repeatable: bool = True) -> Any:
        try:
            return await super().request(work, until, repeatable=repeatable)
        except Indeterminate as error:
            raise Unavailable(str(error)) from error


class ConnectionsAreKept(Pool[Any]):
    """Who gives up waiting puts the connection back, with a reply still under way."""

    def drop(self, connection: Any) -> None:
        self.give(connection)

    def close_idle(self) -> None:
        return


@pytest.mark.parametrize("planted", [NothingIsRepeated, UnknownIsNo, ConnectionsAreKept])
def test_the_kit_can_fail(
    planted: type[Pool[Any]], server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "Pool", planted)
    quick = [
        check for check in OUTAGE_CHECKS if check.name.startswith(("a_cut", "an_unknown", "a_late_reply"))
    ]
    with pytest.raises((CheckFailed, FencedError, TimeoutError)):
        for check in quick:
            database = server.create_database()
            run(check, lambda runtime, name=database: Harness(runtime, server, name), "blocking")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with PostgresqlServer() as server:
        yield server


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", OUTAGE_CHECKS, ids=lambda check: check.name)
def test_outages(check: Check[OutageHarness], colour: Colour, server: PostgresqlServer) -> None:
    database = server.create_database()
    run(check, lambda runtime: Harness(runtime, server, database), colour)
