"""Three members, and what becomes of leases when they are killed, frozen, cut off, or restored from a snapshot."""

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fenced
from fenced.core.holding import State
from fenced.errors import Indeterminate, Misconfigured, NotGranted, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.wire.cluster import TRY_SECONDS
from fenced.testing import Check, run
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Authority
from fenced.values.model import Busy, Ended, Granted, Kept, Released, Waiting
from fenced_testkit import GUARD_FAILOVER_CHECKS, GuardFailoverHarness
from fenced_testkit.servers import EtcdCluster, EtcdServer
from tests.guard_outage_harness import FailoverHarness

pytestmark = pytest.mark.xdist_group("etcd")
RUNTIME = BlockingRuntime()
ELECTION_SECONDS = 0.5
"""Of the test's clusters; an election takes one to two of them."""


@pytest.fixture(scope="module")
def members() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(members: EtcdCluster) -> Iterator[EtcdCluster]:
    """All members run and reach each other, before and after."""
    yield members
    for member in members.members:
        member.thaw()
    members.heal()
    members.start()
    limit = time.monotonic() + 90
    while any(member.status() is None for member in members.members):  # one that leads is not all
        assert time.monotonic() < limit


def opened(url: str, namespace: str | None = None) -> EtcdAuthority:
    authority = EtcdAuthority.at(url, RUNTIME, namespace or secrets.token_hex(8))
    step(authority.open())
    return authority


def token_of(authority: EtcdAuthority, name: str = "orders") -> int:
    ask = asking(RUNTIME, name)
    token = step(granted(authority, ask)).token
    assert step(authority.release(ask.secret)) == Released()
    return token


def at_member(authority: Authority, cluster: EtcdCluster, member: EtcdServer) -> None:
    """Make this member the one that is asked."""
    assert isinstance(authority, EtcdAuthority)
    authority._wire.turn = cluster.members.index(member)


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_leader_dies_under_a_holder(cluster: EtcdCluster, fault: str) -> None:
    """Its holder goes on, who waits is granted after the release, and tokens rise; a member that comes back is late."""
    namespace = secrets.token_hex(8)
    leader = cluster.leader()
    tokens: list[int] = []
    with (
        fenced.Client(cluster.url(), namespace=namespace, guarantee="best-effort") as one,
        fenced.Client(cluster.url(), namespace=namespace, guarantee="best-effort") as two,
    ):
        for client in (one, two):
            client.acquire("warm").release()
            at_member(client._authority, cluster, leader)
        hold = one.acquire("orders", ttl=4)
        tokens.append(hold.token)
        waiting = threading.Thread(target=lambda: tokens.append(two.acquire("orders", ttl=4).token))
        waiting.start()
        getattr(leader, fault)()
        died = time.monotonic()
        cluster.leader(but=leader)
        with fenced.Client(cluster.url(), namespace=namespace, guarantee="best-effort") as third:
            third.acquire("other").release()
        back = time.monotonic() - died
        while time.monotonic() < died + 4.2:  # it was renewed, or else it would be over by then
            assert hold.state in (State.HELD, State.JEOPARDY)
            time.sleep(0.02)
        hold.release()
        released = time.monotonic()
        waiting.join(90)
        handed = time.monotonic() - released
        leader.thaw()
        assert len(tokens) == 2 and tokens[0] < tokens[1]
        print(f"\nleader {fault}: grants again after {back:.2f} s, hand-over {handed:.2f} s")
        limit = 6 * ELECTION_SECONDS + 3 * TRY_SECONDS  # drawn votes, and each member asked in vain
        assert back < limit and handed < limit
    if fault == "kill":
        leader.start()
    after = opened(cluster.url(), namespace)
    at_member(after, cluster, leader)
    assert token_of(after, "third") > tokens[1], "also through the member that was away"
    step(after.close())


