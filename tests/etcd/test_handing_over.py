"""A release that grants the name to the one directly behind, when both are of one client: and when it must not."""

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import fenced
from fenced.drills.relay import Fault, Proxy, http2_reply
from fenced.errors import Indeterminate
from fenced.runtime.blocking import step
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.authority.leases import EtcdLease
from fenced.stores.etcd.authority.progress import TICKET_SECONDS
from fenced.stores.etcd.wire import messages
from fenced.testing.kit import asking as asking_as_a_new_holder
from fenced.testing.kit import granted
from fenced.values.model import Ask, Busy, Ended, Granted, Kept, Released, Waiting, grant_id
from fenced_testkit.servers import EtcdServer
from tests.etcd.aging import LEASE_REVOKE
from tests.etcd.test_authority import RUNTIME, opened, received

pytestmark = pytest.mark.xdist_group("etcd")  # some count what the server is asked
PROGRAM = asking_as_a_new_holder(RUNTIME).holder


def asking(*arguments: Any, **options: Any) -> Ask:
    """All attempts of a client are one program's, unless it is in a service."""
    return asking_as_a_new_holder(*arguments, **options)._replace(holder=PROGRAM)


class Queue:
    """A client that holds `orders`, and whose waiters listen."""

    def __init__(self, server: EtcdServer, url: str = "") -> None:
        self.namespace = secrets.token_hex(8)
        self.mine, self.other = (opened(at, self.namespace) for at in (url or server.url(), server.url()))
        self.holder = asking(RUNTIME, "orders", ttl=30)
        self.first = step(granted(self.mine, self.holder))
        self.again = asking(RUNTIME, "orders", ttl=30)

    def wait(self, authority: EtcdAuthority, ttl: float = 30) -> Ask:
        ask = asking(RUNTIME, "orders", ttl=ttl, wait=True)
        assert isinstance(step(authority.ask(ask)), Waiting)
        step(authority.next_wakeups(RUNTIME.now() + 0.05))
        assert authority._wakeups.listening
        return ask

    def release(self, ask: Ask) -> object:
        return step(self.mine.release(ask.secret))

    def heard(self, ask: Ask) -> None:
        found: list[str] = []
        limit = RUNTIME.now() + 5
        while grant_id(ask.secret) not in found:
            assert RUNTIME.now() < limit
            found += step(self.mine.next_wakeups(limit))

    def given(self, ask: Ask) -> bool:
        return grant_id(ask.secret) in self.mine._attempts._given

    def let_help_itself(self, holder: Ask, waiter: Ask) -> None:
        """The release gives nothing to the waiter, which is woken, and asks."""
        step(granted(self.mine, holder))
        assert isinstance(step(self.mine.ask(waiter)), Waiting)
        step(self.mine.next_wakeups(RUNTIME.now() + 0.05))
        assert self.release(holder) == Released()
        assert not self.given(waiter)
        self.heard(waiter)
        step(granted(self.mine, waiter))
        assert self.release(waiter) == Released()

    def revoke(self, lease: EtcdLease | None) -> None:
        assert lease is not None
        step(self.mine._wire.call(LEASE_REVOKE, messages.lease_id(lease.id), RUNTIME.now() + 5))

    def close(self) -> None:
        for each in (self.mine, self.other):
            step(each.close())


@pytest.fixture
def queue(etcd_server: EtcdServer) -> Iterator[Queue]:
    queue = Queue(etcd_server)
    yield queue
    queue.close()


def test_a_hand_over_is_one_request(queue: Queue, etcd_server: EtcdServer) -> None:
    waiters = [queue.wait(queue.mine) for _ in range(3)]
    last, token = queue.holder, queue.first.token
    before = received(etcd_server)
    for waiter in waiters:
        assert queue.release(last) == Released()
        queue.heard(waiter)
        lease = step(granted(queue.mine, waiter))
        assert lease.token > token and 29 < lease.remaining <= 30
        last, token = waiter, lease.token
    assert received(etcd_server) - before <= 4, "three releases; the watch of the claim is ended"
    view = step(queue.other.observe("orders"))
    assert view.held_by is not None and view.held_by.token == token and not view.waiters
    assert view.held_by.grant == grant_id(last.secret)
    assert step(queue.mine.renew([last.secret])) == [Kept(30.0)]
    assert queue.release(last) == Released()
    assert step(queue.other.survey()) == []


def test_nobody_is_passed_over(queue: Queue) -> None:
    """Another client's waiter is between: what is remembered of who is behind may be old."""
    between, behind = queue.wait(queue.other), queue.wait(queue.mine)
    queue.mine._attempts._behind[grant_id(queue.holder.secret)] = grant_id(behind.secret)
    assert queue.release(queue.holder) == Released()
    assert isinstance(step(queue.mine.ask(behind)), Waiting)
    step(granted(queue.other, between))


