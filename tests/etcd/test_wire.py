"""Connections to etcd that end, hang, are refused or are shared: nothing is lost, and nobody but us is told."""

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fenced.errors import FencedError, Indeterminate, Misuse, Unavailable
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.authority.watching import REOPEN_SECONDS, EtcdWakeups, Target
from fenced.stores.etcd.wire import http2, messages, protobuf
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.stores.etcd.wire.connection import EtcdConnection, EtcdStream
from fenced.testing.kit import asking, granted
from fenced.values.contracts import Readable
from fenced_testkit.servers import EtcdServer

RUNTIME = BlockingRuntime()
TARGET = Target(b"watched", 1)


def soon(seconds: float = 5.0) -> float:
    return RUNTIME.now() + seconds


# The watch stream.


@contextlib.contextmanager
def closing_server() -> Iterator[tuple[int, list[float]]]:
    """Its port, and when it was connected to: it closes every connection at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        times: list[float] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link, _ = server.accept()
                    times.append(time.monotonic())
                    link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], times
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_stream_that_ends_at_once_is_not_opened_in_a_loop() -> None:
    """A member without a leader does that, and every client of the cluster would use up its ports."""
    with closing_server() as (port, times):
        wakeups = EtcdWakeups(EtcdWire(EtcdAddress(f"etcd://127.0.0.1:{port}"), RUNTIME), RUNTIME)
        step(wakeups.watch("a" * 32, TARGET, soon()))
        limit = time.monotonic() + 3 * REOPEN_SECONDS
        while time.monotonic() < limit:
            step(wakeups.next_wakeups(soon(0.01)))
        wakeups.close()
    assert 2 <= len(times) <= 4


@pytest.mark.xdist_group("etcd")
def test_a_watch_that_is_refused_is_begun_again() -> None:
    """A token lapses, and the stream goes on with it: the server refuses each new watch without saying which."""
    with EtcdServer(password="secret") as server:
        wire = EtcdWire(EtcdAddress(server.url()), RUNTIME)
        wakeups = EtcdWakeups(wire, RUNTIME)
        wire.token = "made-up.1"
        step(wire.call(messages.TXN, messages.txn((), [messages.put(b"watched", b"")]), soon()))
        good, wire.token = wire.token, "made-up.2"
        step(wakeups.watch("a" * 32, TARGET, soon()))
        assert step(wakeups.next_wakeups(soon(2.0))) == []
        assert wire.token == "" != good
        limit = time.monotonic() + 90
        while not wakeups.listening:
            assert time.monotonic() < limit
            step(wakeups.next_wakeups(soon(0.05)))
        step(wire.call(messages.TXN, messages.txn((), [messages.delete(b"watched")]), soon()))
        while not (heard := step(wakeups.next_wakeups(soon(0.5)))):
            assert time.monotonic() < limit
        assert heard == ["a" * 32]
        wakeups.close()
        wire.close()


@pytest.fixture
def stream() -> Iterator[tuple[EtcdStream, socket.socket]]:
    """A stream with all the room in the world, and its other end, which does not read."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    made = EtcdConnection(ours, "here", RUNTIME, 0).stream("/a/b", RUNTIME)
    size = http2.WINDOW_MAX - http2.WINDOW
    room = b"".join(http2.frame(http2.WINDOW_UPDATE, 0, at, size.to_bytes(4, "big")) for at in (0, 1))
    theirs.send(room)
    assert step(made.receive(soon())) == []
    yield made, theirs
    made.cancel()
    theirs.close()


def test_the_receiver_learns_that_a_send_failed(stream: tuple[EtcdStream, socket.socket]) -> None:
    made, _ = stream
    step(made.send(bytes(10_000_000), soon(0.05)))
    assert step(RUNTIME.readable(made.link, soon())), "it is called to look"
    assert step(made.receive(soon())) == [] and made.over


