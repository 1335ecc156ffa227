"""Ensembles that lose a leader, a follower or their majority, and servers that are restored from a backup."""

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState, State
from fenced.errors import Indeterminate, LeaseLost, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.wire import jute
from fenced.testing import Check, run
from fenced.testing.kit import asking, granted, lease_engine
from fenced.values import timing
from fenced.values.model import Ended, Granted, Kept, Released, Waiting
from fenced_testkit import GUARD_FAILOVER_CHECKS, GuardFailoverHarness
from fenced_testkit.servers import ZooKeeperEnsemble, ZooKeeperServer
from tests.guard_outage_harness import FailoverHarness
from tests.zookeeper.acting import session_of
from tests.zookeeper.shifting import end_session

pytestmark = [pytest.mark.xdist_group("zookeeper"), pytest.mark.timeout(180)]
RUNTIME = BlockingRuntime()
TTL = 1.5


@pytest.fixture(scope="module")
def ensemble() -> Iterator[ZooKeeperEnsemble]:
    with ZooKeeperEnsemble() as ensemble:
        yield ensemble


@contextmanager
def opened(url: str, namespace: str) -> Iterator[ZooKeeperAuthority]:
    authority = ZooKeeperAuthority.at(url, RUNTIME, namespace)
    try:
        patient(authority.open)  # the election after the last test may not be over
        yield authority
    finally:
        step(authority.close())


@contextmanager
def client(url: str, namespace: str) -> Iterator[LeaseEngine]:
    authority = ZooKeeperAuthority.at(url, RUNTIME, namespace)
    made = lease_engine(authority, RUNTIME)
    try:
        yield made
    finally:
        step(made.close())


def hold(engine: LeaseEngine, ttl: float = TTL, wait: float = 30.0) -> GrantState:
    return step(engine.acquire(LeaseRequest.checked(["orders"], ttl=ttl, wait=wait)))


def patient(work: object) -> object:
    """Repeat the same request until it is answered, as a client does."""
    limit = time.monotonic() + 60
    while True:
        try:
            return step(work())  # type: ignore[operator]
        except (Unavailable, Indeterminate):
            assert time.monotonic() < limit
            time.sleep(0.02)


# proves authority zookeeper: majority
def test_a_killed_leader_takes_no_token_and_no_lease_with_it(ensemble: ZooKeeperEnsemble) -> None:
    """SIGKILL under a live holder and a waiter: the lease goes on, tokens rise by an election's worth."""
    namespace = secrets.token_hex(8)
    with client(ensemble.url(), namespace) as one, opened(ensemble.url(), namespace) as two:
        held = hold(one, ttl=30)  # longer than two elections on a busy machine
        tokens = [held.token]
        waiter = asking(RUNTIME, "orders", wait=True)
        assert isinstance(step(two.ask(waiter)), Waiting)
        for number in range(2):
            leader = ensemble.leader()
            leader.kill()
            ask = asking(RUNTIME, f"other/{number}")
            answer = patient(lambda ask=ask: two.ask(ask))
            assert isinstance(answer, Granted)
            tokens.append(answer.token)
            ensemble.start(leader)
            patient(lambda: two.renew([waiter.secret]))
            assert held.state in (State.HELD, State.JEOPARDY)
        step(one.release(held))
        answer = patient(lambda: two.ask(waiter))
        assert tokens[1] - tokens[0] > 2**31 and tokens[2] - tokens[1] > 2**31
        if answer == Ended("expired"):  # on a busy machine nobody has renewed its place for ten seconds
            waiter = asking(RUNTIME, "orders")
            answer = patient(lambda: two.ask(waiter))
            assert isinstance(answer, Granted) and answer.token > tokens[2]
        else:  # its token is that of its place in the queue, which is older than both elections
            assert isinstance(answer, Granted) and tokens[0] < answer.token < tokens[1]


@pytest.mark.parametrize("check", GUARD_FAILOVER_CHECKS, ids=lambda check: check.name)
def test_a_guard_whose_leader_dies(check: Check[GuardFailoverHarness], ensemble: ZooKeeperEnsemble) -> None:
    leader = ensemble.leader()
    url = f"{ensemble.url()}/{secrets.token_hex(8)}?rule=sequenced"
    run(check, lambda runtime: FailoverHarness(runtime, url, leader.kill), "asyncio")
    ensemble.start(leader)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_name_is_taken_over_soon_after_leader_and_holder_are_gone(
    ensemble: ZooKeeperEnsemble, how: str
) -> None:
    """Leader and holder fall silent together: the waiter is in within 4/3 TTL, an election, and once more that."""
    namespace = secrets.token_hex(8)
    leader = ensemble.leader()
    with client(ensemble.url(), namespace) as two:
        holder = ZooKeeperAuthority.at(ensemble.url(), RUNTIME, namespace)
        step(holder.open())
        first = step(granted(holder, asking(RUNTIME, "orders", ttl=TTL)))
        step(two.authority.open())
        began = time.monotonic()
        getattr(leader, how)()
        try:
            held = patient(lambda: two.acquire(LeaseRequest.checked(["orders"], ttl=TTL, wait=30)))
            took = time.monotonic() - began
        finally:
            leader.thaw() if how == "freeze" else ensemble.start(leader)
        assert isinstance(held, GrantState)
        assert held.token > first.token
        assert took < 2 * TTL * 4 / 3 + 30.0, took  # an election takes as long as the machine is busy
        print(f"taken over {took:.2f} s after SIG{how} of the leader, ttl {TTL} s")
        with suppress(LeaseLost):  # the leader may need longer than the ttl to start
            step(two.release(held))
        step(holder.close())


