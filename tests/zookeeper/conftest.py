"""Two clients, and one of another kind, on the server that the tests share."""

import secrets
from collections.abc import Iterator

import pytest

from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from tests.zookeeper.acting import opened
from tests.zookeeper.raw import Raw


@pytest.fixture
def pair(zookeeper_url: str) -> Iterator[tuple[ZooKeeperAuthority, ZooKeeperAuthority]]:
    """Two clients of one namespace."""
    namespace = secrets.token_hex(8)
    with opened(zookeeper_url, namespace) as one, opened(zookeeper_url, namespace) as two:
        yield one, two


@pytest.fixture
def raw(zookeeper_url: str) -> Iterator[Raw]:
    with Raw(zookeeper_url) as client:
        yield client
        client.end_session()
