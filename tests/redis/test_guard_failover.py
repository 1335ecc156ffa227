"""RedisGuard and a replica: marks that no replica has confirmed are not reported, and what is lost otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import redis
import redis.asyncio

from fenced.drills.relay import Proxy
from fenced.errors import AlreadyApplied, Indeterminate, Misconfigured, StaleToken, Unavailable
from fenced.redis import AsyncRedisGuard, RedisGuard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.redis.guard import clients
from fenced.stores.redis.guard import values as values_module
from fenced.stores.redis.guard.values import RedisValues
from fenced.stores.redis.wire.resp import command
from fenced.values.model import Credential
from fenced_testkit.servers import RedisServer
from tests.redis.test_guard import stamp

pytestmark = pytest.mark.xdist_group("redis")


def test_a_promoted_replica_refuses_what_it_knows_to_be_stale(tag: str) -> None:
    """Marks are replicated with the data. What the replica has not received is lost, with the data."""
    with RedisServer() as server, server.replica() as replica:
        with redis.Redis.from_url(server.url()) as client:
            with pytest.raises(Misconfigured, match="may lack the last marks"):
                RedisGuard(tag=tag).announce(client, stamp(5))
            guard = RedisGuard(tag=tag, guarantee="best-effort")
            confirmed(lambda: guard.announce(client, stamp(6)))
            with guard.transaction(client, stamp(6)) as tx:
                tx.set("key", "new")
        replica.caught_up_with(server)
        with redis.Redis.from_url(replica.url()) as client:
            with pytest.raises(Unavailable, match="replica"):
                guard.announce(client, stamp(7))
            server.kill()
            replica.promote()
            with pytest.raises(StaleToken), guard.transaction(client, stamp(5)) as tx:
                tx.set("key", "late")
            with guard.transaction(client, stamp(7)) as tx:
                tx.get("key")
            assert tx.results == [b"new"]


def confirmed(work: Callable[[], None]) -> None:
    """Repeat it until a replica confirms it, which takes long on a busy machine."""
    limit = time.monotonic() + 120
    while True:
        try:
            return work()
        except Indeterminate:
            assert time.monotonic() < limit


def test_a_mark_that_no_replica_confirms_is_unknown(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays so when it is repeated, over another connection and with nothing left to do."""
    with (
        RedisServer() as primary,
        Proxy(primary.host, primary.port) as proxy,
        primary.replica(through=proxy) as replica,
        redis.Redis.from_url(primary.url()) as client,
        redis.Redis.from_url(primary.url()) as other,
    ):
        guard = RedisGuard(tag=tag, rule="sequenced", guarantee="best-effort")
        url = f"{primary.url()}?tag={tag}&rule=sequenced&guarantee=best-effort"
        values = RedisValues.at(url, BlockingRuntime())
        step(values.open())
        for each in (client, other):
            confirmed(lambda each=each: guard.announce(each, stamp(5)))  # type: ignore[misc]
        proxy.black_hole()
        for module in (clients, values_module):
            monkeypatch.setattr(module, "_WAIT", command("WAIT", 1, 100))
        unconfirmed = pytest.raises(Indeterminate, match="no replica confirmed")
        for each in (client, other, client):
            with unconfirmed:
                guard.announce(each, stamp(6))
        with unconfirmed:
            step(values.announce(Credential((stamp(6),))))
        with unconfirmed, guard.transaction(client, stamp(6, 1)) as tx:  # so it does not begin
            tx.incr("counter")
        count = guard.wrap("return redis.call('INCR', KEYS[1])")
        with unconfirmed:
            count(client, stamp(6, 1), keys=["counter"])
        with unconfirmed:
            count(other, stamp(6, 1), keys=["counter"])  # applied, but only here
        with pytest.raises(StaleToken):
            guard.announce(client, stamp(5))

        async def story() -> None:
            async with redis.asyncio.Redis.from_url(primary.url()) as own:
                with unconfirmed:
                    await AsyncRedisGuard(tag=tag, rule="sequenced", guarantee="best-effort").announce(
                        own, stamp(6)
                    )

        asyncio.run(story())
        proxy.heal()

        def repeat() -> None:
            count(other, stamp(6, 1), keys=["counter"])

        with pytest.raises(AlreadyApplied):
            confirmed(repeat)
        step(values.close())
        replica.promote()
        with redis.Redis.from_url(replica.url()) as promoted:
            assert promoted.get("counter") == b"1", "what was reported is on the replica"
            with pytest.raises(StaleToken), guard.transaction(promoted, stamp(5, 2)):
                pass


def test_a_promoted_replica_lacks_marks_it_did_not_confirm(tag: str) -> None:
    """A replica that confirmed nothing is promoted: it has neither the newer holder's write nor its mark."""
    with (
        RedisServer() as primary,
        primary.replica(),
        Proxy(primary.host, primary.port) as proxy,
        primary.replica(through=proxy) as behind,
        redis.Redis.from_url(primary.url()) as client,
        redis.Redis.from_url(behind.url()) as promoted,
    ):
        guard = RedisGuard(tag=tag, guarantee="best-effort")
        confirmed(lambda: guard.announce(client, stamp(5)))
        with guard.transaction(client, stamp(5)) as tx:
            tx.set("key", "old")
        behind.caught_up_with(primary)
        proxy.black_hole()
        confirmed(lambda: guard.announce(client, stamp(6)))  # by the other replica
        with guard.transaction(client, stamp(6)) as tx:
            tx.set("key", "new")
        behind.promote()
        with guard.transaction(promoted, stamp(5, 2)) as tx:  # overtaken, but nobody here knows
            tx.get("key")
        assert tx.results == [b"old"]
