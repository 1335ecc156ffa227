"""What is given up without an answer, or by nobody, ends by its own ttl, although its client renews another lease."""

import contextlib
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
from fenced.stores.etcd.wire.protobuf import integer
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Authority
from fenced.values.model import Ask, Busy, Ended, Granted, Kept, Released, Waiting
from fenced_testkit.servers import EtcdServer
from tests.etcd.aging import Time
from tests.etcd.test_outages import Harness
from tests.shifted import Shifted

ALARM = "/etcdserverpb.Maintenance/Alarm"
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


def test_a_lock_delay_follows_as_long_as_it_says(bench: Bench) -> None:
    ask = bench.held(lock_delay=20.0)
    bench.later(TTL + 5)
    view = step(bench.other.observe("orders"))
    assert view.held_by is None and 0 < view.free_in <= 20
    bench.is_taken()
    assert step(bench.one.renew([ask.secret])) == [Ended("expired")]
    bench.later(20)
    bench.is_free()


def test_a_silent_waiter_loses_its_place(bench: Bench) -> None:
    """After ten seconds; one that is renewed keeps it."""
    holder, behind = bench.asking(), bench.asking(wait=True)
    step(granted(bench.other, holder))
    silent = bench.asking(wait=True)
    assert isinstance(step(bench.one.ask(silent)), Waiting)
    assert isinstance(step(bench.one.ask(behind)), Waiting)
    assert step(bench.other.release(holder.secret)) == Released()
    bench.later(5, behind)
    assert isinstance(step(bench.one.ask(behind)), Waiting), "it stands behind the silent one"
    bench.later(10, behind)
    step(granted(bench.one, behind))
    assert step(bench.one.ask(silent)) == Ended("expired")


def test_a_renewed_attempt_never_ends(bench: Bench) -> None:
    ask, waiter = bench.held(), bench.asking(wait=True)
    assert isinstance(step(bench.one.ask(waiter)), Waiting)
    bench.later(50, ask, waiter)
    assert step(bench.one.release(ask.secret)) == Released()
    step(granted(bench.one, waiter))
    bench.later(50, waiter)


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


@contextlib.contextmanager
def no_space(server: EtcdServer) -> Iterator[None]:
    """What etcd does when its quota is reached: nothing is put any more, by nobody, until the alarm is over."""
    runtime = BlockingRuntime()
    wire = EtcdWire(EtcdAddress(server.url()), runtime)
    status = server.status()
    assert status is not None
    for action in (1, 2):
        request = integer(1, action) + integer(2, status.member) + integer(3, 1)
        step(wire.call(ALARM, request, runtime.now() + 5))
        if action == 1:
            try:
                yield
            except BaseException:
                server.execute("alarm", "disarm")
                raise
    wire.close()


@pytest.fixture(scope="module")
def full_server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.mark.xdist_group("etcd")
def test_a_release_without_space_frees_the_name(full_server: EtcdServer) -> None:
    """etcd refuses what writes, and carries out what only deletes. The old record stops a late ask."""
    bench = Bench(full_server)
    held, several, waiter = bench.held(), bench.held("a", "b"), bench.asking(wait=True)
    assert isinstance(step(bench.other.ask(waiter)), Waiting)
    with no_space(full_server):
        with pytest.raises(Unavailable, match="space"):
            step(bench.one.ask(bench.asking("more")))
        assert step(bench.one.release(held.secret)) == Released()
        assert step(bench.one.release(several.secret)) == Released()
        bench.later(5)
        assert step(bench.other.withdraw(waiter.secret)) == Released()
        assert [view.name for view in step(bench.other.survey())] == ["kept"]
    bench.is_free()
    for client in (bench.one, bench.other):
        assert isinstance(step(client.ask(held)), Ended)
    step(bench.harness.close())


@pytest.mark.xdist_group("etcd")
def test_a_server_whose_quota_is_reached_takes_releases() -> None:
    """The real thing."""
    with EtcdServer(settings={"quota-backend-bytes": "200000"}) as server:
        bench = Bench(server)
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
            step(bench.one.ask(bench.asking()))
        assert step(bench.one.release(bench.kept.secret)) == Released()
        assert step(bench.other.survey()) == []
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
