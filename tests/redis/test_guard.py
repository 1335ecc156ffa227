"""RedisGuard, on the program's own clients: the check and the commands are one step on the server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import secrets
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import redis
import redis.asyncio

import fenced
from fenced import events
from fenced.drills.relay import Fault, Proxy
from fenced.errors import (
    AlreadyApplied,
    Conflict,
    FencedError,
    ForeignRealm,
    Indeterminate,
    Misconfigured,
    MissingStamp,
    Misuse,
    OutOfOrder,
    StaleToken,
    Unavailable,
    Uncovered,
)
from fenced.guards.cells import Config
from fenced.redis import AsyncRedisGuard, RedisGuard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.redis.guard import marks as fence_module
from fenced.stores.redis.guard import scripts
from fenced.stores.redis.guard.clients import channel_of
from fenced.stores.redis.guard.marks import RIGHTS, MarkOptions, RedisMarks
from fenced.stores.redis.guard.scripts import GuardScript
from fenced.stores.redis.guard.values import RedisValues
from fenced.testing import vectors
from fenced.values.decision import RULES, Mark
from fenced.values.model import Credential, Stamp
from fenced_testkit.servers import RedisServer
from tests.entering import is_entered_once, is_entered_once_by_tasks

REALM = "00000000000000aa"
NAME = "stock/42"
own_server = pytest.mark.xdist_group("redis")


def stamp(token: int, seq: int | None = 1, *names: str) -> Stamp:
    return Stamp(REALM, names or (NAME,), token, seq, f"{token:032x}")


@pytest.fixture
def values(redis_url: str, tag: str) -> Iterator[RedisValues]:
    values = RedisValues.at(f"{redis_url}?tag={tag}&client_name={tag}", BlockingRuntime())
    yield values
    step(values.close())


def stored(client: redis.Redis, tag: str) -> dict[str, bytes | None]:
    """Every key with this tag, except for the audit."""
    keys: list[Any] = client.keys(f"*{{{tag}}}*")
    return {key.decode(): client.dump(key) for key in keys if not key.endswith((b":records", b":counts"))}


# What it does.


def collect(tx: Any, tag: str) -> None:
    """Commands whose replies redis-py turns into values of all kinds."""
    key = f"{{{tag}}}:"
    tx.set(key + "text", "ten")
    tx.set(key + "bytes", b"\0\xff")
    tx.get(key + "text")
    tx.incrbyfloat(key + "float", 0.5)
    tx.hset(key + "hash", mapping={"a": 1, "b": "two"})
    tx.hgetall(key + "hash")
    tx.hmget(key + "hash", "a", "none", "b")
    tx.mget(key + "text", key + "none", key + "bytes")
    tx.sadd(key + "set", "x", "y")
    tx.smembers(key + "set")
    tx.zadd(key + "sorted", {"a": 1.5, "b": 2})
    tx.zrange(key + "sorted", 0, -1, withscores=True)
    tx.zscore(key + "sorted", "none")
    tx.expire(key + "text", 1000)
    tx.ttl(key + "text")
    tx.exists(key + "none")
    tx.xadd(key + "stream", {"f": "v"}, id="5-1")
    tx.xrange(key + "stream")
    tx.execute_command("OBJECT ENCODING", key + "text")


# proves guard redis: one-step
@pytest.mark.parametrize("protocol", [2, 3])
def test_any_commands_and_reads_in_one_step(redis_url: str, tag: str, protocol: int) -> None:
    """The results are those of redis-py's own MULTI, in both protocols."""
    other = secrets.token_hex(8)
    with redis.Redis.from_url(redis_url, protocol=protocol) as client:
        with RedisGuard(tag=tag).transaction(client, stamp(5), NAME) as tx:
            collect(tx, tag)
        assert tx.results[2] == b"ten"
    with redis.Redis.from_url(redis_url, protocol=2) as client, client.pipeline() as plain:
        collect(plain, other)
        assert tx.results == plain.execute()


