"""What the tests of MariaDB share."""

from collections.abc import Iterator

import pytest

from fenced_testkit.servers import MariadbServer, mariadb_or_mysql


@pytest.fixture(scope="session")
def mariadb_tls_server() -> Iterator[MariadbServer]:
    """One that also speaks TLS."""
    with mariadb_or_mysql(tls=True) as server:
        yield server
