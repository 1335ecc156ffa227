"""What a guard in Redis costs: a fenced SET against a SET, on one connection, on fifty, and in a saturated pipeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians
from fenced.guards.redis.clients import ClientChannel
from fenced.guards.redis.fence import FenceOptions, RedisFence
from fenced.model import Stamp
from fenced.redis import RedisGuard
from fenced.runtime.blocking import step
from fenced.testing.servers import RedisServer
from fenced.wire.resp import command

ROUNDS = 4000
CONNECTIONS = 50
PIPELINE = 16
BATCHES = 40
TURNS = 9
VALUE = b"x" * 100
DEFAULTS = {"appendonly": "no", "save": "3600 1 300 100 60 10000"}
"""As Redis comes: snapshots now and then, no append-only file."""
STAMP = Stamp("00000000000000aa", ("stock",), 5, None, f"{5:032x}")


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with RedisServer(DEFAULTS) as server, redis.Redis.from_url(server.url()) as client:
        with fenced.Client("memory:") as leases, leases.hold("stock", ttl=3600) as lease:
            yield from _one_connection(client, lease, "as Redis comes", "redis", 1.4, effort)
        plain, guarded = _requests(client)
        for key, what, pipeline, target in (
            ("many", f"{CONNECTIONS} connections, one request each at a time", 1, 1.3),
            (
                "saturated",
                f"{CONNECTIONS} connections with {PIPELINE} requests each at a time",
                PIPELINE,
                4.5,
            ),
        ):
            theirs, ours = _loads(server, (plain, guarded), pipeline, effort)
            yield ratio(
                f"guard.redis.{key}", f"fenced SET, {what}", ours, theirs, target=target, against="SET"
            )
    with (
        RedisServer() as server,
        redis.Redis.from_url(server.url()) as client,
        fenced.Client("memory:") as leases,
        leases.hold("stock", ttl=3600) as lease,
    ):
        yield from _one_connection(client, lease, "appendfsync always", "redis_aof", None, effort)


def _one_connection(
    client: redis.Redis, lease: fenced.Lease, where: str, key: str, target: float | None, effort: Effort
) -> Iterator[Figure]:
    """As a program writes it, with redis-py on both sides."""
    guard = RedisGuard(guarantee="best-effort")

    def plain() -> None:
        client.set("plain", VALUE)

    def guarded() -> None:
        with guard.transaction(client, lease, "stock") as tx:
            tx.set("fenced", VALUE)

    tokens = iter(range(6, 10**9))

    def newer() -> None:
        token = next(tokens)
        stamp = Stamp(lease.realm, ("new",), token, None, f"{token:032x}")
        with guard.transaction(client, stamp, "new") as tx:
            tx.set("fenced", VALUE)

    theirs, ours, new = medians(plain, guarded, newer, rounds=effort.of(ROUNDS), warm_up=200)
    against = f"SET, {where}"
    yield ratio(
        f"guard.{key}.one", "fenced SET, one connection", ours, theirs, target=target, against=against
    )
    yield ratio(f"guard.{key}.new", "the same, a new token each", new, theirs, against=against)


def _requests(client: redis.Redis) -> tuple[bytes, bytes]:
    """A SET, and the request by which the guard sends one, as bytes: then the server's time counts, and not ours."""
    caught: list[bytes] = []

    class Recording(ClientChannel):
        async def run(self, script, keys, arguments, *, again, confirm=False):  # type: ignore[no-untyped-def]
            caught.append(command("EVALSHA", script.sha, len(keys), *keys, *arguments))
            return await super().run(script, keys, arguments, again=again, confirm=confirm)

    fence = RedisFence(Recording(client, False), FenceOptions("requests", guarantee="best-effort"))
    step(fence.open())
    for _ in range(3):
        step(fence.step(STAMP, ["stock"], commands=[("SET", "fenced", VALUE)]))
    return command("SET", "plain", VALUE), caught[-1]


def _loads(
    server: RedisServer, requests: tuple[bytes, bytes], pipeline: int, effort: Effort
) -> tuple[float, float]:
    """The medians of the seconds that each takes, turn by turn, on the same connections."""
    clients = [redis.Redis.from_url(server.url()) for _ in range(CONNECTIONS)]
    connections = [client.connection_pool.get_connection() for client in clients]
    sockets: list[Any] = [connection._sock for connection in connections]
    batches = effort.of(BATCHES) * (PIPELINE if pipeline == 1 else 1)
    times: tuple[list[float], list[float]] = ([], [])
    lengths = [_reply_length(sockets[0], request) for request in requests]
    for _ in range(TURNS):
        for request, length, found in zip(requests, lengths, times, strict=True):
            found.append(_drive(sockets, request * pipeline, length * pipeline, batches))
    for client, connection in zip(clients, connections, strict=True):
        client.connection_pool.release(connection)
        client.close()
    plain, guarded = (statistics.median(each) / (CONNECTIONS * batches * pipeline) for each in times)
    return plain, guarded


def _reply_length(link: Any, request: bytes) -> int:
    link.sendall(request)
    return len(link.recv(4096))


def _drive(links: list[Any], batch: bytes, length: int, batches: int) -> float:
    """Each connection sends its next batch when it has the replies to the last one; returns the seconds for all."""
    began = time.perf_counter()
    for _ in range(batches):
        for link in links:
            link.sendall(batch)
        for link in links:
            left = length
            while left:
                left -= len(link.recv(left))
    return time.perf_counter() - began