def test_a_stale_holder_changes_nothing(client: redis.Redis, tag: str) -> None:
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}"
    with guard.transaction(client, stamp(5)) as tx:
        tx.set(key, "old")
    RedisGuard(tag=tag).announce(client, stamp(6))  # another process
    before = stored(client, tag)
    for further in (0, 1):
        stale = pytest.raises(StaleToken, match="token 5 is stale: 6 has been seen")
        with stale, guard.transaction(client, stamp(5), NAME) as tx:
            tx.set(key, "late")
            for _ in range(further):
                tx.incr(key + "counter")
    with pytest.raises(Uncovered), guard.transaction(client, stamp(7), "other") as tx:
        tx.set(key, "late")
    with pytest.raises(ZeroDivisionError), guard.transaction(client, stamp(6)) as tx:
        tx.set(key, "half")
        raise ZeroDivisionError
    assert stored(client, tag) == before
    with guard.transaction(client, None, NAME) as tx:  # counted: only the mode require refuses it
        tx.set(key, "without")
    other = secrets.token_hex(8)
    with pytest.raises(MissingStamp), RedisGuard(tag=other, mode="require").transaction(client, None, NAME):
        pass


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_mark_has_one_key_whatever_the_client_encodes(
    redis_url: str, client: redis.Redis, tag: str, encoding: str
) -> None:
    """The client's encoding is for the caller's own words. A name has the same mark for every client."""
    guard, older, newer = RedisGuard(tag=tag), stamp(5, 1, "stück"), stamp(6, 1, "stück")
    with redis.Redis.from_url(redis_url, encoding=encoding) as other:
        with guard.transaction(other, older) as tx:
            tx.set(f"{{{tag}}}", "ü")
        assert client.get(f"{{{tag}}}") == "ü".encode(encoding)
        guard.announce(client, newer)
        with pytest.raises(StaleToken), guard.transaction(other, older) as tx:
            tx.set(f"{{{tag}}}", "late")


def test_a_thousand_late_writes(client: redis.Redis, tag: str) -> None:
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}"
    with guard.transaction(client, stamp(5)) as tx:
        tx.set(key, "old")
    with guard.transaction(client, stamp(6)) as tx:
        tx.set(key, "new")
    before = stored(client, tag)
    for seq in range(1000):
        with pytest.raises(StaleToken), guard.transaction(client, stamp(5, seq)) as tx:
            tx.set(key, "late")
    assert stored(client, tag) == before


def test_tokens_of_eight_holders_never_fall(redis_url: str, client: redis.Redis, tag: str) -> None:
    """Each writes under ever newer tokens, of which the others have drawn higher ones meanwhile."""
    tokens, key = itertools.count(1), f"{{{tag}}}"
    guard = RedisGuard(tag=tag)

    def hold(_: int) -> None:
        with redis.Redis.from_url(redis_url) as mine:
            for _ in range(25):
                own = stamp(next(tokens))
                with contextlib.suppress(StaleToken):
                    guard.announce(mine, own)
                    with guard.transaction(mine, own) as tx:
                        tx.rpush(key, own.token)

    with ThreadPoolExecutor(8) as holders:
        list(holders.map(hold, range(8)))
    admitted = [int(token) for token in client.lrange(key, 0, -1)]
    assert admitted == sorted(admitted) and admitted[-1] == 200


def test_observers_are_told_the_address_of_the_guard(
    values: RedisValues, client: redis.Redis, tag: str
) -> None:
    """By values, the one that the operators' face and so the exporter has; by a client, where that connects to."""
    seen: list[events.Event] = []
    step(values.open())
    RedisGuard(tag=tag).announce(client, stamp(2))
    stop = events.observe_guards(seen.append)
    with pytest.raises(StaleToken):
        step(values.write(Credential((stamp(1),)), NAME, b"late"))
    with pytest.raises(StaleToken), RedisGuard(tag=tag).transaction(client, stamp(1)) as tx:
        tx.set("x", 1)
    stop()
    shown = step(values.operate(lambda operator: operator.status())).guards[0].guard
    assert shown.endswith(f"?tag={tag}")
    where = channel_of(client).where
    assert [getattr(each, "guard", "") for each in seen] == [shown, f"{where}?tag={tag}"]


