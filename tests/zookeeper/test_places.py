"""Places in queues: nodes of the session that will hold the lease. A waiter is granted by what it reads, never by what
an event says."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from fenced.drills.relay import Fault, Proxy
from fenced.errors import Indeterminate
from fenced.runtime.blocking import step
from fenced.stores.zookeeper.authority.attempt import ZooKeeperAttempt, ZooKeeperPhase
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.authority.nodes import LockDelays
from fenced.stores.zookeeper.authority.session import SessionCall, ZooKeeperSession
from fenced.stores.zookeeper.authority.watching import PlaceWatch
from fenced.stores.zookeeper.wire import jute
from fenced.testing.kit import asking, granted
from fenced.values.model import Ask, Ended, Granted, Kept, Released, Waiting, grant_id
from fenced_testkit.servers import ZooKeeperServer
from tests.shifted import Shifted
from tests.simulation.bugs_zookeeper import EventsAreBelieved, made_with
from tests.zookeeper.acting import RUNTIME, WORDS, Pair, opened, paths_of, woken

SHORT = 1.0
LONG = 30.0


def queued(*clients: ZooKeeperAuthority) -> list[Ask]:
    """The first holds, the others wait behind it."""
    asks = [asking(RUNTIME, "orders", ttl=LONG, wait=True) for _ in clients]
    for client, ask, kind in zip(clients, asks, [Granted] + [Waiting] * len(asks), strict=False):
        assert isinstance(step(client.ask(ask)), kind)
    return asks


@pytest.fixture
def two_ways(
    zookeeper_server: ZooKeeperServer,
) -> Iterator[tuple[Proxy, ZooKeeperAuthority, ZooKeeperAuthority]]:
    """A client behind a proxy, and one that is not."""
    namespace = secrets.token_hex(8)
    with (
        Proxy(zookeeper_server.host, zookeeper_server.port) as proxy,
        opened(f"zookeeper://{proxy.host}:{proxy.port}", namespace) as one,
        opened(zookeeper_server.url(), namespace) as two,
    ):
        yield proxy, one, two


Ways = tuple[Proxy, ZooKeeperAuthority, ZooKeeperAuthority]


# proves authority zookeeper: places
def test_a_dead_waiter_holds_nobody_up_for_longer_than_its_session(two_ways: Ways) -> None:
    """The server ends its session, by its ttl and not by that of the others."""
    proxy, dead, alive = two_ways
    holder, lost = asking(RUNTIME, "orders", ttl=LONG), asking(RUNTIME, "orders", ttl=SHORT, wait=True)
    waiter = asking(RUNTIME, "orders", ttl=LONG, wait=True)
    step(granted(alive, holder))
    assert isinstance(step(dead.ask(lost)), Waiting)
    assert isinstance(step(alive.ask(waiter)), Waiting)
    proxy.black_hole(drop=True)
    assert step(alive.release(holder.secret)) == Released()
    woken(alive, grant_id(waiter.secret))
    step(granted(alive, waiter))


# What a cut leaves behind.


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.LOSE_REPLY])
def test_a_cut_while_a_waiter_is_granted_is_one_grant(two_ways: Ways, fault: Fault) -> None:
    proxy, one, two = two_ways
    holder, waiter, last = queued(two, one, two)
    assert step(two.release(holder.secret)) == Released()
    trigger = proxy.on(paths_of(one).attempt(grant_id(waiter.secret)).encode(), fault)
    grant = step(granted(one, waiter))
    trigger.wait()
    assert (grant.ttl, step(one.renew([waiter.secret]))) == (LONG, [Kept(LONG)])
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(granted(one, waiter)).token == grant.token
    assert step(one.release(waiter.secret)) == Released()
    assert step(granted(two, last)).token > grant.token


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.LOSE_REPLY])
def test_a_cut_while_a_lease_is_released_to_a_waiter_is_one_grant(two_ways: Ways, fault: Fault) -> None:
    proxy, one, two = two_ways
    holder, waiter, last = queued(one, one, two)
    trigger = proxy.on(WORDS["release"], fault)
    assert step(one.release(holder.secret)) == Released()
    trigger.wait()
    woken(one, grant_id(waiter.secret))
    grant = step(granted(one, waiter))
    assert step(one.renew([waiter.secret])) == [Kept(LONG)]
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(one.release(waiter.secret)) == Released()
    assert step(granted(two, last)).token > grant.token


def test_an_ask_that_made_its_places_is_never_unavailable(
    two_ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place was made; the next request of the same ask finds no server. `Unavailable` would leave a ghost."""
    proxy, one, two = two_ways
    holder = asking(RUNTIME, "orders", ttl=LONG)
    step(granted(two, holder))
    step(granted(one, asking(RUNTIME, "kept", ttl=LONG)))  # so its session goes on
    stand = PlaceWatch.stand

    async def alone(self: PlaceWatch, call: SessionCall, *rest: Any) -> Any:
        monkeypatch.undo()
        proxy.refuse()
        call.session.close()
        return await stand(self, call, *rest)

    monkeypatch.setattr(PlaceWatch, "stand", alone)
    waiter = asking(RUNTIME, "orders", ttl=LONG, wait=True)
    with pytest.raises(Indeterminate):
        step(one.ask(waiter, RUNTIME.now() + 1))
    proxy.heal()
    assert step(one.withdraw(waiter.secret)) == Released()
    assert step(two.release(holder.secret)) == Released()
    step(granted(two, asking(RUNTIME, "orders")))


