"""A release that grants the name to the one directly behind, when both are of one client: and when it must not."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from fenced.runtime.blocking import step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.authority.keys import Keys
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.testing.kit import asking as asking_as_a_new_holder
from fenced.testing.kit import granted
from fenced.values.model import Ask, Ended, Kept, Released, Waiting, grant_id
from fenced_testkit.servers import EtcdServer
from tests.etcd.aging import LEASE_REVOKE
from tests.etcd.test_authority import RUNTIME, opened, received

pytestmark = pytest.mark.xdist_group("etcd")  # some count what the server is asked
PROGRAM = asking_as_a_new_holder(RUNTIME).holder


def asking(*arguments: Any, **options: Any) -> Ask:
    """All attempts of a client are one program's, unless it is in a service."""
    return asking_as_a_new_holder(*arguments, **options)._replace(holder=PROGRAM)


class Queue:
    """A client that holds `orders`, and whose waiters listen; and another client."""

    def __init__(self, server: EtcdServer, url: str = "") -> None:
        self.server, self.namespace = server, secrets.token_hex(8)
        self.client, self.other = (opened(at, self.namespace) for at in (url or server.url(), server.url()))
        self.holder = asking(RUNTIME, "orders", ttl=30)
        self.first = step(granted(self.client, self.holder))

    def wait(self, authority: EtcdAuthority, ask: Ask | None = None) -> Ask:
        ask = ask or asking(RUNTIME, "orders", ttl=30, wait=True)
        assert isinstance(step(authority.ask(ask)), Waiting)
        step(authority.next_wakeups(RUNTIME.now() + 0.05))
        return ask

    def release(self, ask: Ask) -> object:
        return step(self.client.release(ask.secret))

    def woken(self, ask: Ask) -> None:
        limit = RUNTIME.now() + 5
        while grant_id(ask.secret) not in step(self.client.next_wakeups(limit)):
            assert RUNTIME.now() < limit

    def has(self, ask: Ask) -> bool:
        """Whether it holds its name, as everybody can see."""
        held_by = step(self.other.observe(ask.names[0])).held_by
        return held_by is not None and held_by.grant == grant_id(ask.secret)

    def close(self) -> None:
        for each in (self.client, self.other):
            step(each.close())


@pytest.fixture
def queue(etcd_server: EtcdServer) -> Iterator[Queue]:
    queue = Queue(etcd_server)
    yield queue
    queue.close()


def test_a_hand_over_is_one_request(queue: Queue) -> None:
    waiters = [queue.wait(queue.client) for _ in range(3)]
    last, token = queue.holder, queue.first.token
    before = received(queue.server)
    for waiter in waiters:
        assert queue.release(last) == Released()
        queue.woken(waiter)
        lease = step(granted(queue.client, waiter))
        assert lease.token > token and 19 < lease.remaining <= 30
        last, token = waiter, lease.token
    assert received(queue.server) - before <= 4, "three releases; the watch of the claim is ended"
    view = step(queue.other.observe("orders"))
    assert view.held_by is not None and view.held_by.token == token and not view.waiters
    assert step(queue.client.renew([last.secret])) == [Kept(30.0)]
    assert queue.release(last) == Released()
    assert step(queue.other.survey()) == []


