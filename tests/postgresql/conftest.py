"""What the tests of the PostgreSQL guard share."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import fenced

Db = psycopg.Connection[Any]


@pytest.fixture
def connect(postgresql_url: str) -> Iterator[Callable[[], Db]]:
    opened: list[Db] = []

    def one() -> Db:
        opened.append(psycopg.connect(postgresql_url, autocommit=True))
        return opened[-1]

    yield one
    for connection in opened:
        connection.close()


@pytest.fixture(scope="session")
def lost_lease() -> Iterator[fenced.Lease]:
    """The lease of orders/44, which its holder has lost."""
    with fenced.Client("memory:lost") as client:
        lease = client.acquire("orders/44", max_hold=0.1)
        assert lease.wait_lost()
        yield lease
