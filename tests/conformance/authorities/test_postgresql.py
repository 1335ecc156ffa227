"""The authority kit on PostgreSQL: a database of its own for each check, and a real server that restarts."""

from urllib.parse import urlsplit

import pytest

from fenced.authorities.postgresql.authority import PostgresqlAuthority
from fenced.contracts import Authority, Colour, Runtime
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, run
from fenced.testing.servers import PostgresqlServer

BACKEND = "postgresql"

LATER = """
UPDATE fenced.attempt SET expires = expires - interval '{0} us', forget = forget - interval '{0} us'
"""


class Harness:
    """Time passes by moving all stored times back: the server's clock is nobody's to set."""

    def __init__(self, runtime: Runtime, server: PostgresqlServer, url: str) -> None:
        self.runtime = runtime
        self._server = server
        self._url = url
        self._database = urlsplit(url).path[1:]
        self._opened: list[PostgresqlAuthority] = []

    async def authority(self, namespace: str = "default") -> Authority:
        authority = PostgresqlAuthority(self._url, self.runtime, namespace=namespace)
        await authority.open()
        self._opened.append(authority)
        return authority

    async def pass_time(self, seconds: float) -> None:
        self._server.execute(LATER.format(round(seconds * 1e6)), self._database)

    async def restart(self) -> None:
        await self.close()
        self._server.restart()

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()


# proves authority postgresql: pushed, namespace-order
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_postgresql(
    check: Check[AuthorityHarness], colour: Colour, postgresql_server: PostgresqlServer, postgresql_url: str
) -> None:
    run(check, lambda runtime: Harness(runtime, postgresql_server, postgresql_url), colour)
