"""What is particular to the Redis authority: numbers, rights, secrets, settings, forks, and how little it asks."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

import fenced
from fenced.drills.relay import Proxy
from fenced.errors import FencedError, Misconfigured, Misuse, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.redis.authority.answers import RIGHTS
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.stores.redis.authority.scripts import tag
from fenced.testing.kit import asking, granted
from fenced.values.model import TOKEN_MAX, Busy, Kept, Released, Waiting, grant_id
from fenced_testkit.servers import RedisServer
from tests.forking import inherits_no_lease, said_by_child

RUNTIME = BlockingRuntime()
SECRET = "open sesame/@:"


@pytest.fixture
def authority(redis_server: RedisServer) -> Iterator[RedisAuthority]:
    made = RedisAuthority.at(redis_server.url(), RUNTIME, secrets.token_hex(8))
    step(made.open())
    yield made
    step(made.close())


def key(authority: RedisAuthority, name: str) -> str:
    return f"fenced:{{{tag(authority._namespace)}}}:{name}"


# Numbers.


def test_numbers_near_the_end_are_exact_on_every_way(
    authority: RedisAuthority, redis_server: RedisServer
) -> None:
    """2**53 - 1 through raise, grant, its repeat, busy, survey, force-release; then loudly no more."""
    step(authority.raise_floor(TOKEN_MAX - 3))
    redis_server.execute("HSET", key(authority, "meta"), "ticket", 10**15)
    ask = asking(RUNTIME, "orders", ttl=86_400, lock_delay=3600)
    assert step(granted(authority, ask)).token == TOKEN_MAX - 2
    assert step(granted(authority, ask)).token == TOKEN_MAX - 2
    busy = step(authority.ask(asking(RUNTIME, "orders")))
    assert isinstance(busy, Busy) and busy.held_by is not None and busy.held_by.token == TOKEN_MAX - 2
    waiter = asking(RUNTIME, "orders", wait=True)
    assert isinstance(step(authority.ask(waiter)), Waiting)
    (view,) = step(authority.survey())
    assert view.held_by is not None and view.held_by.token == TOKEN_MAX - 2
    assert view.ttl == 86_400 and len(view.waiters) == 1
    assert step(authority.force_release("orders", TOKEN_MAX - 2)) == TOKEN_MAX - 1
    assert step(granted(authority, waiter)).token == TOKEN_MAX
    for _ in range(2):
        with pytest.raises(Misconfigured, match="used up"):
            step(authority.ask(asking(RUNTIME, "another")))
        with pytest.raises(Misconfigured, match="used up"):
            step(authority.force_release("orders", TOKEN_MAX))
    assert int(redis_server.execute("HGET", key(authority, "meta"), "token")) == TOKEN_MAX


# proves authority redis: wall-clock
def test_the_servers_wall_clock_decides(authority: RedisAuthority, redis_server: RedisServer) -> None:
    """Records hold times of TIME. All of them moved is what a jump of that clock looks like from here."""

    def jump(seconds: float) -> None:
        move = """
        for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
          local raw = redis.call('HGET', KEYS[1], id)
          local expires, forget = struct.unpack('>I8I8', raw)
          redis.call('HSET', KEYS[1], id, struct.pack('>I8I8', expires - ARGV[1], forget - ARGV[1]) .. raw:sub(17))
        end"""
        redis_server.execute("EVAL", move, 1, key(authority, "attempts"), round(seconds * 1e6))

    first, second = asking(RUNTIME, "orders", ttl=30), asking(RUNTIME, "orders", ttl=30)
    token = step(granted(authority, first)).token
    record = redis_server.execute("HGET", key(authority, "attempts"), grant_id(first.secret))
    assert abs(int.from_bytes(record[:8]) / 1e6 - (time.time() + 30)) < 5
    jump(60)
    assert step(granted(authority, second)).token > token, "a jump forward ends a lease early"
    jump(-3600)
    view = step(authority.observe("orders"))
    assert view.free_in > 3600, "a jump back prolongs it"


# Waiting.


# proves authority redis: pushed
def test_idle_waiters_ask_nothing_and_are_woken_at_once(redis_server: RedisServer) -> None:
    """64 waiters of one client: only the keeper speaks, and the first is in right after the release."""
    namespace = secrets.token_hex(8)
    ids: list[int] = []

    async def story(proxy: Proxy) -> None:
        url = f"redis://{proxy.host}:{proxy.port}"
        async with (
            fenced.AsyncClient(redis_server.url(), namespace=namespace) as other,
            fenced.AsyncClient(url, namespace=namespace) as client,
        ):
            lease = await other.acquire("orders")
            waiting = [asyncio.create_task(client.acquire("orders")) for _ in range(64)]
            while len((await other._authority.observe("orders")).waiters) < 64:
                await asyncio.sleep(0.01)
            before = proxy.requests
            await asyncio.sleep(4.0)
            assert proxy.requests - before <= 4
            began = time.monotonic()
            await lease.release()
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert time.monotonic() - began < 2.5, "notified: nobody looks before that"
            ids.extend(task.result().token for task in done)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            while (
                await other._authority.observe("orders")
            ).waiters:  # on a busy machine withdrawals are retried
                await asyncio.sleep(0.05)

    with Proxy(redis_server.host, redis_server.port) as proxy:
        asyncio.run(story(proxy))
    assert len(ids) == 1


# The server's memory.


def test_a_server_that_forgot_the_scripts_is_told_again(
    authority: RedisAuthority, redis_server: RedisServer
) -> None:
    ask = asking(RUNTIME, "orders")
    token = step(granted(authority, ask)).token
    redis_server.execute("SCRIPT", "FLUSH")
    assert step(authority.renew([ask.secret])) == [Kept(10.0)]
    redis_server.execute("SCRIPT", "FLUSH")
    assert step(authority.release(ask.secret)) == Released()
    redis_server.execute("SCRIPT", "FLUSH")
    assert step(granted(authority, asking(RUNTIME, "orders"))).token > token


LONG_AGO = """
for _, public in ipairs(redis.call('HKEYS', KEYS[1])) do
    local record = redis.call('HGET', KEYS[1], public)
    redis.call('HSET', KEYS[1], public, string.sub(record, 1, 8) .. string.rep('\\0', 8) .. string.sub(record, 17))
    redis.call('ZADD', KEYS[2], 0, public)