def test_expected_values(values: RedisValues, client: redis.Redis, tag: str) -> None:
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}"
    with guard.transaction(client, stamp(5)) as tx:
        tx.expect(key, None)
        tx.expect(key + "hash", None, field="f")
        tx.set(key, 10)
        tx.hset(key + "hash", "f", b"\0")
    with guard.transaction(client, stamp(5)) as tx:
        tx.expect(key, 10)
        tx.expect(key + "hash", b"\0", field="f")
        tx.decr(key)
    guard.announce(client, stamp(6))
    before = stored(client, tag)
    for expected in (10, None, "", b"9 "):
        with pytest.raises(Conflict, match=f"GET {{{tag}}}"), guard.transaction(client, stamp(6)) as tx:
            tx.expect(key, expected)
            tx.decr(key)
    with pytest.raises(StaleToken), guard.transaction(client, stamp(4)) as tx:  # reported first
        tx.expect(key, 10)
    step(values.open())
    with pytest.raises(Conflict):  # not announced before: the mark stays, too
        step(values.write(Credential((stamp(7),)), NAME, b"x", expect=9))
    assert stored(client, tag) == before
    with pytest.raises(Misuse, match="expected value"), guard.transaction(client, stamp(6)) as tx:
        tx.expect(key, [9])


def test_an_empty_value_is_a_value(client: redis.Redis, tag: str) -> None:
    """`expect(key, None)` is met where there is none, and not by an empty string."""
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}"
    client.set(key, "")
    client.hset(key + "hash", "f", "")
    for words in ({"key": key}, {"key": key + "hash", "field": "f"}):
        with pytest.raises(Conflict), guard.transaction(client, stamp(5)) as tx:
            tx.expect(value=None, **words)
            tx.set(key, "taken for free")
        with guard.transaction(client, stamp(5)) as tx:
            tx.expect(value="", **words)
    assert client.get(key) == b""


# proves guard redis: not-undone
def test_a_command_that_fails(client: redis.Redis, tag: str) -> None:
    """As in MULTI, what was done before it stays. What comes after it is not run."""
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}"
    client.set(key, "text")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"), guard.transaction(client, stamp(5)) as tx:
        tx.set(key + "before", 1)
        tx.lpush(key, 1)
        tx.set(key + "after", 1)
    assert client.get(key + "before") == b"1" and client.get(key + "after") is None
    assert tx.results == [True]


async def test_a_lease_is_announced_at_its_grant(client: redis.Redis, redis_url: str, tag: str) -> None:
    guard = RedisGuard(tag=tag)
    with fenced.Client("memory:") as leases:
        lease = leases.acquire(NAME)
        older = lease.next_stamp()
        lease.release()
        stale = pytest.raises(StaleToken)
        with leases.hold(NAME, guards=[guard.on(client)]), stale, guard.transaction(client, older):
            pass
        with pytest.raises(Misuse, match=r"guard\.on\(client\)"), leases.hold(NAME, guards=[guard]):  # type: ignore[list-item]
            pass
        with leases.try_hold(NAME) as free:
            assert free is not None
    async with fenced.AsyncClient("memory:") as leases, redis.asyncio.Redis.from_url(redis_url) as own:
        other = AsyncRedisGuard(tag=tag + "other")
        async with leases.hold(NAME, guards=[other.on(own)]) as held:
            with stale:
                await other.announce(own, held.announcement()._replace(token=held.token - 1))