def test_a_frozen_leader_is_left(ensemble: ZooKeeperEnsemble) -> None:
    """SIGSTOP: the client that was connected to it moves on to another member within the ttl, and keeps its lease."""
    namespace, ttl = secrets.token_hex(8), 12.0
    leader = ensemble.leader()
    with client(ensemble.url(), namespace) as one:
        held = hold(one, ttl=ttl)
        leader.freeze()
        frozen = RUNTIME.now()
        try:
            while held.deadline < timing.local_deadline(frozen, ttl):
                # Until a renewal sent since then is confirmed.
                held.check()
                time.sleep(0.05)
        finally:
            leader.thaw()
        step(one.release(held))


def test_an_ask_at_a_lagging_follower_sees_earlier_releases(
    ensemble: ZooKeeperEnsemble,
) -> None:
    """Reads of a follower are old; a release that the leader has answered must not be missed."""
    namespace = secrets.token_hex(8)
    leader, follower = ensemble.leader(), ensemble.followers()[0]
    with opened(leader.url(), namespace) as one, opened(follower.url(), namespace) as two:
        first, waiter = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", wait=True)
        step(granted(one, first))
        assert isinstance(step(two.ask(waiter)), Waiting)
        ensemble.lag(follower, 0.2)
        try:
            assert step(one.release(first.secret)) == Released()
            step(granted(two, waiter))
        finally:
            ensemble.heal(follower)
    follower.wait_until(lambda: follower.mode == "follower", "it follows again")


def overlap(ensemble: ZooKeeperEnsemble) -> float:
    """For how long a holder behind a follower that is cut off believes on after another client was granted."""
    namespace = secrets.token_hex(8)
    ensemble.leader()
    follower = ensemble.followers()[0]
    others = f"zookeeper://{ensemble.leader().host}:{ensemble.leader().port}"
    with client(follower.url(), namespace) as one, client(others, namespace) as two:
        held = hold(one)
        assert patient(two.authority.open)  # the election after the last test may not be over
        ensemble.cut_off(follower)
        try:
            after = hold(two)
            granted_at = time.monotonic()
            assert after.token > held.token
            while held.state is not State.LOST:
                time.sleep(0.001)
            lost_at = time.monotonic()
            step(two.release(after))
        finally:
            ensemble.heal(follower)
        with pytest.raises((LeaseLost, Unavailable, Indeterminate)):
            step(one.release(held))
    follower.wait_until(lambda: follower.mode == "follower", "it follows again")
    return lost_at - granted_at


# proves authority zookeeper: leader-confirmed
def test_a_follower_that_is_cut_off_keeps_nobody_believing(ensemble: ZooKeeperEnsemble) -> None:
    """It goes on answering what it can by itself. The holder has stopped believing before anybody else is granted."""
    assert overlap(ensemble) < 0.01


