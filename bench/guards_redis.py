"""What a guard in Redis costs: a fenced SET against a SET, on one connection, on fifty, and in a saturated pipeline."""

from __future__ import annotations

import asyncio
import csv
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

import fenced
from bench.figures import Figure, ratio
from bench.interleaved import Effort, loaded_medians, medians
from fenced.redis import AsyncRedisGuard, RedisGuard
from fenced.runtime.blocking import step
from fenced.stores.redis.guard.clients import ClientChannel
from fenced.stores.redis.guard.marks import MarkOptions, RedisMarks
from fenced.stores.redis.wire.resp import command
from fenced.values.model import Stamp
from fenced_testkit.servers import RedisServer

ROUNDS = 4000
CONNECTIONS = 50
PIPELINE = 16
BATCHES = 40
REQUESTS = 20_000
TURNS = 9
VALUE = b"x" * 100
Words = tuple[Any, ...]
"""A request, word by word."""
DEFAULTS = {"appendonly": "no", "save": "3600 1 300 100 60 10000"}
"""As Redis comes: snapshots now and then, no append-only file."""
STAMP = Stamp("00000000000000aa", ("stock",), 5, None, f"{5:032x}")


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with RedisServer(DEFAULTS) as server, redis.Redis.from_url(server.url()) as client:
        with fenced.Client("memory:") as leases, leases.hold("stock", ttl=3600) as lease:
            yield from _one_connection(client, lease, "as Redis comes", "redis", 1.4, effort)
        theirs, ours = asyncio.run(_with_redis_py(server.url(), effort))
        whole = f"fenced SET, {CONNECTIONS} connections of redis-py in asyncio"
        yield ratio("guard.redis.asyncio", whole, ours, theirs, target=1.3, against="SET")
        requests = ("SET", "plain", VALUE), _guarded(client)
        for key, what, pipeline, target in (
            ("many", "one request each at a time", 1, 1.3),
            ("saturated", f"{PIPELINE} requests each at a time", PIPELINE, 4.5),
        ):
            theirs, ours = _loads(server, requests, pipeline, effort)
            whole = f"fenced SET, {CONNECTIONS} connections, as bytes, {what}"
            yield ratio(f"guard.redis.{key}", whole, ours, theirs, target=target, against="SET")
        yield from _by_redis_benchmark(server, client, requests, effort)
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

    theirs, ours, new = medians(plain, guarded, newer, rounds=effort.of(ROUNDS), warm_up=effort.size(200))
    against = f"SET, {where}"
    yield ratio(
        f"guard.{key}.one", "fenced SET, one connection", ours, theirs, target=target, against=against
    )
    yield ratio(f"guard.{key}.new", "the same, a new token each", new, theirs, against=against)


async def _with_redis_py(url: str, effort: Effort) -> tuple[float, float]:
    """As a program writes it, with redis-py on both sides: many tasks, each with a connection of the pool."""
    guard = AsyncRedisGuard(guarantee="best-effort")
    async with (
        redis.asyncio.Redis.from_url(url, max_connections=CONNECTIONS) as client,
        fenced.AsyncClient("memory:") as leases,
        leases.hold("tasks", ttl=3600) as lease,
    ):

        async def plain(task: int) -> None:
            await client.set(f"plain/{task}", VALUE)

        async def guarded(task: int) -> None:
            async with guard.transaction(client, lease, "tasks") as tx:
                tx.set(f"fenced/{task}", VALUE)

        theirs, ours = await loaded_medians(
            plain, guarded, tasks=CONNECTIONS, count=20, rounds=effort.of(BATCHES)
        )
    return theirs, ours


def _guarded(client: redis.Redis) -> Words:
    """The request by which the guard sends a SET. Sent by another program, the server's time counts, and not ours."""
    caught: list[Words] = []

    class Recording(ClientChannel):
        async def run(self, script, keys, arguments, *, again, confirm=False):  # type: ignore[no-untyped-def]
            caught.append((*script.words, len(keys), *keys, *arguments))
            return await super().run(script, keys, arguments, again=again, confirm=confirm)

    fence = RedisMarks(Recording(client, "blocking", False), MarkOptions("requests", guarantee="best-effort"))
    step(fence.open())
    for _ in range(3):
        step(fence.step(STAMP, ["stock"], commands=[("SET", "fenced", VALUE)]))
    return caught[-1]


def _by_redis_benchmark(
    server: RedisServer, client: redis.Redis, requests: tuple[Words, Words], effort: Effort
) -> Iterator[Figure]:
    """One request at a time on each connection, sent by redis-benchmark; and the CPU time of the server alone."""
    count = effort.of(REQUESTS)
    seconds: tuple[list[float], list[float]] = ([], [])
    work: tuple[list[float], list[float]] = ([], [])
    for _ in range(effort.size(TURNS)):
        for chosen, words in enumerate(requests):
            before = _cpu_seconds(client)
            seconds[chosen].append(_benchmark(server, words, count))
            work[chosen].append((_cpu_seconds(client) - before) / count)
    for key, what, target, (theirs, ours) in (
        (
            "benchmark",
            "... sent by redis-benchmark, one each at a time",
            1.3,
            map(statistics.median, seconds),
        ),
        ("server", "... the same, CPU time of the server", None, map(statistics.median, work)),
    ):
        yield ratio(f"guard.redis.{key}", what, ours, theirs, target=target, against="SET")


def _benchmark(server: RedisServer, words: Words, count: int) -> float:
    """Seconds for each of these requests."""
    given = [word.decode() if isinstance(word, bytes) else str(word) for word in words]
    options = ["-h", server.host, "-p", str(server.port), "-c", str(CONNECTIONS), "-n", str(count)]
    line = ["redis-benchmark", *options, "-e", "--csv", *given]
    output = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    head, found = csv.reader(output.splitlines())  # it prints more if the server replies with an error
    return 1 / float(found[head.index("rps")])


def _cpu_seconds(client: redis.Redis) -> float:
    used: Any = client.info("cpu")
    return float(used["used_cpu_sys"] + used["used_cpu_user"])


def _loads(
    server: RedisServer, requests: tuple[Words, Words], pipeline: int, effort: Effort
) -> tuple[float, float]:
    """The medians of the seconds that each takes, turn by turn, on the same connections."""
    clients = [redis.Redis.from_url(server.url()) for _ in range(CONNECTIONS)]
    connections = [client.connection_pool.get_connection() for client in clients]
    sockets: list[Any] = [connection._sock for connection in connections]
    batches = effort.of(BATCHES) * (PIPELINE if pipeline == 1 else 1)
    times: tuple[list[float], list[float]] = ([], [])
    packed = [command(*words) for words in requests]
    lengths = [_reply_length(sockets[0], request) for request in packed]
    for _ in range(effort.size(TURNS)):
        for request, length, found in zip(packed, lengths, times, strict=True):
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
