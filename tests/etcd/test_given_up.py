"""What is given up without an answer, or by nobody, ends by its own ttl, although its client renews another lease."""

import secrets
from collections.abc import Iterator

import pytest

from fenced.drills.relay import Fault
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire, NoSpace
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Authority
from fenced.values.model import Ask, Busy, Ended, Granted, Kept, Released, Waiting
from fenced_testkit.servers import EtcdServer
from tests.etcd.aging import Time
from tests.etcd.test_outages import Harness
from tests.shifted import Shifted

SOON = 0.3
TTL = 30.0


class Bench:
    """One client through a proxy, which keeps a lease all the time, and another that wants what it gave up."""

    def __init__(self, server: EtcdServer) -> None:
        self.runtime = Shifted(BlockingRuntime())
        self.harness = Harness(self.runtime, server)
        self.proxy, self.words = self.harness.proxy, self.harness.words
        self.time = Time(server.url(), self.runtime)
        self.one = self.bound(step(self.harness.authority()))
        self.other = self.bound(step(self.harness.direct()))
        self.kept = self.held("kept")

    def bound(self, authority: Authority) -> EtcdAuthority:
        assert isinstance(authority, EtcdAuthority)
        return self.time.bind(authority, self.runtime)

    def asking(self, *names: str, wait: bool = False, lock_delay: float = 0.0) -> Ask:
        return asking(self.runtime, *names or ("orders",), ttl=TTL, wait=wait, lock_delay=lock_delay)

    def held(self, *names: str, lock_delay: float = 0.0) -> Ask:
        ask = self.asking(*names, lock_delay=lock_delay)
        step(granted(self.one, ask))
        return ask

    def lost(self, ask: Ask) -> None:
        """It is granted, and nobody is told."""
        self.proxy.on(self.words["ask"], Fault.LOSE_REPLY, times=2)
        with pytest.raises(Indeterminate):
            step(self.one.ask(ask))

    def later(self, seconds: float, *others: Ask) -> None:
        """Time goes by; the other lease is renewed meanwhile."""
        for _ in range(int(seconds / 5)):
            self.time.pass_by(5.0)
            secrets = [self.kept.secret, *(ask.secret for ask in others)]
            answers = step(self.one.renew(secrets))
            assert answers[0] == Kept(TTL) and all(isinstance(each, Kept | Waiting) for each in answers)

    def is_free(self) -> None:
        ask = self.asking()
        step(granted(self.other, ask))
        assert step(self.other.release(ask.secret)) == Released()

    def is_taken(self) -> None:
        assert isinstance(step(self.other.ask(self.asking())), Busy)


@pytest.fixture
def bench(etcd_server: EtcdServer) -> Iterator[Bench]:
    bench = Bench(etcd_server)
    yield bench
    step(bench.harness.close())


# proves authority etcd: ttl
@pytest.mark.parametrize("how", ["nobody renews it", "its release is lost", "its grant is lost"])
def test_a_name_ends_by_its_own_ttl(bench: Bench, how: str) -> None:
    ask = bench.asking()
    if how == "its grant is lost":
        bench.lost(ask)
    else:
        step(granted(bench.one, ask))
    if how == "its release is lost":
        bench.proxy.black_hole(drop=True)
        with pytest.raises(FencedError):
            step(bench.one.release(ask.secret, bench.runtime.now() + SOON))
        bench.proxy.heal()
    bench.later(TTL - 5)
    bench.is_taken()
    bench.later(10)
    bench.is_free()
    assert step(bench.one.ask(ask)) == Ended("expired"), "a late ask revives nothing"
    assert step(bench.one.release(ask.secret)) == Ended("expired")


@pytest.mark.parametrize("how", ["its grant is lost", "its release is lost"])
def test_an_etcd_lease_in_doubt_is_not_used_again(bench: Bench, how: str) -> None:
    """Two attempts on it would keep each other alive. After a release with an answer the next attempt has it."""
    calm, ask = bench.held("calm"), bench.asking()
    if how == "its grant is lost":
        bench.lost(ask)
    else:
        step(granted(bench.one, ask))
        bench.proxy.on(bench.words["release"], Fault.LOSE_REPLY, times=2)
        with pytest.raises(Indeterminate):
            step(bench.one.release(ask.secret))
    after = bench.held("after")
    bench.later(TTL + 5, calm, after)
    bench.is_free()


# No space.


@pytest.mark.xdist_group("etcd")
def test_a_server_whose_quota_is_reached_takes_releases() -> None:
    """etcd refuses what writes, and carries out what only deletes. The old record stops a late ask."""
    with EtcdServer(settings={"quota-backend-bytes": "200000"}) as server:
        bench = Bench(server)
        held, several, waiter = bench.held(), bench.held("a", "b"), bench.asking(wait=True)
        assert isinstance(step(bench.other.ask(waiter)), Waiting)
        filler, fills = b"x" * 30_000, True
        wire = EtcdWire(EtcdAddress(server.url()), bench.runtime)
        while fills:
            request = messages.txn((), [messages.put(secrets.token_bytes(8), filler)])
            try:
                step(wire.call(messages.TXN, request, bench.runtime.now() + 5))
            except Unavailable:
                fills = False
        wire.close()
        with pytest.raises(Unavailable, match="space"):
            step(bench.one.ask(bench.asking("more")))
        for ask in (held, several):
            assert step(bench.one.release(ask.secret)) == Released()
        bench.later(5)
        assert step(bench.other.withdraw(waiter.secret)) == Released()
        assert [view.name for view in step(bench.other.survey())] == ["kept"]
        server.execute("alarm", "disarm")
        for client in (bench.one, bench.other):
            assert isinstance(step(client.ask(held)), Ended)
        step(bench.harness.close())


@pytest.mark.parametrize("wait", [False, True])
def test_a_write_before_no_space_is_found(bench: Bench, wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member carries out what another has let through, and says that there is no space all the same."""
    if wait:
        step(granted(bench.other, bench.asking()))
    call = EtcdWire.call

    async def full(
        self: EtcdWire, path: str, request: bytes, until: float, *, repeatable: bool = True
    ) -> bytes:
        reply = await call(self, path, request, until, repeatable=repeatable)
        if path == messages.TXN and messages.TxnReply(reply).succeeded and b'"state":"' in request:
            raise NoSpace("etcdserver: mvcc: database space exceeded")
        return reply

    monkeypatch.setattr(EtcdWire, "call", full)
    ask = bench.asking(wait=wait)
    if wait:
        with pytest.raises(Indeterminate, match="space"):  # it stands in the queue
            step(bench.one.ask(ask))
        monkeypatch.undo()
        assert isinstance(step(bench.one.ask(ask)), Waiting)
    else:
        assert isinstance(step(bench.one.ask(ask)), Granted)
        monkeypatch.undo()
    assert step(bench.one.release(ask.secret)) == Released()
