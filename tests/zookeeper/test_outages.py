"""The outage kit on ZooKeeper."""

import secrets
import select
import socket
import struct
import threading

import pytest

from fenced.drills.relay import Fault, Proxy
from fenced.errors import Indeterminate, Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.wire import jute
from fenced.stores.zookeeper.wire.connection import Hub, ZooKeeperWire
from fenced.stores.zookeeper.wire.sides import Sides
from fenced.testing import Check, run
from fenced.testing.kit import asking, granted
from fenced.values import timing
from fenced.values.contracts import Colour, Readable, Runtime, SocketLike
from fenced.values.model import Ask, AskAnswer, Busy, Ended, Kept
from fenced_testkit import OUTAGE_CHECKS, OutageHarness
from fenced_testkit.servers import ZooKeeperServer
from tests.outage_harness import ProxiedHarness, every_outage, own_server
from tests.planted.test_kits_catch import is_caught
from tests.shifted import Shifted
from tests.zookeeper.acting import WORDS, opened, session_of

pytestmark = pytest.mark.xdist_group("zookeeper")
server = own_server(ZooKeeperServer)


class Harness(ProxiedHarness):
    def __init__(self, runtime: Runtime, server: ZooKeeperServer) -> None:
        super().__init__(runtime, server, "zookeeper://{}:{}".format, WORDS)


@every_outage
def test_outages(check: Check[OutageHarness], colour: Colour, server: ZooKeeperServer) -> None:
    run(check, lambda runtime: Harness(runtime, server), colour)


def test_an_ask_that_forgets_what_it_has_written_is_caught(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ask that has made its places is answered by the error of its next request, which could not be sent."""
    real = ZooKeeperAuthority.ask

    async def forgetful(self: ZooKeeperAuthority, ask: Ask, until: float | None = None) -> AskAnswer:
        try:
            return await real(self, ask, until)
        except Indeterminate as error:
            raise error.__cause__ if isinstance(error.__cause__, Unavailable) else error from None

    monkeypatch.setattr(ZooKeeperAuthority, "ask", forgetful)
    (check,) = (
        check for check in OUTAGE_CHECKS if check.name == "an_ask_that_has_written_is_not_answered_no"
    )
    assert is_caught(check, lambda runtime: Harness(runtime, server))


def test_an_unknown_ask_that_nobody_withdraws_lapses(server: ZooKeeperServer) -> None:
    """Its session goes on with another lease: its own client finds the ghost, and ends it when its time is over.

    Also if it was asked again meanwhile, and that ask could not be sent.
    """
    runtime = Shifted(BlockingRuntime())
    harness = Harness(runtime, server)
    one, onlooker = step(harness.authority()), step(harness.direct())
    kept, lost = asking(runtime, "kept"), asking(runtime, "orders")
    step(granted(one, kept))
    harness.proxy.on(harness.words["ask"], Fault.LOSE_REPLY, times=2)
    with pytest.raises(Indeterminate):
        step(one.ask(lost))
    harness.proxy.refuse()
    with pytest.raises(Unavailable):
        step(one.ask(lost))
    harness.proxy.heal()
    assert isinstance(step(onlooker.ask(asking(runtime, "orders"))), Busy)
    for _ in range(2):
        runtime.ahead += 6
        assert step(one.renew([kept.secret])) == [Kept(10.0)]
    step(granted(onlooker, asking(runtime, "orders")))
    assert step(one.ask(lost)) == Ended("expired")
    step(harness.close())


class Stalling(Shifted):
    """A process that stands still when it waits for a reply, until long after its deadline."""

    link: SocketLike | None = None

    async def readable(self, source: Readable, until: float) -> bool:
        if self.link is None:
            return await super().readable(source, until)
        assert select.select([self.link], [], [], 30)[0]
        self.ahead += 60
        return False


def test_an_answer_that_is_there_is_taken_however_late_it_is_read(zookeeper_server: ZooKeeperServer) -> None:
    runtime = Stalling(BlockingRuntime())
    with opened(zookeeper_server.url(), secrets.token_hex(8), runtime) as authority:
        ask = asking(runtime, "orders", ttl=600)
        step(granted(authority, ask))
        # From now on one small reply is all there is.
        assert step(authority.renew([ask.secret])) == [Kept(600.0)]
        wire = session_of(authority, 600.0)._wire
        assert wire is not None
        runtime.link = wire.socket
        assert step(authority.renew([ask.secret], runtime.now() + 1)) == [Kept(600.0)]
        runtime.link = None


def test_a_member_that_is_silent_is_left_for_another_within_one_call(server: ZooKeeperServer) -> None:
    """The caller has much more time than one member is given."""
    runtime = BlockingRuntime()
    with Proxy(server.host, server.port) as proxy:
        members = f"zookeeper://{proxy.host}:{proxy.port},{server.host}:{server.port}"
        with opened(members, secrets.token_hex(8), runtime) as authority:
            session = session_of(authority, timing.TTL_DEFAULT)
            while not proxy.connections:  # members are drawn
                session.close()
                step(authority.open())
            proxy.black_hole(drop=True)
            began = runtime.now()
            step(authority.open(until=began + 60))
            assert runtime.now() - began < 30


def test_a_caller_that_gives_up_leaves_the_connection_to_others() -> None:
    """The server is slow and answers: a caller who gives up leaves the connection to the others."""
    runtime = Sides(BlockingRuntime())
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    hub = Hub(runtime)
    wire = ZooKeeperWire(ours, hub, runtime, "server", lambda _: None)
    answers: list[object] = []

    async def patient() -> None:
        answers.append(await wire.exchange([jute.sync("/first")], runtime.now() + 30))

    def request() -> None:
        size = struct.unpack(">i", theirs.recv(4, socket.MSG_WAITALL))[0]
        theirs.recv(size, socket.MSG_WAITALL)

    async def serve() -> None:
        for number in (1, 2):
            request()
            arrived[number].set()
        theirs.sendall(jute.frame(struct.pack(">iqi", 1, 1, 0)))  # and to the second later

    arrived = {1: threading.Event(), 2: threading.Event()}
    tasks = [runtime.spawn(serve, "serve"), runtime.spawn(patient, "patient")]
    assert arrived[1].wait(30)
    with pytest.raises(ConnectionBroken):
        step(wire.exchange([jute.sync("/second")], runtime.now() + 2))
    for task in tasks:
        step(task.join())
    assert len(answers) == 1 and not wire.closed
    theirs.sendall(jute.frame(struct.pack(">iqi", 2, 2, 0)) + jute.frame(struct.pack(">iqi", 3, 3, 0)))
    (third,) = step(wire.exchange([jute.sync("/third")], runtime.now() + 30))
    assert third.zxid == 3
    wire.close()
    hub.close()
    theirs.close()
