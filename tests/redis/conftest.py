"""What the tests of the guard share: the shared server, and a tag that no other test has."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import redis


@pytest.fixture
def tag() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client
