"""Redis behind sentinels and in a cluster: clients find the primary and follow a promotion, and tokens only rise.

Real servers and real faults. A primary is replaced after `DOWN_MS` without a sign of life. The tests wait for events,
however long they take.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import redis
import redis.asyncio.cluster
import redis.cluster
import redis.sentinel

from fenced import Client
from fenced.errors import Indeterminate, Misconfigured, Misuse, StaleToken, Unavailable, Unsupported
from fenced.redis import AsyncRedisGuard, RedisGuard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.redis.address import redis_address
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.stores.redis.authority.scripts import tag
from fenced.stores.redis.guard import marks, scripts
from fenced.stores.redis.guard.values import RedisValues
from fenced.stores.redis.wire.finding import redirection, slot_of
from fenced.stores.redis.wire.resp import ErrorReply
from fenced.testing import AuthorityHarness, Check, Colour, run
from fenced.testing.kit import asking
from fenced.values.contracts import Authority, Runtime
from fenced.values.model import Ask, Ended, Granted, Kept, Released, Stamp, Waiting
from fenced_testkit import GUARD_FAILOVER_CHECKS, GuardFailoverHarness
from fenced_testkit.servers import RedisCluster, RedisGroup, RedisSentinels, RedisServer
from fenced_testkit.servers.redis import node_id
from tests.colours import CHANNEL_CHECKS, alternating
from tests.conformance.authorities.test_redis import Harness
from tests.guard_outage_harness import FailoverHarness

pytestmark = pytest.mark.xdist_group("redis-groups")

T = TypeVar("T")
RUNTIME = BlockingRuntime()
FIRST = range(5461)
"""The slots of a cluster's first primary."""
SECOND = range(5461, 10923)
LEFT = """#!lua name=groups
redis.register_function('left', function(keys) return redis.call('GET', keys[1]) end)
"""


@pytest.fixture(scope="module")
def sentinels() -> Iterator[RedisSentinels]:
    with RedisSentinels() as group:
        yield group


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as group:
        yield group


@pytest.fixture
def moving_cluster() -> Iterator[RedisCluster]:
    """One of its own, for tests that leave a slot on its way between two nodes."""
    with RedisCluster() as group:
        yield group


@pytest.fixture(params=["sentinels", "cluster"])
def group(request: pytest.FixtureRequest) -> RedisGroup:
    found: RedisGroup = request.getfixturevalue(request.param)
    return found


def fresh_namespace() -> str:
    """One in a slot that has replicas."""
    while slot_of(f"{{{tag(name := secrets.token_hex(8))}}}") not in FIRST:
        pass
    return name


def opened(group: RedisGroup, namespace: str) -> RedisAuthority:
    authority = RedisAuthority.at(group.url(), RUNTIME, namespace)
    eventually(lambda: step(authority.open()))
    return authority


def eventually(call: Callable[[], T]) -> T:
    """The first answer. As long as a primary is being replaced there is none."""
    limit = time.monotonic() + 60
    while True:
        try:
            return call()
        except (Unavailable, Indeterminate):
            assert time.monotonic() < limit
            time.sleep(0.05)


def token_of(authority: Authority, ask: Ask) -> int:
    """The token of a grant, as soon as there is one: the same attempt is repeated until it has an answer."""
    answer = eventually(lambda: step(authority.ask(ask)))
    assert isinstance(answer, Granted), answer
    return answer.token


class GroupHarness(Harness):
    def __init__(self, runtime: Runtime, group: RedisGroup) -> None:
        super().__init__(runtime, group.primary())
        self._group = group
        while slot_of(f"{{{self._prefix}/default}}") not in FIRST:
            self._prefix = secrets.token_hex(8)

    async def authority(self, namespace: str = "default") -> Authority:
        authority = RedisAuthority.at(self._group.url(), self.runtime, f"{self._prefix}/{namespace}")
        self._opened.append(authority)
        await authority.open()
        return authority

    async def pass_time(self, seconds: float) -> None:
        self._pass_time("default", seconds)  # others are in other slots