def test_a_keep_alive_that_a_follower_answers_would_be_caught(
    ensemble: ZooKeeperEnsemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a read in the place of a sync, taken for a sign of life, as every ping of ZooKeeper's own is."""
    monkeypatch.setattr(jute, "by_leader", lambda _: True)
    monkeypatch.setattr(jute, "sync", lambda path: jute.get_data(path.removesuffix("/keep")))
    assert any(overlap(ensemble) > 0.2 for _ in range(3))  # an election that comes at once hides it


def test_a_majority_that_is_lost_and_regained(ensemble: ZooKeeperEnsemble) -> None:
    """Nothing is granted without it; holders stop believing in time; tokens rise; who waits is served."""
    namespace = secrets.token_hex(8)
    with client(ensemble.url(), namespace) as one, opened(ensemble.url(), namespace) as two:
        held = hold(one)
        lost = ensemble.members[:2]
        for member in lost:
            member.kill()
        gone = RUNTIME.now()  # nothing that is sent later is confirmed
        ask = asking(RUNTIME, "another")
        with pytest.raises((Unavailable, Indeterminate)):
            step(two.ask(ask))
        while held.state is not State.LOST:
            time.sleep(0.005)
        assert held.deadline - gone < TTL
        ensemble.start(*lost)
        answer = patient(lambda: two.ask(ask))
        assert isinstance(answer, Granted) and answer.token > held.token
        after = asking(RUNTIME, "orders", wait=True)
        assert patient(lambda: two.ask(after)) is not None
        limit = time.monotonic() + 2 * TTL + 5
        while not isinstance(answer := patient(lambda: two.ask(after)), Granted):
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert answer.token > held.token


# Sessions.


def test_a_session_that_ends_while_its_client_waits_is_never_granted(zookeeper_url: str) -> None:
    """The waiter is told that it is out, also when its turn would have come (etcd #11456)."""
    namespace = secrets.token_hex(8)
    with opened(zookeeper_url, namespace) as one, opened(zookeeper_url, namespace) as two:
        holder, waiter = asking(RUNTIME, "orders"), asking(RUNTIME, "orders", ttl=5, wait=True)
        step(granted(one, holder))
        assert isinstance(step(two.ask(waiter)), Waiting)
        end_session(session_of(two, 5.0))
        assert step(one.release(holder.secret)) == Released()
        assert step(two.ask(waiter)) == Ended("expired")
        assert step(two.renew([waiter.secret])) == [Ended("expired")]
        step(granted(one, asking(RUNTIME, "orders")))


def test_a_client_that_waits_past_its_session_joins_again(zookeeper_url: str) -> None:
    namespace = secrets.token_hex(8)
    with opened(zookeeper_url, namespace) as one, client(zookeeper_url, namespace) as two:
        holder = asking(RUNTIME, "orders", ttl=20)
        step(granted(one, holder))
        held: list[GrantState] = []

        async def wait() -> None:
            held.append(await two.acquire(LeaseRequest.checked(["orders"], ttl=5)))

        task = RUNTIME.spawn(wait, "waiter")
        while not step(one.observe("orders")).waiters:
            time.sleep(0.005)
        assert isinstance(two.authority, ZooKeeperAuthority)
        end_session(session_of(two.authority, 5.0))
        time.sleep(0.1)
        assert step(one.release(holder.secret)) == Released()
        step(task.join())
        held[0].check()
        step(two.release(held[0]))


# proves authority zookeeper: sessions
def test_a_client_frozen_past_its_session_has_lost_it(zookeeper_url: str) -> None:
    """Nobody renews for 4/3 of the ttl, in real time: the server frees the name; what comes late is told."""
    namespace = secrets.token_hex(8)
    with opened(zookeeper_url, namespace) as one, opened(zookeeper_url, namespace) as two:
        old, new = asking(RUNTIME, "orders", ttl=0.6), asking(RUNTIME, "orders", wait=True)
        began = time.monotonic()
        first = step(granted(one, old))
        assert isinstance(step(two.ask(new)), Waiting)
        heard = step(two.next_wakeups(RUNTIME.now() + 5))
        took = time.monotonic() - began
        assert heard and took >= 0.6, took
        assert step(granted(two, new)).token > first.token
        assert step(one.renew([old.secret])) == [Ended("expired")]
        assert step(one.release(old.secret)) == Ended("expired")
        assert step(two.renew([new.secret])) == [Kept(10.0)]


# Backups.


def token_of(authority: ZooKeeperAuthority) -> int:
    ask = asking(RUNTIME, "orders")
    token = step(granted(authority, ask)).token
    assert step(authority.release(ask.secret)) == Released()
    return token


# proves authority zookeeper: restore-unnoticed
def test_a_restored_backup_repeats_tokens_unless_the_floor_is_raised(tmp_path: Path) -> None:
    """A client that has seen more than the backup knows is not served; a new one cannot tell."""
    with ZooKeeperServer() as server:
        with opened(server.url(), "default") as authority:
            early = token_of(authority)
        server.stop()
        server.backup(tmp_path / "backup")
        server.start()
        old = ZooKeeperAuthority.at(server.url(), RUNTIME, "default")
        step(old.open())
        late = [token_of(old) for _ in range(20)]
        assert early < late[0] and all(a < b for a, b in itertools.pairwise(late))
        server.stop()
        server.restore(tmp_path / "backup")
        server.start()
        with pytest.raises((Unavailable, Indeterminate)):
            step(old.ask(asking(RUNTIME, "orders")))
        with opened(server.url(), "default") as authority:
            assert token_of(authority) <= late[-1]
            step(authority.raise_floor(late[-1]))
            assert token_of(authority) > late[-1]
        step(old.close())


# proves authority zookeeper: settings-unseen
def test_a_member_that_does_not_sync_cannot_be_told() -> None:
    with ZooKeeperServer({"forceSync": "no"}) as server, opened(server.url(), "default") as authority:
        assert step(authority.open()).doubts == ()