def test_a_late_place_is_taken_behind_the_holder(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticket is from before the hand-overs, which look only at places behind the holder's: it looks again."""
    call, writes = EtcdWire.call, []

    async def slowly(self: EtcdWire, path: str, request: bytes, *args: Any, **options: Any) -> bytes:
        """Before the first place is written somebody else comes, is let in, and leaves."""
        if b'"state":"waiting"' in request:
            writes.append(request)
            if len(writes) == 1:
                between, behind = queue.wait(queue.client), asking(RUNTIME, "orders", ttl=30)
                queue.release(queue.holder)
                await granted(queue.client, between)
                queue.release(between)
                await granted(queue.client, behind)
                queue.holder = behind
        return await call(self, path, request, *args, **options)

    monkeypatch.setattr(EtcdWire, "call", slowly)
    late = queue.wait(queue.other)
    assert len(writes) == 3, "its first try, that of the other, its second"
    behind = queue.wait(queue.client)
    queue.release(queue.holder)
    assert isinstance(step(queue.client.ask(behind)), Waiting)
    step(granted(queue.other, late))


def test_a_raised_floor_holds(queue: Queue) -> None:
    waiter = queue.wait(queue.client)
    step(queue.other.raise_floor(10**9))
    assert queue.release(queue.holder) == Released()
    queue.woken(waiter)
    assert step(granted(queue.client, waiter)).token > 10**9


def test_a_waiter_without_a_place_gets_nothing(queue: Queue) -> None:
    waiter, next_one = queue.wait(queue.client), queue.wait(queue.other)
    wire, until = EtcdWire(EtcdAddress(queue.server.url()), RUNTIME), RUNTIME.now() + 5
    keys = Keys(queue.namespace)
    read = messages.txn((), [messages.get(keys.places("orders"), keys.behind("orders"))])
    places = messages.TxnReply(step(wire.call(messages.TXN, read, until))).found[0].kvs
    (lease,) = [kv.lease for kv in places if grant_id(waiter.secret).encode() in kv.key]
    step(wire.call(LEASE_REVOKE, messages.lease_id(lease), until))
    wire.close()
    assert queue.release(queue.holder) == Released()
    assert step(queue.client.ask(waiter)) == Ended("expired")
    step(granted(queue.other, next_one))


DELAYED, PLAIN = {"ttl": 30, "lock_delay": 1.0}, {"ttl": 30}


@pytest.mark.parametrize(
    "ahead, behind",
    [
        (asking(RUNTIME, "jobs", **DELAYED), asking(RUNTIME, "jobs", **PLAIN, wait=True)),
        (asking(RUNTIME, "jobs", **PLAIN), asking(RUNTIME, "jobs", **DELAYED, wait=True)),
        (asking(RUNTIME, "jobs", "mail", **PLAIN), asking(RUNTIME, "jobs", **PLAIN, wait=True)),
        (asking(RUNTIME, "jobs", **PLAIN), asking(RUNTIME, "jobs", "mail", **PLAIN, wait=True)),
        (asking(RUNTIME, "jobs", **PLAIN), asking_as_a_new_holder(RUNTIME, "jobs", **PLAIN, wait=True)),
    ],
    ids=["a delay", "a delay behind", "other names", "other names behind", "another program, maybe dead"],
)
def test_a_waiter_that_may_not_follow_asks_itself(queue: Queue, ahead: Ask, behind: Ask) -> None:
    queue.release(queue.holder)
    step(granted(queue.client, ahead))
    queue.wait(queue.client, behind)
    assert queue.release(ahead) == Released()
    assert not queue.has(behind)
    queue.woken(behind)
    step(granted(queue.client, behind))
    assert queue.release(behind) == Released()
    assert step(queue.other.survey()) == []


def test_a_client_that_does_not_listen_is_not_handed_anything(queue: Queue) -> None:
    """A grant that nobody takes would keep the name from the others."""
    silent = asking(RUNTIME, "orders", ttl=30, wait=True)
    assert isinstance(step(queue.client.ask(silent)), Waiting)
    assert queue.release(queue.holder) == Released()
    assert not queue.has(silent)
    step(granted(queue.client, silent))


def test_a_revoked_holder_hands_nothing_over(queue: Queue) -> None:
    waiter = queue.wait(queue.client)
    token = step(queue.other.force_release("orders", queue.first.token))
    assert queue.release(queue.holder) == Ended("revoked")
    queue.woken(waiter)
    assert token is not None and step(granted(queue.client, waiter)).token > token


def test_a_waiter_that_gives_up_meanwhile_gives_the_name_back(queue: Queue) -> None:
    waiter, next_one = queue.wait(queue.client), queue.wait(queue.other)
    assert queue.release(queue.holder) == Released()
    assert queue.has(waiter)
    assert step(queue.client.withdraw(waiter.secret)) == Released()
    assert step(queue.client.ask(waiter)) == Ended("withdrawn")
    step(granted(queue.other, next_one))


def test_a_renewal_meanwhile_does_not_disturb(queue: Queue) -> None:
    waiter = queue.wait(queue.client)
    assert queue.release(queue.holder) == Released()
    assert step(queue.client.renew([waiter.secret])) == [Waiting(0.0)]
    view, lease = step(queue.other.observe("orders")).held_by, step(granted(queue.client, waiter))
    assert view is not None and view.token == lease.token