def test_misuse(client: redis.Redis, tag: str) -> None:
    guard = RedisGuard(tag=tag)
    for bad in (client.pipeline(), None, "redis://x"):
        with pytest.raises(Misuse, match="give the guard"):
            guard.announce(bad, stamp(5))  # type: ignore[arg-type]
    with pytest.raises(Misuse, match=r"AsyncRedisGuard for a redis\.asyncio\.Redis"):
        guard.announce(redis.asyncio.Redis(), stamp(5))  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="end of its block"), guard.transaction(client, stamp(5)) as tx:
        tx.execute()
    with pytest.raises(Misuse, match="end of its block"), guard.transaction(client, stamp(5)) as tx:
        tx.watch("key")  # type: ignore[no-untyped-call]
    with pytest.raises(Misuse, match="name what"), guard.transaction(client, None):
        pass
    for options in ({"tag": "{x}"}, {"tag": ""}, {"rule": "twice"}, {"mode": "off"}, {"guarantee": "none"}):
        with pytest.raises(Misuse):
            RedisGuard(**options)  # type: ignore[arg-type]


async def test_asyncio(redis_url: str, tag: str) -> None:
    guard, key = AsyncRedisGuard(tag=tag), f"{{{tag}}}"
    for options in ({}, {"single_connection_client": True, "decode_responses": True}):
        async with redis.asyncio.Redis.from_url(redis_url, **options) as client:
            await guard.announce(client, stamp(5))
            async with guard.transaction(client, stamp(5), NAME) as tx:
                tx.set(key, "v")
                await tx.get(key)
                tx.hgetall(key + "none")
            assert tx.results == [True, "v" if options else b"v", {}]
            with pytest.raises(StaleToken):
                async with guard.transaction(client, stamp(4), NAME) as tx:
                    tx.set(key, "late")
            assert await guard.wrap("return #KEYS")(client, stamp(5), NAME, keys=[key, key]) == 2


def test_a_guard_does_not_keep_a_client(redis_url: str, tag: str) -> None:
    """A client ends with its last user, which may be the operation itself."""

    async def announced(guard: AsyncRedisGuard) -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        pool = client.connection_pool
        seen.append(weakref.ref(client))
        announcement = guard.announce(client, stamp(6))
        del client
        await announcement
        del announcement
        await pool.aclose()
        assert seen[-1]() is None

    guard, seen = RedisGuard(tag=tag), []
    with guard.transaction(redis.Redis.from_url(redis_url), stamp(5)) as tx:
        seen.append(weakref.ref(tx._guarded[0]))
        tx.set(f"{{{tag}}}", "v")
    del tx
    assert seen[-1]() is None
    asyncio.run(announced(AsyncRedisGuard(tag=tag)))


# The decision.


def test_every_verdict_is_that_of_the_vectors(client: redis.Redis, tag: str) -> None:
    """The server's script and the client's side of it together, on marks of every kind."""
    fence = RedisMarks(channel_of(client), MarkOptions(tag))
    step(fence.open())
    name, mark_key = vectors.NAME, fence.key("mark", vectors.NAME)
    asked = [case for case in vectors.cases() if case.operation is None and case.proven]
    assert len(asked) > 500
    before = client.pipeline()
    for case in asked:
        config = Config(case.rule, {"*": "require"}, case.guard_realm)
        fence.known = config.packed(), config
        before.set(fence.key("config"), config.packed())
        before.delete(mark_key, fence.key("tokens"))
        if case.mark is not None:
            before.set(mark_key, f"{case.mark.token}:{case.mark.grant}:{case.mark.seq}")
        before.execute()
        verdict = "admit"
        try:
            step(fence.step(case.stamp, [name], announce=case.announce))
        except AlreadyApplied:
            verdict = "applied"
        except FencedError as error:
            verdict = error.kind  # type: ignore[attr-defined]
        due: Mark | None = Mark(case.token or 0, case.grant or "", 0 if case.announce else case.seq or 0)
        if not case.rises:
            due = case.mark and Mark(case.mark.token, case.mark.grant, case.mark.seq)
        found = step(fence.mark(name))
        if case.rule == "retry":  # counts no operations
            found, due = found and replace(found, seq=0), due and replace(due, seq=0)
        assert (verdict, found) == (case.verdict, due), case


