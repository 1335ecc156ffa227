"""Places in queues are carried by a short session of their own: a dead waiter holds nobody up for long."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fenced.authorities.zookeeper import base
from fenced.authorities.zookeeper.authority import ZooKeeperAuthority
from fenced.authorities.zookeeper.moving import Moving
from fenced.authorities.zookeeper.session import ZooKeeperSession
from fenced.authorities.zookeeper.tree import ZooKeeperAttempt
from fenced.errors import Indeterminate
from fenced.model import Ask, Ended, Granted, Kept, Released, Waiting, grant_id
from fenced.runtime.blocking import step
from fenced.testing.faults import Fault, Proxy
from fenced.testing.kit import asking, granted
from fenced.testing.servers import ZooKeeperServer
from tests.shifted import Shifted
from tests.zookeeper.acting import RUNTIME, WORDS, Pair, opened, places, woken
from tests.zookeeper.raw import Raw
from tests.zookeeper.shifting import end_session

PLACES_SECONDS = 1.0
LONG = 30.0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is true for the real time is shown with a shorter one."""
    monkeypatch.setattr(ZooKeeperAuthority, "places_seconds", PLACES_SECONDS)


def let_in(server: ZooKeeperServer, patience: float) -> bool:
    """Whether the waiter behind a dead one is granted within so many seconds after the holder's release."""
    namespace = secrets.token_hex(8)
    with (
        Proxy(server.host, server.port) as proxy,
        opened(f"zookeeper://{proxy.host}:{proxy.port}", namespace) as dead,
        opened(server.url(), namespace) as alive,
    ):
        holder, lost = asking(RUNTIME, "orders", ttl=LONG), asking(RUNTIME, "orders", ttl=LONG, wait=True)
        step(granted(alive, holder))
        assert isinstance(step(dead.ask(lost)), Waiting)
        waiter = asking(RUNTIME, "orders", ttl=LONG, wait=True)
        assert isinstance(step(alive.ask(waiter)), Waiting)
        proxy.black_hole(drop=True)
        began = time.monotonic()
        assert step(alive.release(holder.secret)) == Released()
        while time.monotonic() - began < patience:
            step(alive.renew([waiter.secret]))
            match step(alive.ask(waiter)):
                case Granted():
                    return True
                case Ended():  # on a machine so busy that it was thought dead itself
                    waiter = asking(RUNTIME, "orders", ttl=LONG, wait=True)
            step(alive.next_wakeups(RUNTIME.now() + 0.1))
        return False


# proves authority zookeeper: places
@pytest.mark.usefixtures("short")
def test_a_dead_waiter_holds_nobody_up_for_long(zookeeper_server: ZooKeeperServer) -> None:
    """Its ttl is long; its place goes with the short session all the same, by the server's own doing."""
    assert let_in(zookeeper_server, 10.0)


