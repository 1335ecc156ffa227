"""What was given up is ended with the next renewal, and nothing outlives its own ttl because another lease lives.

All names of a client with one ttl hang on one lease of etcd's. In every test another lease of the same ttl is renewed,
so etcd itself ends nothing.
"""

import contextlib
import secrets
from collections.abc import Iterator

import pytest

import fenced
from fenced.drills.relay import Fault
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire, NoSpace
from fenced.stores.etcd.wire.protobuf import integer
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Authority, Readable
from fenced.values.model import Ask, Busy, Ended, Granted, Kept, Released, Waiting
from fenced_testkit.servers import EtcdServer
from tests.etcd.test_outages import Harness
from tests.shifted import Shifted

ALARM = "/etcdserverpb.Maintenance/Alarm"
SOON = 0.3
TTL = 30.0


class Ctrl(BlockingRuntime):
    """A Ctrl-C that comes while somebody waits for a reply."""

    pressed = False

    async def readable(self, source: Readable, until: float) -> bool:
        if self.pressed:
            self.pressed = False
            raise KeyboardInterrupt
        return await super().readable(source, until)


class Bench:
    """One client through a proxy, which keeps a lease all the time, and another that wants what it gave up."""

    def __init__(self, server: EtcdServer) -> None:
        self.ctrl = Ctrl()
        self.runtime = Shifted(self.ctrl)
        self.harness = Harness(self.runtime, server)
        self.proxy, self.words = self.harness.proxy, self.harness.words
        self.one: Authority = step(self.harness.authority())
        self.other: Authority = step(self.harness.direct())
        self.holder = asking(self.runtime).holder
        self.kept = self.asking("kept")
        step(granted(self.one, self.kept))

    def asking(self, *names: str, wait: bool = False, lock_delay: float = 0.0) -> Ask:
        ask = asking(self.runtime, *names, ttl=TTL, wait=wait, lock_delay=lock_delay)
        return ask._replace(holder=self.holder)  # one client: one lease of etcd's for all

    def soon(self) -> float:
        return self.runtime.now() + SOON

    def held(self, *names: str) -> Ask:
        ask = self.asking(*names or ("orders",))
        step(granted(self.one, ask))
        return ask

    def renew(self) -> None:
        assert step(self.one.renew([self.kept.secret])) == [Kept(TTL)]

    def later(self, seconds: float) -> None:
        """Time goes by; the other lease is renewed meanwhile."""
        while seconds > 0:
            self.runtime.ahead += min(seconds, 5.0)
            seconds -= 5.0
            self.renew()

    def is_free(self) -> None:
        ask = self.asking("orders")
        step(granted(self.other, ask))
        assert step(self.other.release(ask.secret)) == Released()

    def is_taken(self) -> None:
        assert isinstance(step(self.other.ask(self.asking("orders"))), Busy)


@pytest.fixture
def bench(etcd_server: EtcdServer) -> Iterator[Bench]:
    bench = Bench(etcd_server)
    yield bench
    step(bench.harness.close())


# Six ways in which giving up can fail.


def test_a_release_into_a_black_hole_is_repeated(bench: Bench) -> None:
    ask = bench.held()
    bench.proxy.black_hole(drop=True)
    with pytest.raises(Indeterminate):
        step(bench.one.release(ask.secret, bench.soon()))
    bench.proxy.heal()
    bench.is_taken()
    bench.renew()
    bench.is_free()
    assert step(bench.one.release(ask.secret)) == Released(), "and repeating it says the same"


def test_a_withdrawal_that_is_lost_with_the_asks_reply_is_repeated(bench: Bench) -> None:
    ask = bench.asking("orders")
    bench.proxy.on(bench.words["ask"], Fault.LOSE_REPLY, times=2)
    with pytest.raises(Indeterminate):
        step(bench.one.ask(ask))
    bench.proxy.black_hole(drop=True)
    with pytest.raises(FencedError):
        step(bench.one.withdraw(ask.secret, bench.soon()))
    bench.proxy.heal()
    bench.is_taken()
    bench.renew()
    bench.is_free()
    assert step(bench.one.ask(ask)) == Ended("withdrawn")


def test_a_waiter_that_gives_up_while_cut_off_lets_others_pass(bench: Bench) -> None:
    holder, behind = bench.asking("orders"), bench.asking("orders", wait=True)
    step(granted(bench.other, holder))
    waiter = bench.asking("orders", wait=True)
    assert isinstance(step(bench.one.ask(waiter)), Waiting)
    assert isinstance(step(bench.other.ask(behind)), Waiting)
    bench.proxy.black_hole(drop=True)
    with pytest.raises(Indeterminate):
        step(bench.one.withdraw(waiter.secret, bench.soon()))
    bench.proxy.heal()
    assert step(bench.other.release(holder.secret)) == Released()
    assert isinstance(step(bench.other.ask(behind)), Waiting), "it stands behind who has given up"
    bench.renew()
    step(granted(bench.other, behind))


