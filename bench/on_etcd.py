"""etcd: its own lock service, aetcd, etcd3gw, and what the server is asked."""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aetcd  # type: ignore[import-untyped]
import etcd3gw
import grpc
import grpc.aio

from bench import requests
from bench.contending import WARM_UP, AsyncLock, Kind, Lock, crew_of, drains
from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians
from bench.peers import CYCLES, NAME, Contest, compare, ourselves, ourselves_apart
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.stores.etcd.wire.protobuf import data, fields, integer, raw
from fenced_testkit.servers import EtcdServer

TTL_SECONDS = 600
BARE_PAIRS = 1000
# Ours runs as "best-effort": the usual server, Debian's, has a version that a strict client refuses.
DEFAULTS = {"heartbeat-interval": "100", "election-timeout": "1000"}
LOCK, UNLOCK = "/v3lockpb.Lock/Lock", "/v3lockpb.Lock/Unlock"
_KEEP_ALIVE = 'grpc_method="LeaseKeepAlive"'


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with EtcdServer(DEFAULTS) as server:
        status = server.status()
        name = f"etcd {status.version if status else ''}"
        peers = [_v3lock(server), _aetcd(server), _etcd3gw(server)]
        yield from compare(name, "etcd", ourselves(server.url(), "best-effort"), peers, effort)
        yield from _between_clients(name, server, effort)
        yield _bare(server, effort)
        yield from requests.run(
            "etcd", server.url(), lambda: _requests(server), effort, guarantee="best-effort"
        )


def _requests(server: EtcdServer) -> int:
    """Messages that clients sent, by the server's own count, but for those that keep a lease alive."""
    with urllib.request.urlopen(f"{server.client_url}/metrics") as page:
        text = page.read().decode()
    counts = re.findall(r"^grpc_server_msg_received_total\{([^}]*)\} (\S+)$", text, re.MULTILINE)
    return round(sum(float(count) for labels, count in counts if _KEEP_ALIVE not in labels))


# Peers.


@dataclass
class _V3Lock:
    """etcd's own lock service. A lease can hold a name once only, so each contender has its own."""

    channel: Any
    lease: int
    key: bytes = b""

    def acquire(self) -> None:
        call = self.channel.unary_unary(LOCK, None, None)
        self.key = _locked(call(data(1, NAME.encode()) + integer(2, self.lease)))

    def release(self) -> None:
        self.channel.unary_unary(UNLOCK, None, None)(data(1, self.key))


@dataclass
class _AsyncV3Lock:
    channel: Any
    lease: int
    key: bytes = b""

    async def acquire(self) -> None:
        call = self.channel.unary_unary(LOCK, None, None)
        self.key = _locked(await call(data(1, NAME.encode()) + integer(2, self.lease)))

    async def release(self) -> None:
        await self.channel.unary_unary(UNLOCK, None, None)(data(1, self.key))


def _locked(reply: bytes) -> bytes:
    return next(raw(value) for field, value in fields(reply) if field == 2)


def _v3lock(server: EtcdServer) -> Kind:
    target = f"{server.host}:{server.port}"

    def crew(stack: contextlib.ExitStack, count: int) -> list[Lock]:
        channel = stack.enter_context(grpc.insecure_channel(target))
        grant: Any = channel.unary_unary(messages.LEASE_GRANT, None, None)
        replies = [grant(integer(1, TTL_SECONDS)) for _ in range(count)]
        return [_V3Lock(channel, messages.lease_reply(reply)[0]) for reply in replies]

    async def async_crew(stack: contextlib.AsyncExitStack, count: int) -> list[AsyncLock]:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        grant: Any = channel.unary_unary(messages.LEASE_GRANT, None, None)
        replies = [await grant(integer(1, TTL_SECONDS)) for _ in range(count)]
        return [_AsyncV3Lock(channel, messages.lease_reply(reply)[0]) for reply in replies]

    targets = {"pair": 0.95, "2 waiters": 0.6, "16 waiters": 0.6, "64 waiters": 0.6}
    note = "no renewal, nothing notices a loss"
    return Kind("v3lock", "v3lock over gRPC", crew, async_crew, targets=targets, note=note)


def _between_clients(name: str, server: EtcdServer, effort: Effort) -> Iterator[Figure]:
    """The same hand-over from one client to another: the release cannot grant for it."""
    peer = replace(_v3lock(server), targets={})
    contest = Contest(
        f"{name}, a client each",
        "etcd.apart",
        "blocking",
        ourselves_apart(server.url(), "best-effort"),
        [peer],
    )
    for waiters in (2, 16)[: effort.size(2)]:
        times = drains(contest.kinds, waiters, effort.of(CYCLES[waiters]))
        yield from contest.of_drains(waiters, times)


def _bare(server: EtcdServer, effort: Effort) -> Figure:
    """Our pair, against a key that is written and deleted: two transactions, which no lock can do without."""
    runtime = BlockingRuntime()
    wire = EtcdWire(EtcdAddress(server.url()), runtime)
    transactions = [
        messages.txn([messages.absent(b"bare")], [messages.put(b"bare", b"v" * 170)]),
        messages.txn([messages.present(b"bare")], [messages.delete(b"bare")]),
    ]

    def bare() -> None:
        for transaction in transactions:
            step(wire.call(messages.TXN, transaction, runtime.now() + 5))

    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        (lock,) = crew_of(ourselves(server.url(), "best-effort"), stack, 1)

        def ours() -> None:
            lock.acquire()
            lock.release()

        mine, least = medians(ours, bare, rounds=effort.of(BARE_PAIRS), warm_up=effort.size(WARM_UP))
    return ratio("etcd.bare", "acquire and release", mine, least, against="one key written and deleted")


def _aetcd(server: EtcdServer) -> Kind:
    async def async_crew(stack: contextlib.AsyncExitStack, count: int) -> list[AsyncLock]:
        clients = [
            await stack.enter_async_context(aetcd.Client(server.host, server.port)) for _ in range(count)
        ]
        return [client.lock(NAME.encode(), ttl=TTL_SECONDS) for client in clients]

    targets = {"pair": 1.8, "2 waiters": 2, "16 waiters": 2, "64 waiters": 2}
    return Kind(
        "aetcd", "aetcd Lock", None, async_crew, targets=targets, note="the whole herd wakes; no renewal"
    )


@dataclass
class _Gateway:
    """etcd3gw's lock, which never waits: whoever wants it looks again and again."""

    lock: Any

    def acquire(self) -> None:
        while not self.lock.acquire():
            time.sleep(POLL_SECONDS)

    def release(self) -> None:
        self.lock.release()


POLL_SECONDS = 0.1


def _etcd3gw(server: EtcdServer) -> Kind:
    def crew(stack: contextlib.ExitStack, count: int) -> list[Lock]:
        clients = [etcd3gw.client(host=server.host, port=server.port, api_path="/v3/") for _ in range(count)]
        for client in clients:
            stack.callback(client.session.close)
        return [_Gateway(client.lock(NAME, ttl=TTL_SECONDS)) for client in clients]

    targets = {"pair": 4.0, "2 waiters": 2.0, "16 waiters": 2.0, "64 waiters": 2.0}
    note = "it does not wait: polled every 100 ms; no renewal"
    return Kind("etcd3gw", "etcd3gw Lock", crew, poll_seconds=POLL_SECONDS, targets=targets, note=note)
