"""What the tests of the PostgreSQL guard share."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

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
