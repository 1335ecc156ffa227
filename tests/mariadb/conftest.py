"""What the tests of MariaDB share."""

from collections.abc import Iterator

import pytest

from fenced_testkit.servers import MariadbServer


@pytest.fixture(scope="session")
def mariadb_tls_server() -> Iterator[MariadbServer]:
    """One that also speaks TLS."""
    with MariadbServer(tls=True) as server:
        yield server