# proves guard redis: deleted-marks
def test_a_mark_that_was_deleted(client: redis.Redis, tag: str) -> None:
    """By hand, or because somebody gave it a ttl: no older token is admitted, and the holder goes on."""
    guards = {rule: RedisGuard(tag=tag + rule, rule=rule) for rule in RULES}
    for rule, guard in guards.items():
        with guard.transaction(client, stamp(6, 3)):
            pass
        client.delete(f"fenced:{{{tag}{rule}}}:mark:{NAME}")
        with pytest.raises(StaleToken, match="6 has been seen"), guard.transaction(client, stamp(5)):
            pass
    with guards["retry"].transaction(client, stamp(6, 3)):
        pass
    with pytest.raises(OutOfOrder), guards["sequenced"].transaction(client, stamp(6, 4)):
        pass  # nobody knows whether it was applied
    for guard in guards.values():
        with guard.transaction(client, stamp(7)):
            pass


@pytest.mark.parametrize("damaged", ["", "x", "8", "8::1"])
def test_a_mark_that_is_damaged(client: redis.Redis, tag: str, damaged: str) -> None:
    """Nobody is admitted, with a lease or without, until somebody has looked at it."""
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}"
    guard.announce(client, stamp(6))
    client.set(f"fenced:{{{tag}}}:mark:{NAME}", damaged)
    for fence in (stamp(5), stamp(6), stamp(8), None):
        with pytest.raises(Misconfigured, match="is not a guard's mark"):
            with guard.transaction(client, fence, NAME) as tx:
                tx.set(key, "written")
            with guard.transaction(client, fence, NAME) as tx:
                tx.set(key, "written")
    assert client.get(key) is None


def sell(
    guard: RedisGuard, client: redis.Redis, key: str, holder: Stamp, meanwhile: Callable[[], None]
) -> None:
    """One sale, as a program writes it."""
    with guard.transaction(client, holder, NAME) as tx:
        left = int(client.get(key) or 0)
        meanwhile()
        tx.set(key, left - 1)


@pytest.mark.parametrize("rule", RULES)
def test_a_transaction_is_announced_before_it_reads(client: redis.Redis, tag: str, rule: Any) -> None:
    """The newer holder reads, the older one wakes and writes, the newer one writes: no sale is undone."""
    guard, key, sold = RedisGuard(tag=tag, rule=rule), f"{{{tag}}}", []
    client.set(key, 10)

    def late() -> None:
        with pytest.raises(StaleToken):
            sell(RedisGuard(tag=tag, rule=rule), client, key, stamp(5), lambda: sold.append(5))

    sell(guard, client, key, stamp(6), late)
    assert (client.get(key), sold) == (b"9", [])


async def test_an_asyncio_transaction_is_announced_before_it_reads(redis_url: str, tag: str) -> None:
    guard = AsyncRedisGuard(tag=tag)
    async with redis.asyncio.Redis.from_url(redis_url) as own, guard.transaction(own, stamp(6)) as tx:
        with pytest.raises(StaleToken):
            await guard.announce(own, stamp(5))
        tx.set(f"{{{tag}}}", "v")


def test_a_bad_stamp_that_is_let_through_is_counted_once(
    values: RedisValues, client: redis.Redis, tag: str
) -> None:
    """Although a transaction is judged twice: when it is announced, and at its end."""
    guard = RedisGuard(tag=tag, mode="shadow")
    guard.announce(client, stamp(6))
    with guard.transaction(client, stamp(5)) as tx:
        tx.set(f"{{{tag}}}", "late")
    (status,) = step(values.operate(lambda operator: operator.status())).guards
    assert [(each.verdict, each.count) for each in status.counts] == [("stale", 1)]