def test_a_release_that_ctrl_c_ends_is_repeated(bench: Bench) -> None:
    ask = bench.held()
    bench.proxy.on(bench.words["release"], Fault.SWALLOW)
    bench.ctrl.pressed = True
    with pytest.raises(KeyboardInterrupt):
        step(bench.one.release(ask.secret))
    bench.is_taken()
    bench.renew()
    bench.is_free()


@pytest.mark.xdist_group("etcd")
def test_a_block_that_ends_while_the_server_restarts() -> None:
    """The whole client: the program sees nothing of it, and goes on with its other lease."""
    with EtcdServer() as server:
        namespace = secrets.token_hex(8)
        url = server.url()
        with (
            fenced.Client(url, namespace=namespace, guarantee="best-effort") as client,
            fenced.Client(url, namespace=namespace, guarantee="best-effort") as other,
        ):
            kept = client.acquire("kept", ttl=6)
            with client.hold("orders", ttl=6):
                server.kill()
            server.start()
            other.acquire("orders", ttl=6, wait=30).release()
            with contextlib.suppress(fenced.LeaseLost):  # on a machine that is slow enough
                kept.release()


# No space.


@contextlib.contextmanager
def no_space(server: EtcdServer) -> Iterator[None]:
    """What etcd does when its quota is reached: nothing is put any more, by nobody, until the alarm is over."""
    runtime = BlockingRuntime()
    wire = EtcdWire(EtcdAddress(server.url()), runtime)
    status = server.status()
    assert status is not None
    member = status.member
    for action in (1, 2):
        request = integer(1, action) + integer(2, member) + integer(3, 1)
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
    """etcd refuses what writes, and carries out what only deletes. How it ended is written down later."""
    bench = Bench(full_server)
    held, several = bench.held(), bench.held("a", "b")
    waiter = bench.asking("orders", wait=True)
    assert isinstance(step(bench.other.ask(waiter)), Waiting)
    with no_space(full_server):
        with pytest.raises(Unavailable, match="space"):
            step(bench.one.ask(bench.asking("more")))
        assert step(bench.one.release(held.secret)) == Released()
        assert step(bench.one.release(held.secret)) == Released()
        assert step(bench.one.release(several.secret)) == Released()
        bench.renew()
        assert step(bench.other.withdraw(waiter.secret)) == Released()
        assert [view.name for view in step(bench.other.survey())] == ["kept"]
    bench.is_free()
    assert step(bench.other.ask(held)) == Ended("revoked"), "as another client sees it"
    bench.renew()
    assert step(bench.other.ask(held)) == Ended("released")
    assert step(bench.other.ask(several)) == Ended("released")
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
        ask = bench.asking("orders")
        with pytest.raises(Unavailable, match="space"):
            step(bench.one.ask(ask))
        assert step(bench.one.release(bench.kept.secret)) == Released()
        assert step(bench.other.survey()) == []
        step(bench.harness.close())