@pytest.mark.usefixtures("short")
def test_a_place_in_the_session_of_its_lease_would_be_caught(
    zookeeper_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the waiter stands where it will hold."""
    monkeypatch.setattr(ZooKeeperAuthority, "_queueing", lambda _, home: home)
    assert not let_in(zookeeper_server, PLACES_SECONDS + 3.0)


# From the session for places into that of the lease.


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


def queued(*clients: ZooKeeperAuthority) -> list[Ask]:
    """The first holds, the others wait behind it."""
    asks = [asking(RUNTIME, "orders", ttl=LONG, wait=True) for _ in clients]
    for client, ask, kind in zip(clients, asks, [Granted] + [Waiting] * len(asks), strict=False):
        assert isinstance(step(client.ask(ask)), kind)
    return asks


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.LOSE_REPLY])
def test_a_cut_while_a_waiter_is_granted_is_one_grant(two_ways: Ways, fault: Fault) -> None:
    proxy, one, two = two_ways
    holder, waiter, last = queued(two, one, two)
    token = step(two.open()).last_token
    assert step(two.release(holder.secret)) == Released()
    trigger = proxy.on(WORDS["release"], fault)  # by which it moves, too
    grant = step(granted(one, waiter))
    trigger.wait()
    assert (grant.ttl, step(one.renew([waiter.secret]))) == (LONG, [Kept(LONG)])
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(granted(one, waiter)).token == grant.token <= token
    assert step(one.release(waiter.secret)) == Released()
    assert step(granted(two, last)).token > grant.token


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.LOSE_REPLY])
def test_a_cut_while_a_release_hands_over_is_one_grant(two_ways: Ways, fault: Fault) -> None:
    """Within one client a release moves the next waiter along."""
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


def test_a_grant_that_stays_unknown_can_be_given_up(two_ways: Ways) -> None:
    """The waiter was moved, and does not know it: what it withdraws is its lease."""
    proxy, one, two = two_ways
    holder, waiter, last = queued(two, one, two)
    assert step(two.release(holder.secret)) == Released()
    proxy.on(WORDS["release"], Fault.LOSE_REPLY, times=2)
    proxy.refuse()
    with pytest.raises(Indeterminate):
        step(one.ask(waiter))
    proxy.heal()
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(one.withdraw(waiter.secret)) == Released()
    step(granted(two, last))


def test_a_lease_that_was_waited_for_outlives_the_session_for_places(pair: Pair) -> None:
    one, two = pair
    holder, waiter, last = queued(two, one, two)
    assert step(two.release(holder.secret)) == Released()
    step(granted(one, waiter))
    end_session(one._session(base.PLACES), one._address)
    assert step(one.renew([waiter.secret])) == [Kept(LONG)]
    assert isinstance(step(two.ask(last)), Waiting)


def test_a_place_whose_session_is_over_is_never_granted(pair: Pair) -> None:
    one, two = pair
    holder, waiter, last = queued(two, one, two)
    end_session(one._session(base.PLACES), one._address)
    assert step(two.release(holder.secret)) == Released()
    step(granted(two, last))
    assert step(one.ask(waiter)) in (Ended("expired"), Ended("revoked"))


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_grant_in_doubt_whose_session_for_places_ends_leaves_no_ghost(
    zookeeper_server: ZooKeeperServer, gives_up: bool
) -> None:
    """The session of the lease goes on with another one. Who asks gets the grant; if nobody does, it lapses."""
    runtime, namespace = Shifted(RUNTIME), secrets.token_hex(8)
    with (
        Proxy(zookeeper_server.host, zookeeper_server.port) as proxy,
        opened(f"zookeeper://{proxy.host}:{proxy.port}", namespace, runtime) as one,
        opened(zookeeper_server.url(), namespace) as two,
    ):
        kept = asking(RUNTIME, "kept", ttl=LONG)
        step(granted(one, kept))
        holder, waiter = queued(two, one)
        assert step(two.release(holder.secret)) == Released()
        proxy.on(WORDS["release"], Fault.LOSE_REPLY, times=2)
        proxy.refuse()
        with pytest.raises(Indeterminate):
            step(one.ask(waiter))
        proxy.heal()
        end_session(one._session(base.PLACES), two._address)
        if gives_up:
            for _ in range(2):
                runtime.ahead += 6
                assert step(one.renew([kept.secret])) == [Kept(LONG)]
        else:
            step(granted(one, waiter))
            assert step(one.release(waiter.secret)) == Released()
        step(granted(two, asking(RUNTIME, "orders")))


# Waiters of one client tell each other.


def test_one_ahead_that_leaves_between_the_look_and_the_wait_is_noticed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    holder, middle = queued(one, one)
    last = asking(RUNTIME, "orders", ttl=LONG, wait=True)
    whom = one._whom
    left: list[Any] = []

    async def leave_meanwhile(session: ZooKeeperSession, mine: ZooKeeperAttempt, *rest: Any) -> Any:
        if mine.public == grant_id(last.secret) and not left:
            left.append(await one.withdraw(middle.secret))
        return await whom(session, mine, *rest)

    monkeypatch.setattr(one, "_whom", leave_meanwhile)
    assert isinstance(step(one.ask(last)), Waiting)
    assert left == [Released()]
    assert step(one.release(holder.secret)) == Released()
    woken(one, grant_id(last.secret))
    step(granted(one, last))


def test_one_ahead_whose_place_somebody_deleted_lets_the_next_in(pair: Pair, raw: Raw) -> None:
    """Nobody watches a waiter of the same client: that it is out is found when its turn comes, and told then."""
    one, two = pair
    holder, middle, last = queued(two, one, one)
    (place,) = [path for path in places(raw, one) if grant_id(middle.secret) in path]
    assert raw.delete(place) == 0
    assert step(two.release(holder.secret)) == Released()
    woken(one, grant_id(middle.secret))
    assert step(one.ask(middle)) == Ended("revoked")
    woken(one, grant_id(last.secret))
    step(granted(one, last))


def let_in_behind_two_names(pair: Pair) -> object:
    """What a waiter of another client is told whose one ahead, first at this name, is handed its other name."""
    one, two = pair
    holder = asking(RUNTIME, "x", ttl=LONG)
    both = asking(RUNTIME, "x", "y", ttl=LONG, wait=True)
    last = asking(RUNTIME, "y", ttl=5, wait=True)
    step(granted(one, holder))
    assert isinstance(step(one.ask(both)), Waiting)
    assert isinstance(step(two.ask(last)), Waiting)
    assert step(one.release(holder.secret)) == Released()
    step(granted(one, both))
    woken(two, grant_id(last.secret))
    return step(two.ask(last))


def test_who_was_first_at_one_name_and_is_moved_is_still_ahead(pair: Pair) -> None:
    assert isinstance(let_in_behind_two_names(pair), Waiting)


def test_a_move_that_looks_like_an_end_would_be_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody is told that it was no ordinary end."""
    moves = Moving._moves
    monkeypatch.setattr(Moving, "_moves", lambda self, mine, ttl, _=(): moves(self, mine, ttl, mine.names))
    assert isinstance(let_in_behind_two_names(pair), Granted)


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
        if self._places and not ended and grant_id(waiter.secret) in self.attempts:
            ended.append(self)
            self._end()
        return await connected(self, until)

    with opened(zookeeper_server.url(), namespace) as one, opened(zookeeper_server.url(), namespace) as other:
        holder = asking(RUNTIME, "orders", ttl=LONG)
        step(granted(other, holder))
        monkeypatch.setattr(ZooKeeperSession, "_connected", end_first)
        assert isinstance(step(one.ask(waiter)), Waiting)
        (session,) = ended
        assert grant_id(waiter.secret) in session.attempts
        step(one.next_wakeups(RUNTIME.now()))
        step(other.release(holder.secret))
        woken(one, grant_id(waiter.secret))
        step(granted(one, waiter))
