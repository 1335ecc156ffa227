"""The authority kit on MariaDB, on a real server that restarts."""

import secrets

import pytest

from fenced.stores.mariadb.authority.authority import MariadbAuthority
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, run
from fenced.values.contracts import Authority, Colour, Runtime
from fenced_testkit.servers import MariadbServer

BACKEND = "mariadb"

LATER = "UPDATE fenced_attempt SET expires = expires - {0}, forget = forget - {0}"


class Harness:
    """A random prefix of its own stands before the kit's namespaces: making a database takes longer than most checks.

    Time passes by moving all stored times back: the server's clock is nobody's to set.
    """

    def __init__(self, runtime: Runtime, server: MariadbServer, database: str) -> None:
        self.runtime = runtime
        self._server = server
        self._database = database
        self._url = server.url(database)
        self._prefix = secrets.token_hex(8)
        self._opened: list[MariadbAuthority] = []

    async def authority(self, namespace: str = "default") -> Authority:
        authority = MariadbAuthority(self._url, self.runtime, namespace=f"{self._prefix}/{namespace}")
        await authority.open()
        self._opened.append(authority)
        return authority

    async def pass_time(self, seconds: float) -> None:
        self._server.execute(LATER.format(round(seconds * 1e9)), self._database)

    async def restart(self) -> None:
        await self.close()
        self._server.restart()

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()


@pytest.fixture(scope="session")
def database(mariadb_server: MariadbServer) -> str:
    return mariadb_server.create_database()


# proves authority mariadb: namespace-order
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_mariadb(
    check: Check[AuthorityHarness], colour: Colour, mariadb_server: MariadbServer, database: str
) -> None:
    run(check, lambda runtime: Harness(runtime, mariadb_server, database), colour)