@pytest.mark.parametrize("fault", [Fault.CUT_AFTER, Fault.LOSE_REPLY])
def test_a_take_over_whose_reply_is_lost_leaves_nothing_behind(
    zookeeper_server: ZooKeeperServer, fault: Fault
) -> None:
    """The nodes are in the session of a client that does not know whether they are, and that goes on."""
    namespace, runtime = secrets.token_hex(8), Shifted(RUNTIME)
    with (
        Proxy(zookeeper_server.host, zookeeper_server.port) as proxy,
        opened(zookeeper_server.url(), namespace) as one,
        opened(f"zookeeper://{proxy.host}:{proxy.port}", namespace, runtime) as two,
    ):
        held = asking(RUNTIME, "orders")
        step(granted(one, held))
        trigger = proxy.on(WORDS["release"], fault)  # which begins with a deletion, too
        step(two.renew([held.secret]))
        trigger.wait()
        runtime.ahead += 11
        step(granted(two, asking(RUNTIME, "other")))
        step(granted(one, asking(RUNTIME, "orders")))


# Who is ahead.


def test_one_ahead_that_leaves_between_the_look_and_the_watch_is_noticed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    holder, middle = queued(one, one)
    last = asking(RUNTIME, "orders", ttl=LONG, wait=True)
    stand = PlaceWatch.stand
    left: list[Any] = []

    async def leave_meanwhile(self: PlaceWatch, call: SessionCall, mine: Any, *rest: Any) -> Any:
        if mine.public == grant_id(last.secret) and not left:
            left.append(await one.withdraw(middle.secret))
        return await stand(self, call, mine, *rest)

    monkeypatch.setattr(PlaceWatch, "stand", leave_meanwhile)
    assert isinstance(step(one.ask(last)), Waiting)
    assert left == [Released()]
    assert step(one.release(holder.secret)) == Released()
    woken(one, grant_id(last.secret))
    step(granted(one, last))


def test_a_waiter_first_at_one_name_keeps_it_from_those_behind(pair: Pair) -> None:
    """A waiter for two names is already first at one of them, and gets the other from a release of its own client."""
    one, two = pair
    holder, other = asking(RUNTIME, "orders"), asking(RUNTIME, "stock")
    both, behind = asking(RUNTIME, "orders", "stock", wait=True), asking(RUNTIME, "stock", wait=True)
    step(granted(one, holder))
    step(granted(two, other))
    assert isinstance(step(one.ask(both)), Waiting)
    assert step(two.release(other.secret)) == Released()
    step(one.observe("stock"))  # the event of that release arrives before this reply
    assert isinstance(step(two.ask(behind)), Waiting)
    assert step(one.release(holder.secret)) == Released()
    step(granted(one, both))
    step(two.observe("stock"))
    assert isinstance(step(two.ask(behind)), Waiting)
    assert step(one.release(both.secret)) == Released()
    step(granted(two, behind))