def test_a_new_realm_binds_the_holder_at_once(values: RedisValues, client: redis.Redis, tag: str) -> None:
    """Although the mark is its own, and its operations need no decision any more."""
    guard = RedisGuard(tag=tag)
    step(values.open())
    for realm in (REALM, "00000000000000bb", REALM):
        step(values.adopt(realm))
        for _ in range(2):
            refused = contextlib.nullcontext() if realm == REALM else pytest.raises(ForeignRealm)
            with refused, guard.transaction(client, stamp(5)) as tx:
                tx.get("key")
    with pytest.raises(ForeignRealm):
        guard.announce(client, stamp(5)._replace(realm="00000000000000cc"))


def test_an_idle_connection_that_the_server_ended(
    values: RedisValues, redis_server: RedisServer, client: redis.Redis, tag: str
) -> None:
    """As with its setting `timeout`: the outcome is not unknown, since nothing was sent on it."""
    step(values.open())

    def own() -> list[str]:
        found: list[dict[str, str]] = client.client_list()
        return [each["id"] for each in found if each["name"] == tag]

    (connection,) = own()
    client.client_kill_filter(_id=connection)
    redis_server.wait_until(lambda: own() == [], "the connection is closed")
    assert step(values.write(Credential((stamp(5),)), NAME, b"x")) == 1


def test_the_rights_that_a_user_needs(redis_server: RedisServer, tag: str) -> None:
    redis_server.execute("ACL", "SETUSER", tag, "on", ">password", *RIGHTS.split())
    url = f"{redis_server.url(user=tag, password='password')}?tag={tag}"
    values = RedisValues.at(url, BlockingRuntime())
    step(values.open())
    carried = Credential((stamp(5),))
    step(values.write(carried, NAME, b"x", expect=0))
    step(values.adopt("00000000000000bb"))
    with pytest.raises(ForeignRealm):
        step(values.read(carried, NAME))
    status = step(values.operate(lambda operator: operator.status()))
    records = step(values.operate(lambda operator: operator.records()))
    assert not status.wrong and status.guards[0].highest == 5 and len(records) == 1
    redis_server.execute("ACL", "SETUSER", tag, "-hset")
    with pytest.raises(Misconfigured, match="its user needs the rights"):
        step(values.write(None, NAME, b"x"))
    redis_server.execute("ACL", "DELUSER", tag)
    step(values.close())


# Servers.


# proves guard redis: no-eviction, synced-marks
@own_server
def test_settings_that_lose_marks_are_refused(tag: str) -> None:
    with RedisServer() as server, redis.Redis.from_url(server.url()) as client:
        RedisGuard(tag=tag).announce(client, stamp(5))
        client.config_set("appendfsync", "everysec")
        with pytest.raises(Misconfigured, match="appendfsync everysec a power cut loses marks"):
            RedisGuard(tag=tag).announce(client, stamp(5))
        best_effort = RedisGuard(tag=tag, guarantee="best-effort")
        best_effort.announce(client, stamp(5))
        values = RedisValues.at(f"{server.url()}?tag={tag}", BlockingRuntime())
        status = step(values.operate(lambda operator: operator.status()))
        step(values.close())
        assert len(status.doubts) == 1 and status.guards[0].rule == "retry"
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(Misconfigured, match="allkeys-lru may evict marks"):
            RedisGuard(tag=tag, guarantee="best-effort").announce(client, stamp(5))
        server.kill()
        with pytest.raises(Unavailable, match="cannot be reached"), best_effort.transaction(client, stamp(6)):
            pass


def full(client: redis.Redis) -> contextlib.AbstractContextManager[None]:
    """The server is at its limit: a write that needs memory is refused."""

    @contextlib.contextmanager
    def limited() -> Iterator[None]:
        client.config_set("maxmemory", "1")
        try:
            with pytest.raises(redis.OutOfMemoryError):
                client.set("more", "x")
            yield
        finally:
            client.config_set("maxmemory", "0")

    return limited()


