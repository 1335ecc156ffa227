"""What the tests of ZooKeeper do again and again."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.authority.session import ZooKeeperSession
from fenced.stores.zookeeper.authority.tree import Paths
from tests.zookeeper.raw import Raw

RUNTIME = BlockingRuntime()

# In a multi: delete a node whose path is as long as an attempt's. An ask deletes nodes of names, which are shorter.
ENDING = b"\x00\x00\x00\x02\x00\xff\xff\xff\xff" + bytes([0, 0, 0, len(f"/fenced/{16 * 'n'}/a/{32 * 'i'}")])
WORDS = {
    "ask": b"\x00\x00\x00\x0f\x00\xff\xff\xff\xff",  # in a multi: create
    "renew": b"/keep",
    "release": ENDING,
    "withdraw": ENDING,
}


@contextmanager
def opened(
    url: str, namespace: str, runtime: Any = RUNTIME, kind: type[ZooKeeperAuthority] = ZooKeeperAuthority
) -> Iterator[ZooKeeperAuthority]:
    authority = kind.at(url, runtime, namespace)
    try:
        step(authority.open())
        yield authority
    finally:
        step(authority.close())


Pair = tuple[ZooKeeperAuthority, ZooKeeperAuthority]


def paths_of(authority: ZooKeeperAuthority) -> Paths:
    """Where its nodes are, to look at them with a client of another make."""
    return authority._nodes.paths


def session_of(authority: ZooKeeperAuthority, ttl: float) -> ZooKeeperSession:
    """Its session for leases of this ttl, to do something to it."""
    return authority._own.session(ttl)


def places(raw: Raw, authority: ZooKeeperAuthority, name: str = "orders") -> list[str]:
    path = paths_of(authority).name(name)
    return [f"{path}/{child}" for child in raw.children(path)]


def woken(authority: ZooKeeperAuthority, public: str) -> None:
    limit = time.monotonic() + 90
    while public not in step(authority.next_wakeups(RUNTIME.now() + 0.5)):
        assert time.monotonic() < limit
