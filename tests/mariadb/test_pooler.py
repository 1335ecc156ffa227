"""Leases behind a pooler in transaction mode: each transaction in another session of the server."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest

import fenced
from fenced.errors import NotGranted
from fenced.stores.mariadb.authority import rows, session, settings
from fenced.testing import AUTHORITY_CHECKS, AuthorityHarness, Check, run
from fenced.values.contracts import Colour, Runtime
from fenced_testkit.servers import MariadbServer
from tests.colours import alternating
from tests.conformance.authorities.test_mariadb import Harness
from tests.mariadb.pooler import TransactionPooler

POOLED = [check for check in AUTHORITY_CHECKS if check.name != "tokens_rise_over_a_restart"]
FRESH = (1, 1, 1)


class PooledHarness(Harness):
    """Clients behind the pooler; only the clock knows the server itself."""

    def __init__(
        self, runtime: Runtime, server: MariadbServer, database: str, pooler: TransactionPooler
    ) -> None:
        super().__init__(runtime, server, database)
        self._url = f"mariadb://root@{pooler.host}:{pooler.port}/{database}"

    async def restart(self) -> None:
        """Of the clients alone: the pooler's sessions are of this start of the server."""
        await self.close()


@pytest.fixture(scope="module")
def database(mariadb_server: MariadbServer) -> str:
    return mariadb_server.create_database()


@pytest.fixture
def pooler(mariadb_server: MariadbServer, database: str) -> Iterator[TransactionPooler]:
    with TransactionPooler(mariadb_server.port, database) as pooler:
        yield pooler


# proves authority mariadb: any-pooler
@pytest.mark.parametrize(("check", "colour"), alternating(POOLED))
def test_the_kit_behind_a_pooler_in_transaction_mode(
    check: Check[AuthorityHarness],
    colour: Colour,
    mariadb_server: MariadbServer,
    database: str,
    pooler: TransactionPooler,
) -> None:
    run(check, lambda runtime: PooledHarness(runtime, mariadb_server, database, pooler), colour)
    assert pooler.states() == [FRESH] * 4, "no state of a session outlives a transaction"


def test_transactions_wander_from_session_to_session(pooler: TransactionPooler, database: str) -> None:
    url = f"mariadb://root@{pooler.host}:{pooler.port}/{database}"
    with fenced.Client(url) as one, fenced.Client(url) as two:
        for number in range(12):
            with one.hold("a"), two.hold(f"b/{number}"), pytest.raises(NotGranted):
                two.acquire("a", wait=0)
    assert min(pooler.transactions) > 5
    assert pooler.states() == [FRESH] * 4


def test_no_statement_makes_a_pooler_keep_its_session() -> None:
    """ProxySQL gives a client a session of its own for good once it has seen an @, as of a variable."""
    texts = [*rows.SQL.values(), *settings.QUERIES, inspect.getsource(session)]
    assert not [text for text in texts if re.search(r"(?<!^)@(?!dataclass)", text.replace("\n@", "\n"))]
