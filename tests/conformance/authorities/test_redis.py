"""The Redis authority passes the kit, on real servers, with and without TLS."""

import secrets
from collections.abc import Iterator

import pytest

from fenced.client.registry import BUILT_IN
from fenced.stores.redis.address import RedisAddress
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, Colour, run
from fenced.values.contracts import Authority, Runtime
from fenced_testkit.servers import RedisServer
from tests.colours import CHANNEL_CHECKS

BACKEND = "redis"
TLS_BACKEND = "rediss"
FILE_BACKEND = "unix"

PASS_TIME = """
local back = tonumber(ARGV[1])
local all = redis.call('HGETALL', KEYS[1])
for index = 1, #all, 2 do
  local expires, forget = struct.unpack('>I8I8', all[index + 1])
  local times = struct.pack('>I8I8', math.max(0, expires - back), math.max(0, forget - back))
  redis.call('HSET', KEYS[1], all[index], times .. all[index + 1]:sub(17))
  redis.call('ZINCRBY', KEYS[2], -math.ceil(back / 1000000), all[index])
end
"""


class Harness:
    """A random prefix of its own stands before the kit's namespaces. Time passes by moving all stored times back."""

    def __init__(self, runtime: Runtime, server: RedisServer) -> None:
        self.runtime = runtime
        self._server = server
        self._prefix = secrets.token_hex(8)
        self._opened: list[RedisAuthority] = []

    async def authority(self, namespace: str = "default") -> Authority:
        authority = RedisAuthority.at(self._server.url(), self.runtime, f"{self._prefix}/{namespace}")
        self._opened.append(authority)
        await authority.open()
        return authority

    async def pass_time(self, seconds: float) -> None:
        for namespace in ("default", "other"):
            self._pass_time(namespace, seconds)

    def _pass_time(self, namespace: str, seconds: float) -> None:
        keys = [f"fenced:{{{self._prefix}/{namespace}}}:{key}" for key in ("attempts", "forget")]
        self._server.execute("EVAL", PASS_TIME, 2, *keys, round(seconds * 1e6))

    async def restart(self) -> None:
        await self.close()
        self._server.restart()

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()


@pytest.fixture(scope="session")
def tls_server() -> Iterator[RedisServer]:
    with RedisServer(tls=True, password="a password with / and @") as server:
        yield server


# proves authority redis: namespace-order
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_redis(check: Check[AuthorityHarness], colour: Colour, redis_server: RedisServer) -> None:
    run(check, lambda runtime: Harness(runtime, redis_server), colour)


@pytest.mark.xdist_group("redis")  # one worker starts this server
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.name)
def test_rediss(check: Check[AuthorityHarness], colour: Colour, tls_server: RedisServer) -> None:
    run(check, lambda runtime: Harness(runtime, tls_server), colour)


def test_unix_is_the_same_authority_over_a_socket_file() -> None:
    """That a lease is granted over one: tests/redis/test_authority.py."""
    table = BUILT_IN["fenced.authorities"]
    assert table[FILE_BACKEND] == table[BACKEND]
    assert RedisAddress("unix:///run/redis.sock").endpoint == "/run/redis.sock"


def test_rediss_is_the_same_authority_over_tls() -> None:
    """What is shown of the one is shown of the other: they differ in the socket only."""
    table = BUILT_IN["fenced.authorities"]
    assert table[TLS_BACKEND] == table[BACKEND]
    plain, tls = RedisAddress("redis://host"), RedisAddress("rediss://host")
    assert plain.context is None
    assert tls.context is not None and tls.context.check_hostname