@pytest.mark.parametrize("wait", [False, True])
def test_what_etcd_has_done_before_it_said_no_space_is_found(
    bench: Bench, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member carries out what another has let through, and says that there is no space all the same."""
    assert isinstance(bench.one, EtcdAuthority)
    if wait:
        step(granted(bench.other, bench.asking("orders")))
    wire, call = bench.one._wire, bench.one._wire.call

    async def full(path: str, request: bytes, until: float, *, repeatable: bool = True) -> bytes:
        reply = await call(path, request, until, repeatable=repeatable)
        if path == messages.TXN and messages.TxnReply(reply).succeeded and b'"state":"' in request:
            raise NoSpace("etcdserver: mvcc: database space exceeded")
        return reply

    monkeypatch.setattr(wire, "call", full)
    ask = bench.asking("orders", wait=wait)
    if wait:
        with pytest.raises(Indeterminate, match="space"):  # it stands in the queue
            step(bench.one.ask(ask))
        monkeypatch.undo()
        assert isinstance(step(bench.one.ask(ask)), Waiting)
    else:
        assert isinstance(step(bench.one.ask(ask)), Granted)
        monkeypatch.undo()
    assert step(bench.one.release(ask.secret)) == Released()
    assert len(bench.one._attempts.signs) == 1


# Nobody gives it up at all.


def test_an_unknown_ask_that_nobody_withdraws_lapses(bench: Bench) -> None:
    ask = bench.asking("orders")
    bench.proxy.on(bench.words["ask"], Fault.LOSE_REPLY, times=2)
    with pytest.raises(Indeterminate):
        step(bench.one.ask(ask))
    bench.later(TTL - 5)
    bench.is_taken()
    bench.later(10)
    bench.is_free()
    assert step(bench.one.ask(ask)) == Ended("expired")


def test_a_late_ask_of_what_has_lapsed_is_not_granted(bench: Bench) -> None:
    """The request never came, as far as anybody can tell: it may still be under way."""
    ask = bench.asking("orders")
    bench.proxy.on(bench.words["ask"], Fault.CUT_BEFORE, times=2)
    with pytest.raises(Indeterminate):
        step(bench.one.ask(ask))
    bench.later(TTL + 5)
    assert step(bench.other.ask(ask)) == Ended("expired"), "it arrives"
    bench.is_free()


# proves authority etcd: ttl
@pytest.mark.parametrize("lock_delay", [0.0, 20.0])
def test_a_lease_that_nobody_renews_lapses(bench: Bench, lock_delay: float) -> None:
    """And its lock_delay goes by as after every expiry, for as long as it says."""
    ask = bench.asking("orders", lock_delay=lock_delay)
    bench.kept = bench.asking("kept with a delay", lock_delay=lock_delay)
    step(granted(bench.one, bench.kept))
    step(granted(bench.one, ask))
    bench.later(TTL - 5)
    bench.is_taken()
    if lock_delay:
        bench.later(lock_delay)
        view = step(bench.other.observe("orders"))
        assert view.held_by is None and view.free_in > 0
        bench.is_taken()
    bench.later(10)
    bench.is_free()
    assert step(bench.one.release(ask.secret)) == Ended("expired")


@pytest.mark.parametrize("lost, withdrawn", [(True, False), (True, True), (False, True)])
def test_a_lock_delay_is_as_long_as_it_says_whatever_reply_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, lost: bool, withdrawn: bool
) -> None:
    """The reply to the expiry does not come, or the owner withdraws afterwards: the delay goes by, no more, no less."""
    assert isinstance(bench.one, EtcdAuthority)
    ask = bench.asking("orders", lock_delay=20.0)
    bench.kept = bench.asking("kept with a delay", lock_delay=20.0)
    step(granted(bench.one, bench.kept))
    step(granted(bench.one, ask))
    run = bench.one._space.run

    async def run_and_lose(request: bytes, until: float, *, repeatable: bool = True) -> messages.TxnReply:
        reply = await run(request, until, repeatable=repeatable)
        if lost and b'"expired","names":["orders"]' in request:
            monkeypatch.undo()
            raise Indeterminate("the reply is lost")
        return reply

    monkeypatch.setattr(bench.one._space, "run", run_and_lose)
    bench.later(TTL)
    if withdrawn:
        assert step(bench.one.withdraw(ask.secret)) == Ended("expired")
    bench.later(15)
    bench.is_taken()
    bench.later(10)
    bench.is_free()


def test_a_waiter_that_nobody_renews_loses_its_place(bench: Bench) -> None:
    """After ten seconds, as everybody who is silent."""
    holder, behind = bench.asking("orders"), bench.asking("orders", wait=True)
    step(granted(bench.other, holder))
    silent, waits = bench.asking("orders", wait=True), bench.asking("more", wait=True)
    step(granted(bench.other, bench.asking("more")))
    assert isinstance(step(bench.one.ask(silent)), Waiting)
    assert isinstance(step(bench.one.ask(waits)), Waiting)
    assert isinstance(step(bench.other.ask(behind)), Waiting)
    assert step(bench.other.release(holder.secret)) == Released()
    for _ in range(2):
        assert isinstance(step(bench.other.ask(behind)), Waiting)
        bench.runtime.ahead += 5.0
        kept, waiting = step(bench.one.renew([bench.kept.secret, waits.secret]))
        assert kept == Kept(TTL) and isinstance(waiting, Waiting)
        step(bench.other.renew([behind.secret]))
    step(granted(bench.other, behind))
    assert step(bench.one.ask(silent)) == Ended("expired")


def test_who_only_asks_does_not_keep_a_ghost_alive(bench: Bench) -> None:
    """An ask prolongs a lease, too, if it was not confirmed for some time."""
    ask = bench.held()
    for _ in range(4):
        bench.runtime.ahead += 12.0
        each = bench.asking("another")
        step(granted(bench.one, each))
        assert step(bench.one.release(each.secret)) == Released()
    bench.is_free()
    assert step(bench.one.release(ask.secret)) == Ended("expired")


def test_what_is_renewed_never_lapses(bench: Bench) -> None:
    """The other side of it: neither what is held, nor what waits, nor what another client has taken over."""
    ask, waiter = bench.held(), bench.asking("orders", wait=True)
    assert isinstance(step(bench.one.ask(waiter)), Waiting)
    for _ in range(10):
        bench.runtime.ahead += 5.0
        kept, held, waiting = step(bench.one.renew([bench.kept.secret, ask.secret, waiter.secret]))
        assert (kept, held) == (Kept(TTL), Kept(TTL)) and isinstance(waiting, Waiting)
    assert step(bench.one.release(ask.secret)) == Released()
    step(granted(bench.one, waiter))


def test_nothing_is_remembered_of_what_is_over(bench: Bench) -> None:
    assert isinstance(bench.one, EtcdAuthority)
    for _ in range(3):
        ask = bench.held()
        assert isinstance(step(bench.one.ask(bench.asking("orders"))), Busy)
        waiter = bench.asking("orders", wait=True)
        step(bench.one.ask(waiter))
        step(bench.one.release(ask.secret))
        step(bench.one.withdraw(waiter.secret))
    assert len(bench.one._attempts.signs) == 1