def test_bytes_appended_as_a_sender_ends_are_sent() -> None:
    """Another sender appends when the first has just found nothing more to send, and leaves its bytes to the first."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    made = EtcdConnection(ours, "here", RUNTIME, 0).stream("/a/b", RUNTIME)
    blocked, late = made._blocked, [b"second"]

    def racing() -> bool:
        result = blocked()
        if late:
            step(made.send(late.pop(), soon()))
        return result

    made._blocked = racing  # type: ignore[method-assign]
    step(made.send(b"first", soon()))
    sent = theirs.recv(65_536)
    assert b"first" in sent and b"second" in sent
    made.cancel()
    theirs.close()


class Seeing(BlockingRuntime):
    """Remembers which file was waited for, as it was afterwards."""

    def __init__(self) -> None:
        self.files: list[int] = []

    async def writable(self, source: Readable, until: float) -> bool:
        ready = await super().writable(source, until)
        self.files.append(source.fileno())
        return ready


def test_a_stream_is_not_closed_under_who_waits_to_send(stream: tuple[EtcdStream, socket.socket]) -> None:
    """Or it would wait for another connection's file, which has got the same number."""
    made, _ = stream
    made._runtime = seeing = Seeing()
    sending = threading.Thread(target=lambda: step(made.send(bytes(10_000_000), soon(200.0))))
    sending.start()
    while not made._flushing:
        time.sleep(0.001)
    time.sleep(0.05)
    made.cancel()
    sending.join(90)
    assert not sending.is_alive() and made.link.fileno() == -1
    assert seeing.files and -1 not in seeing.files


def test_closing_calls_the_listener_back(etcd_server: EtcdServer) -> None:
    wire = EtcdWire(EtcdAddress(etcd_server.url()), RUNTIME)
    wakeups = EtcdWakeups(wire, RUNTIME)
    step(wakeups.watch("a" * 32, TARGET, soon()))
    heard: list[list[str]] = []
    listening = threading.Thread(target=lambda: heard.append(step(wakeups.next_wakeups(soon(200.0)))))
    listening.start()
    while not wakeups.listening:
        time.sleep(0.001)
    wakeups.interrupt()
    listening.join(90)
    assert heard == [[]]
    wakeups.close()
    assert step(wakeups.next_wakeups(soon())) == []
    wire.close()


# Calls.


@pytest.mark.xdist_group("etcd")
def test_a_connection_that_the_server_has_closed_is_not_used() -> None:
    """So no doubt comes of it, and the member is not left for it."""
    with EtcdServer() as server:
        wire = EtcdWire(EtcdAddress(server.url()), RUNTIME)
        read = messages.txn((), [messages.get(b"k")])
        step(wire.call(messages.TXN, read, soon()))
        server.restart()
        step(wire.call(messages.TXN, read, soon(), repeatable=False))
        server.stop()
        with pytest.raises(Unavailable):
            step(wire.call(messages.TXN, read, soon()))
        server.start()
        wire.close()

        async def again() -> None:
            runtime = AioRuntime()
            wire = EtcdWire(EtcdAddress(server.url()), runtime)
            await wire.call(messages.TXN, read, soon())
            server.stop()
            await asyncio.sleep(0.05)
            with pytest.raises(Unavailable):
                await wire.call(messages.TXN, read, soon())
            wire.close()
            runtime.close()

        asyncio.run(again())


def test_a_client_belongs_to_one_event_loop(etcd_url: str) -> None:
    runtime = AioRuntime()
    authority = EtcdAuthority.at(etcd_url, runtime, secrets.token_hex(8))
    asyncio.run(_opened(authority))
    with pytest.raises(Misuse, match="event loop"):
        asyncio.run(_opened(authority))
    asyncio.run(authority.close())
    runtime.close()


async def _opened(authority: EtcdAuthority) -> None:
    await authority.open()


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_host_that_cannot_be_is_unavailable(host: str) -> None:
    with pytest.raises(Unavailable):
        step(EtcdWire(EtcdAddress(f"etcd://{host}"), RUNTIME).call(messages.TXN, b"", soon()))


def test_an_answer_that_cannot_be_read_says_nothing_of_the_request() -> None:
    assert issubclass(protobuf.MalformedMessage, Indeterminate)
    with pytest.raises(FencedError):
        messages.TxnReply(b"")
    assert messages.text_of(protobuf.data(2, b"\xff"), 2) == "\N{REPLACEMENT CHARACTER}"


def test_more_callers_than_connections(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenced.stores.etcd.wire.cluster.CONNECTIONS_MAX", 2)
    authority = EtcdAuthority.at(etcd_url, RUNTIME, secrets.token_hex(8))
    step(authority.open())
    tokens: list[int] = []

    def ask(number: int) -> None:
        tokens.append(step(granted(authority, asking(RUNTIME, f"orders/{number}"))).token)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(tokens)) == 12
    assert len(authority._wire._pool._idle) <= 2
    step(authority.close())