@own_server
def test_at_maxmemory(tag: str) -> None:
    """What Redis allows without a guard it allows with one, and a stale holder learns that it is stale."""
    with RedisServer() as server, redis.Redis.from_url(server.url()) as client:
        for mode, rule in itertools.product(("observe", "enforce"), RULES):
            own = f"{tag}{mode}{rule}"
            guard, key = RedisGuard(tag=own, mode=mode, rule=rule), f"{{{own}}}"
            fence = RedisMarks(channel_of(client), MarkOptions(own))
            guard.announce(client, stamp(5))
            client.mset({key: "old", key + "2": "old"})
            with full(client):
                with guard.transaction(client, stamp(6)) as tx:
                    tx.get(key)
                    tx.delete(key)
                assert tx.results == [b"old", 1]
                guard.wrap("return redis.call('DEL', KEYS[1])")(client, stamp(7), keys=[key + "2"])
                with pytest.raises(redis.OutOfMemoryError), guard.transaction(client, stamp(8)) as tx:
                    tx.get(key)
                    tx.set(key, "new")
                with pytest.raises(Unavailable, match="maxmemory is used up"):
                    guard.wrap("return redis.call('SET', KEYS[1], 'new')")(client, stamp(9), keys=[key])
                refused = pytest.raises(StaleToken) if mode == "enforce" else contextlib.nullcontext()
                with refused, guard.transaction(client, stamp(5, 9)) as tx:
                    tx.delete(key)
            assert client.exists(key, key + "2") == 0
            assert sum(number for number, _ in step(fence.counts()).values()) == 1
            mark = step(fence.mark(NAME))
            # Announced; the script that was refused raised nothing.
            assert mark is not None and mark.token == 8


@own_server
def test_a_crash_within_a_step_leaves_nothing_of_it(tag: str) -> None:
    """The append-only file ends within the step's writes, as after a power cut: none of them is there."""
    with RedisServer() as server:
        with redis.Redis.from_url(server.url()) as client:
            guard = RedisGuard(tag=tag)
            with guard.transaction(client, stamp(5)) as tx:
                tx.set("key", "old")
            before = client.dbsize()
            guard.wrap("for _, key in ipairs(KEYS) do redis.call('SET', key, 'new') end")(
                client, stamp(6), keys=["key", "other"]
            )
        server.kill()
        (log,) = server.data.glob("appendonlydir/*.incr.aof")
        whole = log.read_bytes()
        log.write_bytes(whole[: whole.rindex(b"other")])
        server.start()
        with redis.Redis.from_url(server.url()) as client:
            assert client.get("key") == b"old" and client.dbsize() == before
            with guard.transaction(
                client, stamp(5)
            ) as tx:  # it was not overtaken: nothing of token 6 is left
                tx.set("key", "again")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lost_reply_is_unknown_and_is_not_repeated(
    redis_server: RedisServer, client: redis.Redis, tag: str, asynchronous: bool
) -> None:
    """redis-py would send the command again, and count twice."""
    key = f"{{{tag}}}"
    guard = RedisGuard(tag=tag, rule="sequenced")

    async def story(url: str, proxy: Proxy) -> None:
        guard = AsyncRedisGuard(tag=tag, rule="sequenced")
        async with redis.asyncio.Redis.from_url(url) as own:
            await guard.announce(own, stamp(5))
            proxy.on(scripts.COMMANDS.sha.encode(), Fault.LOSE_REPLY)
            with pytest.raises(Indeterminate):
                async with guard.transaction(own, stamp(5, 1)) as tx:
                    tx.incr(key)
            with pytest.raises(AlreadyApplied):
                async with guard.transaction(own, stamp(5, 1)) as tx:
                    tx.incr(key)

    with Proxy(redis_server.host, redis_server.port) as proxy:
        url = f"redis://{proxy.host}:{proxy.port}"
        if asynchronous:
            asyncio.run(story(url, proxy))
        else:
            with redis.Redis.from_url(url) as own:
                guard.announce(own, stamp(5))
                proxy.on(scripts.COMMANDS.sha.encode(), Fault.LOSE_REPLY)
                with pytest.raises(Indeterminate), guard.transaction(own, stamp(5, 1)) as tx:
                    tx.incr(key)
                with pytest.raises(AlreadyApplied), guard.transaction(own, stamp(5, 1)) as tx:
                    tx.incr(key)
    assert client.get(key) == b"1"