# proves authority etcd: restart-prolongs
def test_take_over_after_a_leaders_death_is_bounded(cluster: EtcdCluster) -> None:
    """A silent holder is gone after ttl + election + ttl: the new leader starts every ttl anew."""
    ttl = 2
    authority = opened(cluster.url())
    step(granted(authority, asking(RUNTIME, "orders", ttl=ttl)))
    began = time.monotonic()
    time.sleep(ttl / 2)  # as long as the old leader counts
    leader = cluster.leader()
    leader.kill()
    took: list[float] = []
    while not took:
        try:
            if not isinstance(step(authority.ask(asking(RUNTIME, "orders"))), Busy):
                took.append(time.monotonic() - began)
        except (Unavailable, Indeterminate):
            continue
        assert time.monotonic() - began < 30
    print(f"\nttl {ttl} s, leader killed after {ttl / 2:g} s: taken over after {took[0]:.2f} s")
    assert ttl < took[0] < ttl / 2 + 4 * ELECTION_SECONDS + ttl + 3
    step(authority.close())


def test_a_member_that_is_cut_off_is_left(cluster: EtcdCluster) -> None:
    """It knows no leader and says so; the next one is asked. Alone it is no use, and nothing happens."""
    follower = cluster.followers()[0]
    authority, alone = opened(cluster.url()), opened(follower.url())
    before = token_of(authority)
    cluster.cut_off(follower)
    at_member(authority, cluster, follower)
    began = time.monotonic()
    assert token_of(authority) > before
    print(f"\na follower cut off: asked elsewhere after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 5
    with pytest.raises((Unavailable, Indeterminate)):
        step(alone.ask(asking(RUNTIME, "orders")))
    cluster.heal()
    limit = time.monotonic() + 90
    while True:
        try:
            assert token_of(alone) > before
            break
        except (Unavailable, Indeterminate):
            assert time.monotonic() < limit
    for each in (authority, alone):
        step(each.close())


def test_more_callers_than_connections_leave_a_frozen_member(
    cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who wait for a connection still have time for the next member, when those who have one give up."""
    monkeypatch.setattr("fenced.stores.etcd.wire.cluster.CONNECTIONS_MAX", 1)
    follower = cluster.followers()[0]
    authority = opened(cluster.url())
    at_member(authority, cluster, follower)
    tokens: list[int] = []
    threads = [
        threading.Thread(target=lambda name: tokens.append(token_of(authority, name)), args=(f"n{number}",))
        for number in range(4)
    ]
    follower.freeze()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        follower.thaw()
    assert len(set(tokens)) == 4
    step(authority.close())


# proves authority etcd: quorum
def test_without_a_majority_nothing_is_granted(cluster: EtcdCluster) -> None:
    """One of three cannot grant, renew or release; a holder stops believing in time. With two it goes on."""
    namespace = secrets.token_hex(8)
    first, second = cluster.followers()
    authority = opened(cluster.url(), namespace)
    with fenced.Client(cluster.url(), namespace=namespace, guarantee="best-effort") as client:
        hold = client.acquire("orders", ttl=2)
        for member in (first, second):
            member.kill()
        lost = time.monotonic()
        with pytest.raises((Unavailable, Indeterminate)):
            step(authority.ask(asking(RUNTIME, "others")))
        assert hold.wait_lost(5) and time.monotonic() - lost < 2 + 5
        assert hold.lost_reason == "expired"
        first.start()
        cluster.leader()
        with client.hold("orders", ttl=5, wait=15) as after:
            assert after.token > hold.token
    step(authority.close())


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


def test_a_waiter_that_expired_is_never_granted(server: EtcdServer) -> None:
    """Its session ends in the queue, the name becomes free: its ask is told that, and the next one is let in."""
    authority, other = opened(server.url(), "waiting"), opened(server.url(), "waiting")
    holder, silent, alive = (asking(RUNTIME, "orders", ttl=ttl, wait=True) for ttl in (30, 1, 30))
    step(granted(authority, holder))
    assert isinstance(step(authority.ask(silent)), Waiting)
    assert isinstance(step(other.ask(alive)), Waiting)
    while len(step(other.observe("orders")).waiters) > 1:
        time.sleep(0.05)
    step(authority.release(holder.secret))
    assert step(authority.ask(silent)) == Ended("expired")
    assert step(authority.ask(silent)) == Ended("expired")
    step(granted(other, alive))
    assert step(authority.renew([silent.secret])) == [Ended("expired")]
    for each in (authority, other):
        step(each.close())


def test_a_client_frozen_past_its_session_is_late(server: EtcdServer) -> None:
    """It comes back with a lease, a release and a renewal of before: all are told that it expired."""
    frozen, other = opened(server.url(), "frozen"), opened(server.url(), "frozen")
    old = asking(RUNTIME, "orders", ttl=1)
    first = step(granted(frozen, old))
    new = asking(RUNTIME, "orders", ttl=30, wait=True)
    limit = time.monotonic() + 90
    while isinstance(answer := step(other.ask(new)), Waiting):
        step(other.next_wakeups(RUNTIME.now() + 0.5))
        assert time.monotonic() < limit
    assert isinstance(answer, Granted) and answer.token > first.token
    assert step(frozen.renew([old.secret])) == [Ended("expired")]
    assert step(frozen.release(old.secret)) == Ended("expired")
    assert step(frozen.ask(old)) == Ended("expired")
    # Its own next ask gets a session that lives.
    assert isinstance(step(frozen.ask(asking(RUNTIME, "orders", ttl=1))), Busy)
    assert step(other.renew([new.secret])) == [Kept(30.0)]
    for each in (frozen, other):
        step(each.close())


# proves authority etcd: lineage-noticed
@pytest.mark.parametrize("same_id", [False, True], ids=["another id", "the same id"])
def test_a_restored_snapshot_is_noticed(tmp_path: Path, same_id: bool) -> None:
    """Tokens of after the snapshot would come again: nothing is granted until an operator raises the floor."""
    path = tmp_path / "snapshot"
    with EtcdServer() as server:
        authority = opened(server.url(), "restored")
        held = asking(RUNTIME, "held")
        step(granted(authority, held))
        server.backup(path)
        last = max(token_of(authority) for _ in range(20))
        server.stop()
        with EtcdServer.restored(path, like=server if same_id else None) as restored:
            if same_id:  # only who was there before the snapshot was restored can see that it was
                with pytest.raises(Misconfigured, match="went back"):
                    step(authority.ask(asking(RUNTIME, "orders")))
            after = opened(restored.url(), "restored")
            with pytest.raises(Misconfigured, match="authority raise"):
                step(after.ask(asking(RUNTIME, "orders")))
            assert step(after.observe("orders")).held_by is None, "and nothing is left of it"
            assert step(after.renew([held.secret])) == [Kept(10.0)], "who holds goes on"
            assert step(after.raise_floor(last)) >= last
            assert token_of(after) > last
            if same_id:
                assert token_of(authority) > last
            step(after.close())
        step(authority.close())


def test_a_waiter_is_told_by_the_members_that_are_left(cluster: EtcdCluster) -> None:
    """The member that its watch was on is killed while it waits: it is woken all the same."""
    namespace = secrets.token_hex(8)
    follower = cluster.followers()[0]
    with (
        fenced.Client(cluster.url(), namespace=namespace, guarantee="best-effort") as one,
        fenced.Client(cluster.url(), namespace=namespace, guarantee="best-effort") as two,
    ):
        two.acquire("warm").release()
        at_member(two._authority, cluster, follower)
        with pytest.raises(NotGranted), one.hold("orders", ttl=20):
            two.acquire("orders", ttl=20, wait=0.5)  # its watch stream is open now
        hold = one.acquire("orders", ttl=20)
        tokens: list[int] = []
        waiting = threading.Thread(target=lambda: tokens.append(two.acquire("orders", ttl=3).token))
        waiting.start()
        while not step(one._authority.observe("orders")).waiters:
            time.sleep(0.01)
        follower.kill()
        began = time.monotonic()
        hold.release()
        waiting.join(90)
        print(f"\nthe watched member killed: woken after {time.monotonic() - began:.2f} s")
        assert tokens and tokens[0] > hold.token


@pytest.mark.parametrize("check", GUARD_FAILOVER_CHECKS, ids=lambda check: check.name)
def test_a_guard_whose_leader_dies(check: Check[GuardFailoverHarness], cluster: EtcdCluster) -> None:
    url = f"{cluster.url()}?rule=sequenced&prefix={secrets.token_hex(8)}"
    run(check, lambda runtime: FailoverHarness(runtime, url, cluster.leader().kill), "blocking")