def test_who_looked_before_somebody_was_let_in_looks_again(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ticket is from before: those who know how far the queue has come would overlook its place."""
    late = asking(RUNTIME, "orders", ttl=30, wait=True)
    looks: list[Any] = []
    queueing = queue.other._sessions.queueing

    async def slowly(*args: Any) -> Any:
        """Meanwhile somebody else comes, is let in, and leaves."""
        looks.append(len(looks))
        if len(looks) == 1:
            between = queue.wait(queue.mine)
            queue.release(queue.holder)
            await granted(queue.mine, between)
            queue.release(between)
            await granted(queue.mine, queue.again)
        return await queueing(*args)

    monkeypatch.setattr(queue.other._sessions, "queueing", slowly)
    assert isinstance(step(queue.other.ask(late)), Waiting)
    assert len(looks) == 2
    ticket = queue.other._attempts.live[grant_id(late.secret)].record.ticket
    assert ticket > queue.mine._attempts._floor(("orders",)) > 0
    behind = queue.wait(queue.mine)
    queue.release(queue.again)
    assert isinstance(step(queue.mine.ask(behind)), Waiting)
    step(granted(queue.other, late))


def test_a_queue_that_moves_on_ahead_keeps_nobody_out(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks and comes late takes its place behind the last one, however many were let in meanwhile."""
    waiters = [queue.wait(queue.mine) for _ in range(3)]
    late = asking(RUNTIME, "orders", ttl=30, wait=True)
    looks: list[Any] = []
    queueing = queue.other._sessions.queueing

    async def slowly(*args: Any) -> Any:
        looks.append(len(looks))
        queue.release(queue.holder)
        await granted(queue.mine, waiters[0])
        return await queueing(*args)

    monkeypatch.setattr(queue.other._sessions, "queueing", slowly)
    assert isinstance(step(queue.other.ask(late)), Waiting)
    assert len(looks) == 1


@pytest.mark.parametrize("told", [b"x", b"9" * 25, b"-1", b"", b"99999999"])
def test_what_is_told_and_cannot_be_is_not_believed(queue: Queue, told: bytes) -> None:
    queue.release(queue.holder)
    write = messages.put(queue.other._space.keys.floor("orders"), told)
    step(queue.other._space.run(messages.txn((), [write]), RUNTIME.now() + 5))
    step(granted(queue.other, asking(RUNTIME, "orders")))
    assert queue.other._attempts._floor(("orders",)) == 0


def test_what_was_a_queue_is_not_walked_through_again(queue: Queue) -> None:
    """Until a compaction etcd goes through all keys that a range ever had. Who came since then is seen."""
    tickets, last = [], queue.holder
    for _ in range(3):
        waiter = queue.wait(queue.mine)
        tickets.append(queue.mine._attempts.live[grant_id(waiter.secret)].record.ticket)
        queue.release(last)
        step(granted(queue.mine, waiter))
        last = waiter
    behind = queue.wait(queue.other)
    assert queue.mine._attempts._floor(("orders",)) == tickets[-1]
    assert queue.other._attempts._floor(("orders",)) == tickets[-1], "told by the claim"
    queue.release(last)
    with_floor, without = asking(RUNTIME, "orders"), asking(RUNTIME, "orders")
    assert isinstance(step(queue.mine.ask(with_floor)), Busy), "another client's place is newer"
    step(granted(queue.other, behind))
    step(queue.other.release(behind.secret))
    keys, memory = queue.mine._space.keys, step(queue.mine._sessions.memory(30, RUNTIME.now() + 5))
    dead = messages.put(keys.place("orders", tickets[0], "0" * 32), b"{}", memory.id)
    step(queue.mine._space.run(messages.txn((), [dead]), RUNTIME.now() + 5))
    step(granted(queue.mine, without))


def test_who_comes_new_is_told_how_far_a_queue_has_come(queue: Queue, etcd_server: EtcdServer) -> None:
    waiter = queue.wait(queue.mine)
    ticket = queue.mine._attempts.live[grant_id(waiter.secret)].record.ticket
    queue.release(queue.holder)
    step(granted(queue.mine, waiter))
    queue.release(waiter)
    new = opened(etcd_server.url(), queue.namespace)
    ask = asking(RUNTIME, "orders")
    step(granted(new, ask))
    assert new._attempts._floor(("orders",)) == ticket
    step(new.close())


def test_who_finds_a_name_free_need_not_look_at_its_past_for_long(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once nobody can be left who was turned away before."""
    shift = [0.0]
    monkeypatch.setattr(queue.other._attempts._floors, "_now", lambda: RUNTIME.now() + shift[0])
    queue.release(queue.holder)

    def token() -> int:
        ask = asking(RUNTIME, "orders", ttl=600)
        lease = step(granted(queue.other, ask))
        step(queue.other.release(ask.secret))
        return lease.token

    first = token()
    token()
    assert queue.other._attempts._floor(("orders",)) == 0
    shift[0] = TICKET_SECONDS + 1
    token()
    assert queue.other._attempts._floor(("orders",)) == first


def test_a_floor_that_was_raised_holds(queue: Queue) -> None:
    waiter = queue.wait(queue.mine)
    step(queue.other.raise_floor(10**9))
    assert queue.release(queue.holder) == Released()
    queue.heard(waiter)
    assert step(granted(queue.mine, waiter)).token > 10**9


def test_who_expired_in_the_queue_gets_nothing(queue: Queue) -> None:
    waiter, next_one = queue.wait(queue.mine), queue.wait(queue.other)
    queue.revoke(queue.mine._attempts.live[grant_id(waiter.secret)].queue)
    assert queue.release(queue.holder) == Released()
    assert step(queue.mine.ask(waiter)) == Ended("expired")
    step(granted(queue.other, next_one))


def test_a_waiter_whose_session_is_gone_gets_another(queue: Queue) -> None:
    """Its place is there; what its claim would hang on is not."""
    waiter = queue.wait(queue.mine, ttl=40)  # another ttl has another session
    queue.revoke(queue.mine._attempts.live[grant_id(waiter.secret)].hold)
    assert queue.release(queue.holder) == Released()
    queue.heard(waiter)
    assert step(granted(queue.mine, waiter)).token > queue.first.token
    assert step(queue.mine.renew([waiter.secret])) == [Kept(40.0)]


def test_a_waiter_whose_record_is_gone_keeps_nobody_from_the_end(queue: Queue) -> None:
    waiter = queue.wait(queue.mine)
    mine = queue.mine._attempts.live[grant_id(waiter.secret)]
    mine.memory = step(queue.mine._leases.grant(600, RUNTIME.now() + 5))
    queue.revoke(mine.memory)
    assert queue.release(queue.holder) == Released()
    queue.heard(waiter)
    step(granted(queue.mine, waiter))


@pytest.mark.parametrize("ahead, behind", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_with_a_delay_a_waiter_helps_itself(queue: Queue, ahead: float, behind: float) -> None:
    holder = asking(RUNTIME, "jobs", ttl=30, lock_delay=ahead)
    waiter = asking(RUNTIME, "jobs", ttl=30, lock_delay=behind, wait=True)
    queue.let_help_itself(holder, waiter)
    assert step(queue.other.observe("jobs")).free_in == 0


@pytest.mark.parametrize("ahead, behind", [(("jobs", "orders"), ("jobs",)), (("jobs",), ("jobs", "mail"))])
def test_with_other_names_a_waiter_helps_itself(
    queue: Queue, ahead: tuple[str, ...], behind: tuple[str, ...]
) -> None:
    queue.release(queue.holder)
    holder, waiter = asking(RUNTIME, *ahead, ttl=30), asking(RUNTIME, *behind, ttl=30, wait=True)
    queue.let_help_itself(holder, waiter)
    assert step(queue.other.survey()) == []


def test_who_has_lost_the_name_hands_nothing_over(queue: Queue) -> None:
    waiter = queue.wait(queue.mine)
    token = step(queue.other.force_release("orders", queue.first.token))
    assert token is not None
    assert queue.release(queue.holder) == Ended("revoked")
    queue.heard(waiter)
    assert not queue.given(waiter)
    assert step(granted(queue.mine, waiter)).token > token


def test_who_gives_up_meanwhile_gives_the_name_back(queue: Queue) -> None:
    waiter, next_one = queue.wait(queue.mine), queue.wait(queue.other)
    assert queue.release(queue.holder) == Released()
    assert queue.given(waiter)
    assert step(queue.mine.withdraw(waiter.secret)) == Released()
    assert not queue.given(waiter)
    assert step(queue.mine.ask(waiter)) == Ended("withdrawn")
    step(granted(queue.other, next_one))


def test_a_renewal_on_the_way_does_not_disturb(queue: Queue) -> None:
    waiter = queue.wait(queue.mine)
    assert queue.release(queue.holder) == Released()
    assert step(queue.mine.renew([waiter.secret])) == [Waiting(0.0)]
    assert queue.given(waiter)
    lease = step(granted(queue.mine, waiter))
    view = step(queue.other.observe("orders")).held_by
    assert view is not None and view.token == lease.token


def test_who_comes_late_is_told_what_is_left(queue: Queue) -> None:
    """Its own clock says that the session may be over: the server knows."""
    waiter = queue.wait(queue.mine)
    assert queue.release(queue.holder) == Released()
    lease = queue.mine._attempts._given[grant_id(waiter.secret)].granted.hold
    assert lease is not None
    lease.confirmed -= 60
    answer = step(queue.mine.ask(waiter))
    assert isinstance(answer, Granted) and answer.remaining > 20
    again = queue.wait(queue.mine)
    assert queue.release(waiter) == Released()
    lease = queue.mine._attempts._given[grant_id(again.secret)].granted.hold
    assert lease is not None
    lease.confirmed -= 60
    lost = step(queue.other.observe("orders")).held_by
    queue.revoke(lease)
    anew = step(granted(queue.mine, again))
    assert lost is not None and anew.token > lost.token, "its place was there, its grant was not: a new one"


def test_who_does_not_listen_is_not_granted_anything(queue: Queue) -> None:
    """A grant that nobody takes would keep the name from the others."""
    silent = asking(RUNTIME, "orders", ttl=30, wait=True)
    assert isinstance(step(queue.mine.ask(silent)), Waiting)
    assert queue.release(queue.holder) == Released()
    assert step(queue.other.observe("orders")).held_by is None
    step(granted(queue.mine, silent))


@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_reply_is_found_out(etcd_server: EtcdServer, times: int) -> None:
    """The name is handed over, and neither of the two is told: both find it in what is stored."""
    proxy = Proxy(etcd_server.host, etcd_server.port, http2_reply)
    queue = Queue(etcd_server, f"etcd://{proxy.host}:{proxy.port}")
    waiter = queue.wait(queue.mine)
    proxy.on(b'"state":"released"', Fault.LOSE_REPLY, times=times)
    if times == 1:
        assert queue.release(queue.holder) == Released()
    else:
        with pytest.raises(Indeterminate):
            queue.release(queue.holder)
        assert queue.release(queue.holder) == Released()
    view = step(queue.other.observe("orders")).held_by
    assert view is not None and view.grant == grant_id(waiter.secret)
    assert not queue.given(waiter)
    queue.heard(waiter)
    lease = step(granted(queue.mine, waiter))
    assert lease.token == view.token > queue.first.token
    assert queue.release(waiter) == Released()
    assert step(queue.other.survey()) == []
    queue.close()
    proxy.stop()


def test_a_crowd_that_loses_patience(etcd_server: EtcdServer) -> None:
    """Threads of two clients, some of which give up while they are handed the name: one at a time, tokens rise."""
    namespace = secrets.token_hex(8)
    tokens: list[int] = []
    inside = threading.Lock()
    failed: list[BaseException] = []

    def contend(client: fenced.Client, draw: random.Random) -> None:
        try:
            for _ in range(12):
                # On a busy machine a short wait is over before the server has answered: that is no answer, either.
                with contextlib.suppress(fenced.NotGranted, fenced.Unavailable, fenced.Indeterminate):
                    lease = client.acquire("orders", ttl=30, wait=draw.choice((0.002, 0.01, 0.03, 20)))
                    assert inside.acquire(blocking=False), "two at a time"
                    tokens.append(lease.token)
                    lease.check()
                    inside.release()
                    lease.release()
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    with (
        fenced.Client(etcd_server.url(), namespace=namespace, guarantee="best-effort") as one,
        fenced.Client(etcd_server.url(), namespace=namespace, guarantee="best-effort") as two,
    ):
        crowd = [
            threading.Thread(target=contend, args=(client, random.Random(number)))
            for number in range(6)
            for client in (one, two)
        ]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join(60)
        assert not failed and not any(thread.is_alive() for thread in crowd)
        assert tokens == sorted(set(tokens)) and len(tokens) > 12
    # Closed clients have ended what they gave up. A request whose outcome is unknown may still be under way.
    authority = opened(etcd_server.url(), namespace)
    until = time.monotonic() + 60
    while left := [view for view in step(authority.survey()) if view.held_by or view.waiters]:
        assert time.monotonic() < until, left
        time.sleep(0.05)
    step(authority.close())


def test_nothing_is_given_to_another_program(queue: Queue) -> None:
    """The requests of both reach this client through a service, and the one that waits may be dead by now."""
    waiter = asking_as_a_new_holder(RUNTIME, "orders", ttl=30, wait=True)
    assert isinstance(step(queue.mine.ask(waiter)), Waiting)
    step(queue.mine.next_wakeups(RUNTIME.now() + 0.05))
    assert queue.mine._wakeups.listening
    assert queue.release(queue.holder) == Released()
    assert not queue.given(waiter) and step(queue.mine.observe("orders")).held_by is None
    queue.heard(waiter)
    assert step(granted(queue.mine, waiter)).token > queue.first.token
