"""The usual cases, which are scripts of their own, against the lease algorithm that they stand for."""

from __future__ import annotations

import pytest

from fenced.stores.mariadb.authority.authority import MariadbAuthority
from fenced.testing import AUTHORITY_CHECKS, AuthorityHarness, Check, run
from fenced.values.contracts import Colour
from fenced_testkit.servers import MariadbServer
from tests.colours import alternating
from tests.conformance.authorities.test_mariadb import Harness


@pytest.fixture(scope="module")
def database(mariadb_server: MariadbServer) -> str:
    return mariadb_server.create_database()


@pytest.mark.parametrize(("check", "colour"), alternating(AUTHORITY_CHECKS))
def test_the_kit_without_shortcuts(
    check: Check[AuthorityHarness],
    colour: Colour,
    mariadb_server: MariadbServer,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MariadbAuthority, "shortens", False)
    run(check, lambda runtime: Harness(runtime, mariadb_server, database), colour)
