"""Peers that never stop, or send what no server sends: each call ends with a typed error, soon and in bounded memory.

A hostile peer sends for as long as it is read. In the middle of it the clock of the client passes the deadline. Then
the client reads at most once more, which counts what arrived in time, and gives up.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from fenced.client import registry
from fenced.errors import Indeterminate, Misconfigured, Unavailable
from fenced.http1.heads import BadMessage
from fenced.http1.responses import ResponseReader
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.sockets import READ_BYTES
from fenced.stores.etcd.wire import http2
from fenced.stores.redis.wire import resp
from fenced.stores.service.wire import connection as service
from fenced.stores.zookeeper.wire import connection as zookeeper
from fenced.stores.zookeeper.wire import jute
from fenced.testing import COLOURS
from fenced.values.contracts import Colour, Endpoint, Runtime, SocketLike
from tests.shifted import Shifted

BUFFER = 2**16
"""Of each socket. The kernel may double it."""
PASSES_AFTER = 2**18
"""How many bytes are sent until the deadline passes."""
MEGABYTE = 2**20


class CountingLink:
    """A socket that counts the bytes that are read after the deadline."""

    def __init__(self, link: Any, runtime: CountingRuntime) -> None:
        self._link, self._runtime = link, runtime
        self.send, self.close, self.fileno, self.shutdown = link.send, link.close, link.fileno, link.shutdown

    def recv(self, count: int) -> bytes:
        late = self._runtime.now() >= self._runtime.deadline
        data: bytes = self._link.recv(count)
        self._runtime.read_late += late * len(data)
        return data


class CountingRuntime(Shifted):
    deadline = float("inf")
    read_late = 0

    async def connect(
        self, endpoint: Endpoint, until: float, context: ssl.SSLContext | None = None
    ) -> SocketLike:
        return CountingLink(await super().connect(endpoint, until, context), self)


class HostilePeer:
    """Answers every connection by the same bytes, without an end, after the first request."""

    def __init__(self, sends: Callable[[], Iterable[bytes]], passes_after: int = PASSES_AFTER) -> None:
        self._sends = sends
        self._passes_after = passes_after
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self.port = self._listening.getsockname()[1]
        self.sent = 0
        self.runtime: CountingRuntime | None = None
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                link, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(link,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, link: socket.socket) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        link.settimeout(0.2)
        try:
            with link:
                link.recv(BUFFER)
                for data in self._sends():
                    self._send(link, data)
        except OSError:
            return  # the client has given up

    def _send(self, link: socket.socket, data: bytes) -> None:
        while data:
            if self._closed.is_set():
                raise OSError
            try:
                count = link.send(data)
            except TimeoutError:
                continue
            data = data[count:]
            self.sent += count
            if self.sent > self._passes_after and self.runtime is not None:
                self.runtime.ahead = 1000.0

    def close(self) -> None:
        self._closed.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        self._listening.close()
        for thread in self._threads:
            thread.join(60.0)


def endless(first: bytes, again: bytes) -> Callable[[], Iterator[bytes]]:
    """Then the same piece again and again, many at once."""
    return lambda: itertools.chain([first], itertools.repeat(again * (BUFFER // len(again) + 1)))


def trickling(first: bytes) -> Callable[[], Iterator[bytes]]:
    """Then one byte after the other."""
    return lambda: itertools.chain([first], itertools.repeat(b"x"))


# What each protocol's hostile peer sends.


def grpc_data(payload: bytes) -> bytes:
    return http2.frame(http2.DATA, 0, 1, payload)


SETTINGS = http2.frame(http2.SETTINGS, 0, 0, b"")
ZOOKEEPER_HELLO = jute.frame(struct.pack(">iiq", 0, 30_000, 7) + struct.pack(">i", 16) + b"p" * 16)
ZOOKEEPER_EVENT = jute.frame(struct.pack(">iqi", -1, 0, 0) + struct.pack(">iii", 3, 3, 2) + b"/x")
HTTP_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"

ENDLESS: dict[str, tuple[str, Callable[[], Iterable[bytes]], int]] = {
    "redis: an array without an end": ("redis", endless(b"*536870912\r\n", b":1\r\n"), resp.REPLY_BYTES_MAX),
    "redis: a value without an end": ("redis", endless(b"$536870912\r\n", b"x" * 1000), resp.REPLY_BYTES_MAX),
    "etcd: a message without an end": (
        "etcd",
        endless(SETTINGS + grpc_data(struct.pack(">BI", 0, 2**26)), grpc_data(b"x" * 16_000)),
        http2.CALL_BYTES_MAX,
    ),
    "etcd: messages without an end": ("etcd", endless(SETTINGS, grpc_data(bytes(5))), http2.CALL_BYTES_MAX),
    "etcd: pings without an end": (
        "etcd",
        endless(SETTINGS, http2.frame(http2.PING, 0, 0, b"12345678")),
        MEGABYTE,
    ),
    "zookeeper: events without an end": (
        "zookeeper",
        endless(ZOOKEEPER_HELLO, ZOOKEEPER_EVENT),
        32 * MEGABYTE,
    ),
    "zookeeper: a frame without an end": (
        "zookeeper",
        endless(ZOOKEEPER_HELLO + struct.pack(">i", 60 * MEGABYTE), b"x" * 1000),
        64 * MEGABYTE,
    ),
    "service: interim answers without an end": (
        "http",
        endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        MEGABYTE,
    ),
    "service: a body without an end": (
        "http",
        endless(HTTP_HEAD + b"transfer-encoding: chunked\r\n\r\n", b"3e8\r\n" + b"x" * 1000 + b"\r\n"),
        service.REPLY_BYTES_MAX,
    ),
    "service: a head without an end": ("http", endless(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"), MEGABYTE),
}
TRICKLING: dict[str, tuple[str, Callable[[], Iterable[bytes]]]] = {
    "redis: a line": ("redis", trickling(b"+")),
    "redis: a value": ("redis", trickling(b"$1000000\r\n")),
    "etcd: a frame": ("etcd", trickling(SETTINGS + grpc_data(bytes(5))[:9])),
    "zookeeper: a handshake": ("zookeeper", trickling(struct.pack(">i", 60_000))),
    "zookeeper: a frame": ("zookeeper", trickling(ZOOKEEPER_HELLO + struct.pack(">i", MEGABYTE))),
    "service: a head": ("http", trickling(b"HTTP/1.1 200 OK\r\na: ")),
    "service: a body": ("http", trickling(HTTP_HEAD + b"content-length: 1000000\r\n\r\n")),
}
WRONG: dict[str, tuple[str, Callable[[], Iterable[bytes]]]] = {
    "redis: nested without an end": ("redis", lambda: [b"*1\r\n" * 100_000]),
    "redis: another protocol": ("redis", lambda: [b"HTTP/1.1 400 Bad Request\r\n\r\n"]),
    "etcd: another protocol": ("etcd", lambda: [b"HTTP/1.1 400 Bad Request\r\n\r\n"]),
    "zookeeper: another protocol": ("zookeeper", lambda: [b"HTTP/1.1 400 Bad Request\r\n\r\n"]),
    "service: nested without an end": (
        "http",
        lambda: [HTTP_HEAD + b"content-length: 200000\r\n\r\n" + b"[" * 200_000],
    ),
    "service: another protocol": ("http", lambda: [b"-ERR unknown command\r\n"]),
}
ERRORS = (Unavailable, Indeterminate, Misconfigured)


def opened(scheme: str, peer: HostilePeer, runtime: Runtime) -> Any:
    return registry.authority(f"{scheme}://127.0.0.1:{peer.port}", runtime)


async def refused(authority: Any, runtime: CountingRuntime) -> BaseException | None:
    runtime.deadline = runtime.now() + 300.0
    try:
        await authority.open(until=runtime.deadline)
    except ERRORS as error:
        return error
    finally:
        authority.abandon()
    return None


def met(scheme: str, peer: HostilePeer, colour: Colour) -> BaseException | None:
    """The error of a client that opens an authority there."""
    if colour == "blocking":
        runtime = peer.runtime = CountingRuntime(BlockingRuntime())
        return step(refused(opened(scheme, peer, runtime), runtime))

    async def story() -> BaseException | None:
        runtime = peer.runtime = CountingRuntime(under := AioRuntime())
        try:
            return await refused(opened(scheme, peer, runtime), runtime)
        finally:
            under.close()

    return asyncio.run(story())


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("what", ENDLESS)
def test_a_peer_that_never_stops_is_given_up(what: str, colour: Colour) -> None:
    """At the first read after the deadline, or where a reply is longer than any."""
    scheme, sends, bound = ENDLESS[what]
    peer = HostilePeer(sends)
    tracemalloc.start()
    try:
        error = met(scheme, peer, colour)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        peer.close()
    assert error is not None
    assert peer.runtime is not None
    once = READ_BYTES * (zookeeper.READS_MAX if scheme == "zookeeper" else 1)
    # The clock may pass the deadline just before a read that had begun in time; then one more follows.
    assert peer.runtime.read_late <= 2 * once, f"{peer.runtime.read_late} bytes were read after the deadline"
    assert peak < 2 * bound + 4 * MEGABYTE, f"{peak} bytes of memory"


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("what", TRICKLING)
def test_a_peer_that_trickles_is_given_up(what: str, colour: Colour) -> None:
    scheme, sends = TRICKLING[what]
    peer = HostilePeer(sends, passes_after=200)
    try:
        error = met(scheme, peer, colour)
    finally:
        peer.close()
    assert error is not None and peer.runtime is not None
    assert peer.runtime.ahead, "it was given up before its deadline"


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("what", WRONG)
def test_a_peer_that_is_no_such_server(what: str, colour: Colour) -> None:
    scheme, sends = WRONG[what]
    peer = HostilePeer(sends)
    try:
        assert met(scheme, peer, colour) is not None
    finally:
        peer.close()


def test_heads_and_bodies_have_bounds() -> None:
    """Each codec says how much one reply may have, and refuses the first byte beyond it."""
    reader = resp.RespReader()
    reader.feed(b"*2000000\r\n" + b":1\r\n" * (resp.ELEMENTS_MAX + 1))
    with pytest.raises(resp.MalformedResp, match="elements"):
        reader.next()
    grpc = http2.GrpcConnection()
    grpc.begin(b"", [b""])
    with pytest.raises(http2.MalformedFrame, match="bytes of messages"):
        grpc.receive(grpc_data(struct.pack(">BI", 0, 2**31)))
    replies = ResponseReader(10)
    replies.expect("GET")
    replies.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n")
    with pytest.raises(BadMessage, match="more than 10 bytes"):
        replies.next()