def test_a_waiter_that_expires_while_it_asks_is_told_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers have not answered for longer than it keeps its place, and another caller has noticed that."""
    one, two = pair
    holder, waiter = queued(two, one)
    stand = PlaceWatch.stand

    async def expires_meanwhile(
        self: PlaceWatch, call: SessionCall, mine: ZooKeeperAttempt, *rest: Any
    ) -> Any:
        answer = await stand(self, call, mine, *rest)
        self.own.drop(mine, ZooKeeperPhase.EXPIRED)
        return answer

    monkeypatch.setattr(PlaceWatch, "stand", expires_meanwhile)
    assert step(one.ask(waiter)) == Ended("expired")
    monkeypatch.undo()
    assert step(two.release(holder.secret)) == Released()
    step(granted(one, asking(RUNTIME, "orders")))


def test_a_name_that_is_gone_before_its_lock_delay_is_written_is_read_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place was deleted after the queue was read, and the server removed the node of the name, which was empty."""
    one, two = pair
    announce = LockDelays.announce

    async def gone_meanwhile(self: LockDelays, call: SessionCall, mine: ZooKeeperAttempt) -> bool:
        monkeypatch.undo()
        paths = [*mine.places.values(), self.nodes.paths.name("orders")]
        self.nodes.check(*await call.exchange(*map(jute.delete, paths)))
        return await announce(self, call, mine)

    monkeypatch.setattr(LockDelays, "announce", gone_meanwhile)
    assert step(one.ask(asking(RUNTIME, "orders", lock_delay=5.0))) == Ended("revoked")
    step(granted(two, asking(RUNTIME, "orders", lock_delay=5.0)))


def behind_one_that_wandered(url: str, kind: type[ZooKeeperAuthority]) -> object:
    """What a waiter is answered when the holder ahead of it has been taken over by another client.

    That deletes the holder's place and makes it again, in one transaction: the event says that it is gone.
    """
    namespace = secrets.token_hex(8)
    with opened(url, namespace, kind=kind) as one, opened(url, namespace, kind=kind) as two:
        holder, waiter = queued(one, two)
        assert step(two.renew([holder.secret])) == [Kept(LONG)]
        woken(two, grant_id(waiter.secret))
        return step(two.ask(waiter))


def test_a_place_that_is_made_again_is_still_ahead(zookeeper_url: str) -> None:
    assert isinstance(behind_one_that_wandered(zookeeper_url, ZooKeeperAuthority), Waiting)


def test_a_waiter_that_believes_events_would_be_caught(zookeeper_url: str) -> None:
    assert isinstance(
        behind_one_that_wandered(zookeeper_url, made_with("attempts", EventsAreBelieved)), Granted
    )


def test_a_waiter_whose_session_ends_while_it_queues_is_notified(
    zookeeper_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another caller finds the session expired just before the place is written: the place stands in the next session.

    The attempt must be known there, or no event of the server's would ever reach it.
    """
    namespace = secrets.token_hex(8)
    connected = ZooKeeperSession._connected
    waiter = asking(RUNTIME, "orders", ttl=LONG, wait=True)
    ended: list[ZooKeeperSession] = []

    async def end_first(self: ZooKeeperSession, until: float) -> Any:
        if not ended and grant_id(waiter.secret) in self.attempts:
            ended.append(self)
            self._end()
        return await connected(self, until)

    with opened(zookeeper_server.url(), namespace) as one, opened(zookeeper_server.url(), namespace) as other:
        holder = asking(RUNTIME, "orders", ttl=LONG)
        step(granted(other, holder))
        monkeypatch.setattr(ZooKeeperSession, "_connected", end_first)
        assert isinstance(step(one.ask(waiter)), Waiting)
        assert ended
        step(one.next_wakeups(RUNTIME.now()))
        step(other.release(holder.secret))
        woken(one, grant_id(waiter.secret))
        step(granted(one, waiter))
