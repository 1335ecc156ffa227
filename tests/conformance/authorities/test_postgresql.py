"""The authority kit on PostgreSQL, on a real server that restarts."""

import secrets

import pytest

from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, run
from fenced.values.contracts import Authority, Colour, Runtime
from fenced_testkit.servers import PostgresqlServer

BACKEND = "postgresql"

LATER = """
UPDATE fenced.attempt SET expires = expires - interval '{0} us', forget = forget - interval '{0} us'
"""


class Harness:
    """A random prefix of its own stands before the kit's namespaces: making a database takes longer than most checks.

    Time passes by moving all stored times back: the server's clock is nobody's to set.
    """

    def __init__(self, runtime: Runtime, server: PostgresqlServer, database: str) -> None:
        self.runtime = runtime
        self._server = server
        self._database = database
        self._url = server.url(database)
        self._prefix = secrets.token_hex(8)
        self._opened: list[PostgresqlAuthority] = []

    async def authority(self, namespace: str = "default") -> Authority:
        authority = PostgresqlAuthority(self._url, self.runtime, namespace=f"{self._prefix}/{namespace}")
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


@pytest.fixture(scope="session")
def database(postgresql_server: PostgresqlServer) -> str:
    return postgresql_server.create_database()


# proves authority postgresql: pushed, namespace-order
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_postgresql(
    check: Check[AuthorityHarness], colour: Colour, postgresql_server: PostgresqlServer, database: str
) -> None:
    run(check, lambda runtime: Harness(runtime, postgresql_server, database), colour)
