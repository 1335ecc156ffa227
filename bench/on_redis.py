"""Redis: the lock of redis-py, python-redis-lock, and what the server is asked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
import redis_lock  # type: ignore[import-untyped]

import fenced
import fenced.stores.redis.authority
from bench import growth, requests
from bench.contending import AsyncLock, Kind, Lock
from bench.figures import Figure
from bench.interleaved import Effort
from bench.peers import NAME, compare, ourselves
from fenced_testkit.servers import RedisServer

EXPIRE_SECONDS = 30
DEFAULTS = {"appendonly": "no", "save": "3600 1 300 100 60 10000"}
"""As Redis comes: snapshots now and then, no append-only file."""

UNDISTURBED = {"auto-aof-rewrite-percentage": "0"}
FILL_AT_ONCE = 20_000


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    peers = [_redis_py, _python_redis_lock]
    with RedisServer(DEFAULTS) as server:
        url, name = server.url(), f"Redis {_version(server)}"
        ours = ourselves(url, "best-effort")
        yield from compare(f"{name}, defaults", "redis.defaults", ours, [of(url) for of in peers], effort)
    with RedisServer() as server:
        url = server.url()
        ours, less = ourselves(url), replace(effort, share=effort.share / 2)
        shown = [replace(of(url), targets={}) for of in peers]  # both wait for the disk, which decides
        yield from compare(f"{name}, AOF always", "redis.aof", ours, shown, less)
        yield from _requests(server, effort)
    with RedisServer(UNDISTURBED) as server:
        yield _growth(server, effort)


def _version(server: RedisServer) -> str:
    return str(server.execute("INFO", "server")["redis_version"])


def _redis_py(url: str) -> Kind:
    def crew(stack: contextlib.ExitStack, count: int) -> list[Lock]:
        clients = [stack.enter_context(redis.Redis.from_url(url)) for _ in range(count)]
        return [client.lock(NAME, timeout=EXPIRE_SECONDS) for client in clients]

    async def async_crew(stack: contextlib.AsyncExitStack, count: int) -> list[AsyncLock]:
        clients = [redis.asyncio.Redis.from_url(url) for _ in range(count)]
        for client in clients:
            stack.push_async_callback(client.aclose)
        return [client.lock(NAME, timeout=EXPIRE_SECONDS) for client in clients]

    targets = {"pair": 1.0, "2 waiters": 40, "16 waiters": 10, "64 waiters": 4}
    note = "it polls every 100 ms; no token, no renewal"
    return Kind("redis-py", "redis-py Lock", crew, async_crew, poll_seconds=0.1, targets=targets, note=note)


def _python_redis_lock(url: str) -> Kind:
    def crew(stack: contextlib.ExitStack, count: int) -> list[Lock]:
        # Without redis-py's timeout of 5 s, which breaks off the BLPOP that it waits in.
        clients = [stack.enter_context(redis.Redis.from_url(url, socket_timeout=None)) for _ in range(count)]
        return [redis_lock.Lock(client, NAME, expire=EXPIRE_SECONDS) for client in clients]

    targets = {"pair": 1.4, "2 waiters": 0.9, "16 waiters": 0.9, "64 waiters": 0.9}
    note = "no token, no renewal"
    return Kind("python-redis-lock", "python-redis-lock", crew, targets=targets, note=note)


# Requests.


def _requests(server: RedisServer, effort: Effort) -> Iterator[Figure]:
    """Counts what clients sent.

    The server's own count of calls by command includes those that scripts make. So every command is left out that
    occurs in our scripts; what is left of a client's requests is EVALSHA, and whatever no script uses. A client
    sends none of those left out, except INFO and CONFIG when it connects.
    """
    inside = _commands_in_scripts() | {"config"}
    with redis.Redis.from_url(server.url()) as connection:

        def count() -> int:
            stats: dict[str, dict[str, Any]] = connection.info("commandstats")
            commands = {key.removeprefix("cmdstat_"): told["calls"] for key, told in stats.items()}
            return sum(calls for name, calls in commands.items() if name.partition("|")[0] not in inside)

        count()  # connects
        yield from requests.run("redis", server.url(), count, effort)


def _commands_in_scripts() -> set[str]:
    folder = Path(fenced.stores.redis.authority.__file__).parent
    texts = [path.read_text() for path in folder.glob("*.lua")]
    return {word.lower() for text in texts for word in re.findall(r"call\(\s*'(\w+)'", text)}


# Growth.


def _growth(server: RedisServer, effort: Effort) -> Figure:
    many = effort.of(growth.MANY)
    with (
        redis.Redis.from_url(server.url(), socket_timeout=None) as connection,
        fenced.Client(server.url(), namespace="few") as few,
        fenced.Client(server.url(), namespace="many") as lots,
    ):
        _fill(connection, few, "few", growth.FEW)
        _fill(connection, lots, "many", many)
        return growth.figure("redis", few, lots, many, effort)


COPY = """
local id, name, records, scores = ARGV[1], ARGV[2], {}, {}
for _, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  if kind == 'hash' then records[key] = redis.call('HGET', key, id) or nil end
  if kind == 'zset' then scores[key] = redis.call('ZSCORE', key, id) or nil end
end
for number = tonumber(ARGV[3]), tonumber(ARGV[4]) do
  local other = string.sub(redis.sha1hex(string.format('%.0f', number)), 1, 32)
  for key, record in pairs(records) do
    local from, to = string.find(record, name, 1, true)
    local mine = string.format('used/%07.0f', number)
    redis.call('HSET', key, other, string.sub(record, 1, from - 1) .. mine .. string.sub(record, to + 1))
  end
  for key, score in pairs(scores) do
    redis.call('ZADD', key, score, other)
  end
end
"""
"""What a real acquire and release has left, wherever its id stands, once more for other names and ids."""


def _fill(connection: redis.Redis, client: fenced.Client, namespace: str, names: int) -> None:
    original = growth.used_name(names)
    lease = client.acquire(original)
    lease.release()
    keys = list(connection.scan_iter(f"fenced:{{{namespace}}}:*"))
    for first in range(0, names, FILL_AT_ONCE):
        last = min(first + FILL_AT_ONCE, names) - 1
        connection.eval(COPY, len(keys), *keys, lease.grant, original, str(first), str(last))
