"""RedisGuard with the program's own Lua: the check and the script, or the function, are one step on the server."""

from __future__ import annotations

import asyncio

import pytest
import redis
import redis.asyncio

from fenced.errors import Misconfigured, Misuse, StaleToken
from fenced.redis import AsyncRedisGuard, RedisGuard
from tests.redis.test_guard import NAME, stamp, stored

pytestmark = pytest.mark.xdist_group("redis-functions")  # which are the same for the whole server


def test_own_scripts(client: redis.Redis, tag: str) -> None:
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}"
    add = guard.wrap("return {redis.call('INCRBY', KEYS[1], ARGV[1]), #KEYS, #ARGV}")
    assert add(client, stamp(5), NAME, keys=[key], args=[3]) == [3, 1, 1]
    assert add(client, stamp(5), keys=[key], args=[4]) == [7, 1, 1]
    client.script_flush()
    guard.announce(client, stamp(6))
    with pytest.raises(StaleToken):
        add(client, stamp(5), NAME, keys=[key], args=[1])
    flagged = guard.wrap("#!lua flags=allow-oom\nlocal names, found, decided = 1, 2, 3\nreturn names")
    assert flagged(client, stamp(6), NAME) == 1
    for bad in ("#!lua flags=no-writes\nreturn 1", "", None):
        with pytest.raises(Misuse):
            guard.wrap(bad)  # type: ignore[arg-type]
    with pytest.raises(redis.ResponseError, match="boom"):
        guard.wrap("error('boom')")(client, stamp(6), NAME)
    assert client.get(key) == b"7"


STOCK = """#!lua name=stock
local function left(key) return tonumber(redis.call('GET', key) or '0') end
redis.register_function('take', function(keys, args)
  if left(keys[1]) < 1 then return redis.error_reply('NONE left') end
  return {redis.call('DECR', keys[1]), #keys, #args}
end)
redis.register_function{
  function_name = 'give',
  callback = function(keys, args) return redis.call('INCRBY', keys[1], args[1]) end,
  flags = {'allow-oom'}
}
"""


def test_own_functions(client: redis.Redis, redis_url: str, tag: str) -> None:
    runs_behind_the_check(client, redis_url, tag, STOCK)


def runs_behind_the_check(client: redis.Redis, redis_url: str, tag: str, stock: str) -> None:
    """The library's functions have their own keys and arguments, and share what it declares."""
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}"
    library = guard.wrap_library(stock.replace("name=stock", f"name=stock{tag}"))
    for other in client.function_list():
        client.function_delete(other[1])  # function names are unique on a server
    take, give = library.function("take"), library.function("give")
    with pytest.raises(Misconfigured, match=r"no function fenced_\w+_take here: load\(\)"):
        take(client, stamp(5), NAME, keys=[key])
    library.load(client)
    library.load(client)
    assert give(client, stamp(5), NAME, keys=[key], args=[2]) == 2
    assert take(client, stamp(5), keys=[key], args=["a", "b"]) == [1, 1, 2]
    guard.announce(client, stamp(6))
    before = stored(client, tag)
    for function in (take, give):
        with pytest.raises(StaleToken):
            function(client, stamp(5), NAME, keys=[key], args=[1])
    assert stored(client, tag) == before

    async def story() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as own:
            suspending = AsyncRedisGuard(tag=tag).wrap_library(
                stock.replace("name=stock", f"name=stock{tag}")
            )
            await suspending.load(own)
            assert await suspending.function("take")(own, stamp(6), NAME, keys=[key]) == [0, 1, 0]

    asyncio.run(story())
    with pytest.raises(redis.ResponseError, match="NONE left"):
        take(client, stamp(6), NAME, keys=[key])
    with pytest.raises(redis.ResponseError):
        # Without what the check needs.
        client.fcall(f"{library.name.removesuffix('stock' + tag)}take", 1, key)
    for bad in ("return 1", "#!lua name=\n", STOCK.replace("allow-oom", "no-writes"), None):
        with pytest.raises(Misuse):
            guard.wrap_library(bad)  # type: ignore[arg-type]
    client.function_delete(library.name)