# The checks can fail.

NO_FENCE = (
    "COMMANDS",
    "verdict == 'applied' or ruling == 'refuse'",
    "false",
    test_a_stale_holder_changes_nothing,
)
PLANTED: dict[str, tuple[str, str, str, Callable[..., None]]] = {
    "tokens are compared as texts": (
        "COMMANDS",
        "mine < seen",
        "asked.token < token",
        test_every_verdict_is_that_of_the_vectors,
    ),
    "a token counts for every grant": (
        "COMMANDS",
        "owner ~= asked.grant",
        "false",
        test_every_verdict_is_that_of_the_vectors,
    ),
    "nothing is refused": NO_FENCE,
    "the mark rises before values are compared": (
        "COMMANDS",
        "local at = 5",
        "if not decided then redis.call('SET', KEYS[1], asked.mark) end local at = 5",
        test_expected_values,
    ),
    "a deleted mark is forgotten": (
        "COMMANDS",
        "redis.call('ZADD', KEYS[names + 2], asked.token, asked.names[index][1])",
        "",
        test_a_mark_that_was_deleted,
    ),
    "one command is not checked": ("ONE", "~= ARGV[1]", "== ''", test_a_stale_holder_changes_nothing),
    "an empty mark is everybody's": (
        "COMMANDS",
        "local decided = ARGV[1] ~= ''",
        "local decided = true",
        lambda client, tag: test_a_mark_that_is_damaged(client, tag, ""),
    ),
    "an empty value is none": (
        "COMMANDS",
        "ARGV[at] == '-' and value)",
        "ARGV[at] == '-' and value and value ~= '')",
        test_an_empty_value_is_a_value,
    ),
    "marks are not touched": ("SWAP", ".. '~'", ".. ''", test_a_new_realm_binds_the_holder_at_once),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_checks_can_fail(
    bug: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, right, wrong, check = PLANTED[bug]
    source = getattr(scripts, script).source
    assert source.count(right) == 1
    monkeypatch.setattr(fence_module, script, GuardScript(source.replace(right, wrong)))
    arguments = {name: request.getfixturevalue(name) for name in inspect.signature(check).parameters}
    with pytest.raises((AssertionError, pytest.fail.Exception, FencedError, redis.ResponseError)):
        check(**arguments)


def test_a_rule_that_is_not_installed(client: redis.Redis, tag: str) -> None:
    RedisGuard(tag=tag).announce(client, stamp(5))
    wrong = RedisGuard(tag=tag, rule="sequenced")
    with (
        pytest.raises(Misconfigured, match=r"rule retry.*says sequenced"),
        wrong.transaction(client, stamp(5)) as tx,
    ):
        tx.incr(f"{{{tag}}}:n")
    assert client.get(f"{{{tag}}}:n") is None


async def test_a_transaction_is_entered_once(client: redis.Redis, redis_url: str, tag: str) -> None:
    guard, key = RedisGuard(tag=tag), f"{{{tag}}}:n"
    is_entered_once(lambda: guard.transaction(client, stamp(5)), lambda tx: tx.incr(key))
    async with redis.asyncio.Redis.from_url(redis_url) as suspending:
        await is_entered_once_by_tasks(
            lambda: AsyncRedisGuard(tag=tag).transaction(suspending, stamp(5)),
            lambda tx: tx.incr(key) and None,
        )
    assert client.get(key) == b"2"