end
"""
"""Lets all attempts have ended long ago."""


def test_ended_attempts_are_forgotten_on_the_way(
    authority: RedisAuthority, redis_server: RedisServer
) -> None:
    """Without `tidy`: what is over for long goes while new grants come. No key has a time to live."""
    for number in range(200):
        ask = asking(RUNTIME, f"name/{number}")
        step(granted(authority, ask))
        step(authority.release(ask.secret))
    redis_server.execute("EVAL", LONG_AGO, 2, key(authority, "attempts"), key(authority, "forget"))
    for _ in range(160):
        ask = asking(RUNTIME, "busy")
        step(granted(authority, ask))
        step(authority.release(ask.secret))
    for part, count in (("attempts", "HLEN"), ("forget", "ZCARD")):
        assert redis_server.execute(count, key(authority, part)) == 160
    for part in ("meta", "attempts", "forget"):
        assert redis_server.execute("TTL", key(authority, part)) == -1


def test_a_key_of_another_program_is_refused(redis_server: RedisServer) -> None:
    for part in ("meta", "attempts", "places", "forget"):
        made = RedisAuthority.at(redis_server.url(), RUNTIME, secrets.token_hex(8))
        redis_server.execute("SET", key(made, part), "theirs")
        with pytest.raises(Misconfigured, match="another program"):
            step(made.open())
        step(made.close())


def test_a_namespace_that_lost_its_counter_is_not_made_anew(
    authority: RedisAuthority, redis_server: RedisServer
) -> None:
    step(granted(authority, asking(RUNTIME, "orders")))
    redis_server.execute("DEL", key(authority, "meta"))
    with pytest.raises(Misconfigured, match="counting state"):
        step(authority.open())
    with pytest.raises(Misconfigured, match="deleted or replaced"):
        step(authority.ask(asking(RUNTIME, "another")))
    with pytest.raises(Misconfigured, match="deleted or replaced"):
        step(authority.ask(asking(RUNTIME, "orders", wait=True)))
    assert not redis_server.execute("EXISTS", key(authority, "meta"))


def test_records_that_somebody_deleted_hang_nobody(
    authority: RedisAuthority, redis_server: RedisServer
) -> None:
    """A waiter's record is gone and its place is left, by somebody else's HDEL: the place is taken for dead."""
    attempts = key(authority, "attempts")
    holder, lost, other = (asking(RUNTIME, "orders", wait=True) for _ in range(3))
    step(granted(authority, holder))
    for ask in (lost, other):
        assert isinstance(step(authority.ask(ask)), Waiting)
    redis_server.execute("HDEL", attempts, grant_id(lost.secret))
    assert step(authority.release(holder.secret)) == Released()
    step(granted(authority, other))
    redis_server.execute("HDEL", attempts, grant_id(other.secret))
    step(granted(authority, asking(RUNTIME, "orders")))
    assert isinstance(step(authority.ask(lost)), Waiting)


def test_without_create_nothing_is_made(redis_server: RedisServer) -> None:
    made = RedisAuthority.at(redis_server.url(), RUNTIME, secrets.token_hex(8))
    with pytest.raises(Misconfigured, match="no namespace"):
        step(made.open(create=False))
    assert not redis_server.execute("EXISTS", key(made, "meta"))
    step(made.close())


# Rights, secrets, addresses.


def test_the_documented_rights_are_enough_and_others_are_told(redis_server: RedisServer) -> None:
    user = secrets.token_hex(4)
    redis_server.execute("ACL", "SETUSER", user, "on", f">{SECRET}", *RIGHTS.split())
    url = redis_server.url(user=user, password=SECRET)
    with fenced.Client(url, namespace=user) as client, fenced.Client(url, namespace=user) as other:
        lease = client.acquire("orders")
        step(other._authority.open())
        assert other._authority.url == f"redis://127.0.0.1:{redis_server.port}/0"
        step(client._authority.renew(["0" * 32]))
        ask = asking(RUNTIME, "orders", wait=True)
        step(other._authority.ask(ask))
        lease.release()
        assert step(other._authority.next_wakeups(RUNTIME.now() + 5)) == [grant_id(ask.secret)]
        step(other._authority.withdraw(ask.secret))
        step(client._authority.survey())
        step(client._authority.raise_floor(10))
        step(client._authority.tidy())
        step(client._authority.force_release("orders", lease.token))
    for lacking in ("-hset", "-publish", "-evalsha"):
        redis_server.execute("ACL", "SETUSER", user, lacking)
        with fenced.Client(url, namespace=secrets.token_hex(4)) as client:
            with pytest.raises(Misconfigured, match=r"\+evalsha") as told:
                client.acquire("orders")
            assert SECRET not in repr(told.value)
        redis_server.execute("ACL", "SETUSER", user, lacking.replace("-", "+"))
    redis_server.execute("ACL", "SETUSER", user, "-config|get")
    with fenced.Client(url, namespace=user, guarantee="best-effort") as client:
        assert any("CONFIG GET" in doubt for doubt in step(client._authority.open()).doubts)
    redis_server.execute("ACL", "DELUSER", user)


@pytest.mark.parametrize("make", [fenced.Client, fenced.AsyncClient])
def test_a_wrong_password_is_told_without_any_secret(make: Any, redis_server: RedisServer) -> None:
    user = secrets.token_hex(4)
    redis_server.execute("ACL", "SETUSER", user, "on", ">right")
    client = make(redis_server.url(user=user, password=SECRET), namespace="any")

    async def story() -> None:
        with pytest.raises(Misconfigured, match="password") as told:
            await client._authority.open()
        shown = [str(told.value), repr(told.value), repr(client), client.url, repr(vars(client._authority))]
        for text in (*shown, repr(told.value.__cause__)):
            assert SECRET not in text and "sesame" not in text
        await client._authority.close()

    if make is fenced.Client:
        step(story())
    else:
        asyncio.run(story())
    redis_server.execute("ACL", "DELUSER", user)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:open sesame/@host",
        "redis://:sesame@host:port",
        "redis://localhost/leases",
        "redis://localhost/0?sesame=1",
        "rediss://localhost/0?ssl_sesame=1",
        "redis://localhost/0?db=sesame",
    ],
)
def test_a_malformed_address_is_misuse(url: str) -> None:
    with pytest.raises(Misuse) as told, fenced.Client(url) as client:
        client.acquire("orders")
    assert ":sesame" not in str(told.value) and "open" not in str(told.value)


def test_options_of_redis_py_that_are_ours_are_let_be(redis_server: RedisServer) -> None:
    url = redis_server.url() + "?socket_timeout=0.001&retry_on_timeout=yes&health_check_interval=1&protocol=3"
    with fenced.Client(url, namespace=secrets.token_hex(8)) as client:
        client.acquire("orders").release()


@pytest.mark.xdist_group("redis")
def test_a_socket_file_and_a_certificate_of_nobody() -> None:
    with (
        RedisServer({"unixsocket": "redis.sock"}) as server,
        fenced.Client(f"unix://{server.data}/redis.sock?db=3") as client,
    ):
        client.acquire("orders")
        assert client.url == f"unix://{server.data}/redis.sock?db=3"
        assert server.execute("DBSIZE") == 0, "in database 3"
    with RedisServer(tls=True) as server:
        untrusted = server.url().partition("?")[0]
        with fenced.Client(untrusted) as client, pytest.raises(Misconfigured, match="ssl_ca_certs"):
            client.acquire("orders")
        with fenced.Client(untrusted.replace("rediss", "redis")) as client, pytest.raises(FencedError):
            client.acquire("orders")


def test_nobody_there_is_unavailable() -> None:
    with (
        fenced.Client("redis://127.0.0.1:1/0") as client,
        pytest.raises(Unavailable, match="cannot be reached"),
    ):
        client.acquire("orders")


# Settings.


@pytest.mark.xdist_group("redis")
def test_each_setting_that_could_repeat_tokens_is_told() -> None:
    with RedisServer() as server:
        made = RedisAuthority.at(server.url(), RUNTIME, "any")
        assert step(made.open()).doubts == ()
        for changes, word in (
            ({"appendfsync": "everysec"}, "appendfsync always"),
            ({"no-appendfsync-on-rewrite": "yes"}, "no-appendfsync-on-rewrite no"),
            ({"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}, "maxmemory-policy noeviction"),
            ({"appendonly": "no"}, "appendonly yes"),
        ):
            before = {name: server.execute("CONFIG", "GET", name)[name.encode()] for name in changes}
            for name, value in changes.items():
                server.execute("CONFIG", "SET", name, value)
            (doubt,) = step(made.open()).doubts
            assert word in doubt
            with fenced.Client(server.url()) as client, pytest.raises(Misconfigured, match=word):
                client.acquire("orders")
            with fenced.Client(server.url(), guarantee="best-effort") as client:
                client.acquire("orders").release()
            for name, value in before.items():
                server.execute("CONFIG", "SET", name, value)
        step(made.close())


# Forks.


def test_a_forked_child_leaves_its_parents_connections_alone(redis_server: RedisServer) -> None:
    with fenced.Client(redis_server.url(), namespace=secrets.token_hex(8)) as client:
        client.acquire("a").release()
        authority = client._authority
        assert isinstance(authority, RedisAuthority)
        address, wires = authority._wakeups.address, set(authority._wires)
        assert said_by_child(lambda: authority._wakeups.address != address)
        inherits_no_lease(client)
        assert set(authority._wires) >= wires, "no connection had to be made anew"