STRICT = ("a_client_keeps_its_lease", "no_update_is_lost_under_contention")
"""Checks of strict clients, which a group refuses."""


@pytest.mark.parametrize(
    ("check", "colour"), alternating([check for check in CHANNEL_CHECKS if check.name not in STRICT])
)
def test_channel(check: Check[AuthorityHarness], colour: Colour, group: RedisGroup) -> None:
    """The rest of the kit runs on a server that is named: it is the same authority."""
    run(check, lambda runtime: GroupHarness(runtime, group), colour)


def test_strict_clients_are_refused(group: RedisGroup) -> None:
    """Sentinels and clusters promote by themselves, whatever is missing: that is best-effort, and they say so."""
    with (
        pytest.raises(Misconfigured, match="may promote a replica that lacks the last tokens"),
        Client(group.url(), namespace=fresh_namespace()) as client,
    ):
        client.acquire("orders")


def test_a_slot_moves_under_a_holder_and_a_waiter(cluster: RedisCluster) -> None:
    """ASK while its keys are on the way, MOVED afterwards: each is followed, and no token is minted twice."""
    namespace = fresh_namespace()
    slot = slot_of(f"{{{tag(namespace)}}}")
    source = next(s for s in cluster.servers[:3] if _owns(s, slot))
    target = next(s for s in cluster.servers[1:2] if s is not source)
    one, two = opened(cluster, namespace), opened(cluster, namespace)
    holder, waiter = asking(RUNTIME, "orders", ttl=600), asking(RUNTIME, "orders", ttl=600, wait=True)
    tokens = [token_of(one, holder)]
    assert isinstance(step(two.ask(waiter)), Waiting)

    target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
    source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
    keys = source.execute("CLUSTER", "GETKEYSINSLOT", slot, 10)
    source.execute("MIGRATE", target.host, target.port, "", 0, 5000, "KEYS", *keys)
    assert len(keys) == 4
    (kept,) = step(one.renew([holder.secret]))
    assert isinstance(kept, Kept)
    tokens.append(token_of(one, asking(RUNTIME, "meanwhile", ttl=600)))

    for server in (target, source, cluster.servers[2]):
        server.execute("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
    tokens.append(token_of(two, asking(RUNTIME, "afterwards", ttl=600)))
    assert step(one.release(holder.secret)) == Released()
    tokens.append(token_of(two, waiter))
    assert tokens == list(range(tokens[0], tokens[0] + 4)), "each was carried out once"
    for each in (one, two):
        step(each.close())


def test_a_slot_moves_under_a_transaction(moving_cluster: RedisCluster) -> None:
    """While only some of its keys have arrived, all of its commands run or none, on either node, as in MULTI."""
    cluster, tag = moving_cluster, fresh_namespace()
    slot = slot_of(f"{{{tag}}}")
    source = next(s for s in cluster.servers[:3] if _owns(s, slot))
    target = next(s for s in cluster.servers[:3] if s is not source)
    guard = RedisGuard(tag=tag, guarantee="best-effort")
    holder, older = (Stamp("00000000000000aa", ("a",), token, 1, f"{token:032x}") for token in (2, 1))
    keys = [f"{{{tag}}}:{number}" for number in range(3)]

    def sold(client: Any, stay: int) -> bool:
        """Whether a transaction over all keys was carried out, if this one of them is deleted and written again."""
        try:
            with guard.transaction(client, holder) as tx:
                for key in keys:
                    tx.incr(key)
                tx.delete(keys[stay])
                tx.mset({keys[stay]: 0, keys[(stay + 1) % 3]: 0})
        except Unavailable:
            return False
        return True

    async def asynchronously() -> Any:
        host, port = cluster.servers[0].host, cluster.servers[0].port
        async with redis.asyncio.cluster.RedisCluster(host=host, port=port) as client:
            suspending = AsyncRedisGuard(tag=tag, guarantee="best-effort")
            async with suspending.transaction(client, holder) as tx:
                tx.incr(keys[0])
            return tx.results

    def values() -> list[Any]:
        """Of whichever node has them."""
        here = source.execute("CLUSTER", "GETKEYSINSLOT", slot, 100)
        with redis.Redis(host=target.host, port=target.port, single_connection_client=True) as there:
            found = []
            for key in keys:
                if key.encode() in here:
                    found.append(source.execute("GET", key))
                else:
                    there.execute_command("ASKING")
                    found.append(there.get(key))
            return found

    with own_client(cluster) as client:
        eventually(lambda: guard.announce(client, holder))
        with pytest.raises(StaleToken):  # so that there are records, too
            guard.announce(client, older)
        client.mset(dict.fromkeys(keys, 0))
        target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
        moved = source.execute("CLUSTER", "GETKEYSINSLOT", slot, 100)
        assert len(moved) == 3 + 5
        moved.sort(key=lambda key: (key.startswith(b"fenced:"), key))  # the data, then mark and configuration
        for number, key in enumerate(moved):
            before = values()
            done = sold(client, number % 3)
            assert values() == before or done, f"half of it, {number} keys have moved"
            with pytest.raises((StaleToken, Unavailable)), guard.transaction(client, older) as tx:
                tx.set(keys[0], "late")
            source.execute("MIGRATE", target.host, target.port, key, 0, 5000)
        assert asyncio.run(asynchronously())  # all of its keys have arrived: ASK is followed
        for server in (target, source, *cluster.servers[2:3]):
            server.execute("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
        assert eventually(lambda: sold(client, 0))


def test_a_planted_bug_begins_while_the_slot_moves(
    moving_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = scripts.COMMANDS.source
    assert source.count("local moves = moving()") == 1
    wrong = scripts.GuardScript(source.replace("local moves = moving()", "local moves = nil"))
    monkeypatch.setattr(marks, "COMMANDS", wrong)
    with pytest.raises((AssertionError, redis.ResponseError)):
        test_a_slot_moves_under_a_transaction(moving_cluster)


def _owns(server: RedisServer, slot: int) -> bool:
    mine, slots = node_id(server).encode(), server.execute("CLUSTER", "SLOTS")
    return any(first <= slot <= last and owner[2] == mine for first, last, owner, *_ in slots)


# proves authority redis: groups
def test_promotions_under_live_holders(group: RedisGroup) -> None:
    """The primary is killed, then its successor stands still and comes back: leases go on, and tokens only rise."""
    namespace = fresh_namespace()
    one, two, idle = (opened(group, namespace) for _ in range(3))
    holder, waiter = asking(RUNTIME, "orders", ttl=600), asking(RUNTIME, "orders", ttl=600, wait=True)
    last = token_of(one, holder)
    assert isinstance(step(two.ask(waiter)), Waiting)

    first = group.primary()
    group.replicas_catch_up(first)
    first.kill()
    second = group.promoted(first)
    (kept,) = eventually(lambda: step(one.renew([holder.secret])))
    assert isinstance(kept, Kept), "the promoted replica knows the lease: it had confirmed the grant"
    with pytest.raises(Misconfigured, match="replication id"):  # it may lack others: an operator must look
        token_of(one, asking(RUNTIME, "new", ttl=600))
    floor = eventually(lambda: step(one.raise_floor(last + 1000)))
    first.start()  # as a replica, without which nothing is confirmed
    (place,) = eventually(lambda: step(two.renew([waiter.secret])))
    if not isinstance(place, Waiting):  # nobody renewed it for ten seconds, so it has lapsed
        waiter = asking(RUNTIME, "orders", ttl=600, wait=True)
        eventually(lambda: step(two.ask(waiter)))
    tokens = [floor, token_of(one, asking(RUNTIME, "new", ttl=600))]
    assert step(one.release(holder.secret)) == Released()
    # Over a connection that it keeps.
    tokens += [
        token_of(two, waiter),
        token_of(idle, asking(RUNTIME, "idle", ttl=600)),
    ]
    assert tokens == sorted(set(tokens))

    group.replicas_catch_up(second)
    second.freeze()
    group.promoted(second)
    (kept,) = eventually(lambda: step(two.renew([waiter.secret])))
    assert isinstance(kept, Kept)
    floor = eventually(lambda: step(two.raise_floor(tokens[-1] + 1000)))
    second.thaw()  # it believes that it is the primary until it is told
    late = asking(RUNTIME, "late", ttl=600)
    assert token_of(idle, late) > floor, "the old primary has no replica left that confirms"
    assert not isinstance(step(idle.release(late.secret)), Ended)
    for each in (one, two, idle):
        step(each.close())


# proves guard redis: one-slot
def test_a_guard_has_one_slot_of_a_cluster(cluster: RedisCluster) -> None:
    """Its marks are in the slot of the data. A key elsewhere is refused before anything runs; MOVED is followed."""
    tag, stale = fresh_namespace(), pytest.raises(StaleToken)
    guard = RedisGuard(tag=tag, guarantee="best-effort")
    one, two = (Stamp("00000000000000aa", ("a", "b"), token, 1, f"{token:032x}") for token in (1, 2))
    host, port = cluster.servers[0].host, cluster.servers[0].port

    async def asynchronous() -> None:
        guard = AsyncRedisGuard(tag=tag, guarantee="best-effort")
        async with redis.asyncio.cluster.RedisCluster(host=host, port=port) as client:
            for _ in range(60):
                with contextlib.suppress(Indeterminate):  # no replica has confirmed it yet
                    await guard.announce(client, two)
                    break
            async with guard.transaction(client, two) as tx:
                tx.incr(f"{{{tag}}}:counter")
            with stale:
                await guard.announce(client, one)
            with pytest.raises(Unsupported, match=tag):
                async with guard.transaction(client, two) as tx:
                    tx.set("elsewhere", 1)

    with redis.cluster.RedisCluster(host=host, port=port) as client:
        for each in (one, two):
            eventually(lambda each=each: guard.announce(client, each))  # type: ignore[misc]
        with guard.transaction(client, two) as tx:
            tx.set(f"{{{tag}}}:counter", 1)
        asyncio.run(asynchronous())
        slots = client.nodes_manager.slots_cache
        slots[slot_of(f"{{{tag}}}")] = slots[16383]  # an old table: another node, which redirects
        with stale, guard.transaction(client, one) as tx:
            tx.incr(f"{{{tag}}}:counter")
        with pytest.raises(Unsupported, match=tag), guard.transaction(client, two) as tx:
            tx.incr(f"{{{tag}}}:counter")
            tx.set("elsewhere", 1)
        with pytest.raises(Unsupported, match=tag):
            guard.wrap("return 1")(client, two, keys=["elsewhere"])
        assert client.get(f"{{{tag}}}:counter") == b"2"
    with redis.Redis(host=host, port=port) as node, pytest.raises(Unsupported, match="whole cluster"):
        guard.announce(node, two)
    values = RedisValues.at(f"{cluster.url()}?tag={tag}&guarantee=best-effort", RUNTIME)
    step(values.open())
    assert step(values.highest()) == 2
    step(values.close())


def test_a_slot_for_each_name(cluster: RedisCluster) -> None:
    """Names on two nodes: each is decided where its keys are, and operators reach both nodes."""
    home = fresh_namespace()
    tags = [
        next(tag for tag in map(str, itertools.count()) if slot_of(tag) in part) for part in (FIRST, SECOND)
    ]
    names = [f"stock/{tag}" for tag in tags]
    guard = RedisGuard(tag=home, name="stock/{tag}", guarantee="best-effort")
    older, newer = (Stamp("00000000000000aa", tuple(names), token, 1, f"{token:032x}") for token in (1, 2))
    library = guard.wrap_library(LEFT)
    values = RedisValues.at(f"{cluster.url()}?tag={home}&guarantee=best-effort&name=stock/{{tag}}", RUNTIME)
    eventually(lambda: step(values.open()))

    async def asynchronous() -> None:
        guard = AsyncRedisGuard(tag=home, name="stock/{tag}", guarantee="best-effort")
        library = guard.wrap_library(LEFT)
        host, port = cluster.servers[0].host, cluster.servers[0].port
        async with redis.asyncio.cluster.RedisCluster(host=host, port=port) as client:
            with pytest.raises(StaleToken):
                await guard.announce(client, older)
            for _ in range(60):
                with contextlib.suppress(Indeterminate):  # no replica has confirmed it yet
                    await guard.announce(client, newer)
                    break
            for name, tag in zip(names, tags, strict=True):
                async with guard.transaction(client, newer, name) as tx:
                    tx.incr(f"{{{tag}}}:left")
            await library.load(client)
            assert (
                await library.function("left")(client, newer, names[1], keys=[f"{{{tags[1]}}}:left"]) == b"2"
            )

    with own_client(cluster) as client:
        eventually(lambda: guard.announce(client, older))
        for name, tag in zip(names, tags, strict=True):
            with guard.transaction(client, older, name) as tx:
                tx.set(f"{{{tag}}}:left", 1)
        eventually(lambda: guard.announce(client, newer))
        asyncio.run(asynchronous())
        for name, tag in zip(names, tags, strict=True):
            with pytest.raises(StaleToken), guard.transaction(client, older, name) as tx:
                tx.set(f"{{{tag}}}:left", 9)
            assert client.get(f"{{{tag}}}:left") == b"2"
        library.load(client)  # on every primary
        for name, tag in zip(names, tags, strict=True):
            assert library.function("left")(client, newer, name, keys=[f"{{{tag}}}:left"]) == b"2"
            with pytest.raises(StaleToken):
                library.function("left")(client, older, name, keys=[f"{{{tag}}}:left"])
        with pytest.raises(Unsupported, match="are in several slots"), guard.transaction(client, newer) as tx:
            tx.get(f"{{{tags[0]}}}:left")
        with (
            pytest.raises(Unsupported, match=r"the keys of stock/42 are named \{42\}"),
            guard.transaction(client, newer, names[0]) as tx,
        ):
            tx.set(f"{{{tags[1]}}}:left", 9)
        eventually(lambda: step(values.set_mode("shadow")))
        for name, tag in zip(names, tags, strict=True):
            with guard.transaction(client, older, name) as tx:
                tx.incr(f"{{{tag}}}:left")
            assert tx.results == [3]
    status = eventually(lambda: step(values.operate(lambda operator: operator.status()))).guards[0]
    assert (status.marks, status.highest, status.wrong) == (2, 2, ())
    records = eventually(lambda: step(values.operate(lambda operator: operator.records())))
    assert {record.name for record in records} == set(names)
    step(values.close())


def test_a_guard_behind_sentinels(sentinels: RedisSentinels) -> None:
    tag = secrets.token_hex(8)
    values = RedisValues.at(f"{sentinels.url()}?tag={tag}", RUNTIME)
    with pytest.raises(Misconfigured, match="may promote a replica that lacks the last marks"):
        step(values.open())
    step(values.close())
    with own_client(sentinels) as client:
        guard = RedisGuard(tag=tag, guarantee="best-effort")
        eventually(lambda: guard.announce(client, Stamp("00000000000000aa", ("a",), 2, 1, f"{2:032x}")))
        with pytest.raises(StaleToken):
            guard.announce(client, Stamp("00000000000000aa", ("a",), 1, 1, f"{1:032x}"))


# proves guard redis: failover-loses
@pytest.mark.parametrize("check", GUARD_FAILOVER_CHECKS, ids=lambda check: check.name)
def test_a_promotion_under_live_guards(check: Check[GuardFailoverHarness], group: RedisGroup) -> None:
    """The kit on our own connections, and the program's own client, which is in use all the time."""
    tag, first = fresh_namespace(), group.primary()
    guard = RedisGuard(tag=tag, guarantee="best-effort")
    older, newer = (Stamp("00000000000000aa", ("a",), token, 1, f"{token:032x}") for token in (1, 2))

    def lose() -> None:
        group.replicas_catch_up(first)  # one replica has confirmed each mark; the promoted one may be another
        first.kill()

    with own_client(group) as client:

        def transaction(stamp: Stamp, value: str) -> None:
            with guard.transaction(client, stamp) as tx:
                tx.set(f"{{{tag}}}", value)

        eventually(lambda: transaction(older, "old"))
        eventually(lambda: guard.announce(client, newer))
        url = f"{group.url()}?tag={fresh_namespace()}&rule=sequenced&guarantee=best-effort"
        colour: Colour = "asyncio" if isinstance(group, RedisSentinels) else "blocking"
        run(check, lambda runtime: FailoverHarness(runtime, url, lose), colour)
        first.start()
        with pytest.raises(StaleToken):
            eventually(lambda: transaction(older, "late"))
        eventually(lambda: transaction(newer, "new"))
        assert client.get(f"{{{tag}}}") == b"new"


@contextmanager
def own_client(group: RedisGroup) -> Iterator[Any]:
    """A client as a program makes it."""
    if isinstance(group, RedisCluster):
        nodes: list[Any] = [redis.cluster.ClusterNode(each.host, each.port) for each in group.servers]  # type: ignore[no-untyped-call]
        with redis.cluster.RedisCluster(startup_nodes=nodes) as client:
            yield client
        return
    assert isinstance(group, RedisSentinels)
    named: Any = redis.sentinel.Sentinel([(each.host, each.port) for each in group.sentinels])  # type: ignore[no-untyped-call]
    with named.master_for(group.set_name) as client:
        yield client
    for sentinel in named.sentinels:
        sentinel.close()


def test_nobody_names_a_primary() -> None:
    with pytest.raises(Unavailable, match="no member names a primary"):
        step(RedisAuthority.at("redis+sentinel://127.0.0.1:1,127.0.0.1:2/mine", RUNTIME, "x").open())


def test_a_set_that_nobody_watches(sentinels: RedisSentinels) -> None:
    url = sentinels.url().rpartition("/")[0] + "/other"
    with pytest.raises(Misconfigured, match="watches no set 'other'"):
        step(RedisAuthority.at(url, RUNTIME, "x").open())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://host", r"redis\+sentinel://user:password@sentinel1"),
        ("redis+sentinel://host/mine/x", "is a number"),
        ("redis+cluster://host/1", "has one database"),
        ("redis+cluster://host?db=1", "no option 'db'"),
    ],
)
def test_odd_addresses(url: str, says: str) -> None:
    with pytest.raises(Misuse, match=says):
        redis_address(url)


def test_the_slot_of_a_key() -> None:
    """The examples of the cluster's specification."""
    assert slot_of("{user1000}.following") == slot_of("{user1000}.followers")
    assert slot_of("foo{}{bar}") != slot_of("foo{}{other}")
    assert slot_of("123456789") == 0x31C3


def test_redirections() -> None:
    asked = ("10.0.0.1", 6379)
    assert redirection(ErrorReply("MOVED 3999 127.0.0.1:6381"), asked) == (("127.0.0.1", 6381), False)
    assert redirection(ErrorReply("ASK 3999 ::1:6381"), asked) == (("::1", 6381), True)
    assert redirection(ErrorReply("MOVED 3999 :6381"), asked) == (("10.0.0.1", 6381), False)
    for other in (ErrorReply("MOVED nonsense"), ErrorReply("ERR no"), 7, [b"MOVED"]):
        assert redirection(other, asked) is None
