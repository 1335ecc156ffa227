"""ZooKeeper: the lock of kazoo, and what the server is asked."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from kazoo.client import KazooClient  # type: ignore[import-untyped]

from bench import requests
from bench.contending import WARM_UP, Kind, Lock, crew_of
from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians
from bench.peers import NAME, compare, ourselves
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.zookeeper.address import ZooKeeperAddress
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import dial
from fenced_testkit.servers import ZooKeeperServer

SETTINGS = {"tickTime": "2000", "minSessionTimeout": "4000", "maxSessionTimeout": "40000"}
"""ZooKeeper's own defaults; the servers of the tests are quicker to give up."""
BARE_PAIRS = 1000


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with ZooKeeperServer(SETTINGS) as server:
        name = f"ZooKeeper {server.version}"
        url = server.url()
        yield from compare(name, "zookeeper", ourselves(url), [_kazoo(server)], effort)
        yield _bare(server, effort)
        # A hand-over is a release, and a look of the next waiter: a sync and two reads, sent together.
        settle = requests.TTL_SECONDS / 2
        yield from requests.run(
            "zookeeper", url, lambda: _received(server), effort, settle=settle, hand_over=4.1
        )


def _received(server: ZooKeeperServer) -> int:
    """What clients have sent; this question is not counted, since it opens no session."""
    words = dict(line.split("\t") for line in server.four_letter("mntr").splitlines() if "\t" in line)
    return int(float(words["zk_packets_received"]))


def _kazoo(server: ZooKeeperServer) -> Kind:
    def crew(stack: contextlib.ExitStack, count: int) -> list[Lock]:
        locks: list[Lock] = []
        for _ in range(count):
            client = KazooClient(f"{server.host}:{server.port}")
            client.start()
            stack.callback(client.close)
            stack.callback(client.stop)
            locks.append(client.Lock(f"/{NAME}"))
        return locks

    # In a hand-over the next waiter reads its queue, as kazoo's does (docs/decisions/0077).
    targets = {"pair": 1.25, "2 waiters": 1.1, "16 waiters": 1.1, "64 waiters": 1.1}
    note = "no token; a thread per client"
    return Kind("kazoo", "kazoo Lock", crew, targets=targets, note=note)


def _bare(server: ZooKeeperServer, effort: Effort) -> Figure:
    """Our pair, against one node that is created and deleted: two transactions, which no lock can do without."""
    runtime, address = BlockingRuntime(), ZooKeeperAddress(server.url())
    hello = jute.Connected(30_000, 0, b"\0" * 16)
    link, _ = step(dial(address, address.members[0], runtime, hello, 0, runtime.now() + 5))
    acl = jute.acl([("world", "anyone")])
    requests = [
        jute.frame(struct.pack(">i", 1) + request)
        for request in (jute.create("/bare", b"", acl, jute.EPHEMERAL), jute.delete("/bare"))
    ]
    assert isinstance(link, socket.socket)
    link.setblocking(True)

    def bare() -> None:
        for request in requests:
            link.sendall(request)
            link.recv(4096)

    with contextlib.ExitStack() as stack:
        stack.enter_context(link)
        (lock,) = crew_of(ourselves(server.url()), stack, 1)

        def ours() -> None:
            lock.acquire()
            lock.release()

        mine, least = medians(ours, bare, rounds=effort.of(BARE_PAIRS), warm_up=effort.size(WARM_UP))
    return ratio("zookeeper.bare", "acquire and release", mine, least, against="one node created and deleted")
