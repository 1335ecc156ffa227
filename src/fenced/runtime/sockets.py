"""Sockets that never block: a runtime waits for them until a deadline.

Both real runtimes connect, send and receive with this. `SocketStream` also runs over the links of a simulated network.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import ssl
import threading
from collections.abc import Awaitable
from typing import Any

from fenced.values.contracts import Endpoint, Runtime, SocketLike

AddressInfo = Any
"""One result of getaddrinfo: family, kind, protocol, canonical name, address."""

READ_BYTES = 65_536
UNREQUESTED_BYTES_MAX = 2**24
"""A server that sends more than this without a request is not one that we support; its connection is closed."""
UNREQUESTED = f"the server sent more than {UNREQUESTED_BYTES_MAX} bytes without a request"
KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""After 15 idle seconds a probe each 5; after three without an answer, or 30 seconds (in milliseconds) in which nothing
that was sent is acknowledged, the kernel ends the connection: a dead peer is detected within 30 seconds."""
FULL_BACKLOG_RETRY_SECONDS = 0.01
_LATE = "no answer in time"
CLOSED = "the server closed the connection"
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Errors of a non-blocking socket that would have to wait."""


class Late(OSError):
    """The deadline passed before the socket was ready."""

    def __init__(self, text: str = _LATE) -> None:
        super().__init__(text)


async def connect(
    endpoint: Endpoint, runtime: Runtime, until: float, context: ssl.SSLContext | None = None
) -> socket.socket:
    """A connected socket; with a context, one whose peer is verified by TLS. OSError (also from TLS) if that fails."""
    if isinstance(endpoint, str):
        return await _connect_path(endpoint, runtime, until)
    link = await _connect_host(*endpoint, runtime, until)
    if context is None:
        return link
    try:
        link = context.wrap_socket(link, server_hostname=endpoint[0], do_handshake_on_connect=False)
        await _shake_hands(link, runtime, until)
    except BaseException:
        link.close()
        raise
    return link


async def _shake_hands(link: ssl.SSLSocket, runtime: Runtime, until: float) -> None:
    while True:
        late = runtime.now() >= until
        try:
            return link.do_handshake()
        except ssl.SSLWantReadError:
            waiting = runtime.readable(link, until)
        except ssl.SSLWantWriteError:
            waiting = runtime.writable(link, until)
        await _ready(waiting)
        if late:
            raise Late  # although the peer still sends something


async def _connect_host(host: str, port: int, runtime: Runtime, until: float) -> socket.socket:
    """Connect to the first address of a name that answers. Each address gets an equal share of the time left."""
    found = await resolved(host, port, runtime, until)
    while True:
        place = found.pop(0)
        share = (until - runtime.now()) / (len(found) + 1)
        try:
            return await _connect_address(place, runtime, runtime.now() + share)
        except OSError:
            if not found:
                raise


async def _connect_address(place: AddressInfo, runtime: Runtime, until: float) -> socket.socket:
    family, kind, protocol, _, address = place
    link = socket.socket(family, kind, protocol)
    try:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(link)
        error = link.connect_ex(address)
        if error == errno.EINPROGRESS:
            await _ready(runtime.writable(link, until))
            error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
    except BaseException:
        link.close()
        raise
    return link


def _keep_alive(link: socket.socket) -> None:
    """Let the kernel probe an idle connection, so that middleboxes remember it and a dead peer is detected."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # systems without it use their own times
            link.setsockopt(socket.IPPROTO_TCP, option, value)


async def _connect_path(path: str, runtime: Runtime, until: float) -> socket.socket:
    """A socket that is connected to a Unix socket file."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.setblocking(False)
        while error := link.connect_ex(path):
            if error != errno.EAGAIN:
                raise OSError(error, os.strerror(error))
            if runtime.now() >= until:
                raise Late
            # The server's backlog is full. The kernel does not notify us when there is room, so retry soon.
            await runtime.wait(runtime.wakeup(), min(until, runtime.now() + FULL_BACKLOG_RETRY_SECONDS))
    except BaseException:
        link.close()
        raise
    return link


async def resolved(host: str, port: int, runtime: Runtime, until: float) -> list[AddressInfo]:
    """The addresses of a host.

    The system's resolver takes no deadline. Each look-up runs in its own thread, so one that hangs delays no other
    look-up. A thread that the caller no longer waits for ends when the resolver answers.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)  # an address needs no look-up
    answers: list[list[AddressInfo] | Exception] = []
    answered = runtime.wakeup()

    def ask() -> None:
        try:
            answers.append(socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.append(error)
        answered.set()  # after the append: the waiter reads the answer as soon as it sees the flag

    threading.Thread(target=ask, name="fenced-resolve", daemon=True).start()
    if not await runtime.wait(answered, until):
        raise Late(f"{host}: no address in time")
    if isinstance(answers[0], Exception):
        raise OSError(f"{host}: {answers[0]}") from answers[0]
    return answers[0]


async def send(link: SocketLike, data: bytes, runtime: Runtime, until: float) -> None:
    while data:
        try:
            data = data[link.send(data) :]
        except ssl.SSLWantReadError:
            await _ready(runtime.readable(link, until))
        except (BlockingIOError, ssl.SSLWantWriteError):
            await _ready(runtime.writable(link, until))


async def receive(link: SocketLike, runtime: Runtime, until: float, count: int = READ_BYTES) -> bytes:
    """The next bytes, at most `count`; none if the other end has closed the connection."""
    # TLS may have read bytes from the socket that it has not returned yet.
    wait = not isinstance(link, ssl.SSLSocket)
    while True:
        passed = runtime.now() >= until
        late = wait and not await runtime.readable(link, until)
        try:
            return link.recv(count)  # also after the deadline: bytes that arrived in time count
        except (BlockingIOError, ssl.SSLWantReadError):
            if late or passed:  # TLS may receive records without any data for ever
                raise Late from None
            wait = True
        except ssl.SSLWantWriteError:
            await _ready(runtime.writable(link, until))


def shut_down(link: SocketLike) -> None:
    """End a connection from any thread, and wake whoever waits for it. The descriptor stays open."""
    with contextlib.suppress(OSError):
        if isinstance(link, socket.socket):
            # The plain socket's shutdown: TLS state belongs to the thread that uses the connection.
            socket.socket.shutdown(link, socket.SHUT_RDWR)
        else:
            link.shutdown(socket.SHUT_RDWR)


async def _ready(waiting: Awaitable[bool]) -> None:
    if not await waiting:
        raise Late


class LateReads:
    """Lets a reader read once after its deadline: bytes that arrived in time count, however late it runs.

    A peer that never stops sending would otherwise keep it for ever: there is always something to read.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._passed: float | None = None

    def check(self, until: float) -> None:
        """Called before each read. Late: this reader has read after `until` already."""
        if self._runtime.now() >= until:
            if self._passed == until:
                raise Late
            self._passed = until


class SocketStream:
    """A connected socket; not safe for concurrent use."""

    def __init__(self, link: SocketLike, runtime: Runtime) -> None:
        self.link = link
        self._runtime = runtime
        self._late_reads = LateReads(runtime)

    async def send(self, data: bytes, until: float) -> None:
        try:
            sent = self.link.send(data)
        except NOT_NOW:
            sent = 0
        if sent < len(data):
            await send(self.link, data[sent:], self._runtime, until)

    async def receive(self, until: float) -> bytes:
        """The next bytes. OSError: none came in time, or the connection has ended."""
        self._late_reads.check(until)
        data = await receive(self.link, self._runtime, until)
        if not data:
            raise OSError(CLOSED)
        return data

    def read_available(self) -> bytes:
        """The bytes that arrived while nobody waited. OSError: the connection has ended."""
        data = b""
        try:
            while len(data) < UNREQUESTED_BYTES_MAX and (more := self.link.recv(READ_BYTES)):
                data += more
        except NOT_NOW:
            return data
        if len(data) < UNREQUESTED_BYTES_MAX:
            raise OSError(CLOSED)
        raise OSError(UNREQUESTED)

    def detach(self) -> bytes:
        """Detach from the loop and return bytes that were read but not consumed."""
        return b""

    def interrupt(self) -> None:
        """Shut the socket down, and wake a thread that waits for it. Safe from any thread."""
        shut_down(self.link)

    def close(self) -> None:
        self.link.close()


class SocketSelector:
    """Waits for several sockets at once; `wake` interrupts `wait`, from any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def add(self, link: SocketLike, owner: object) -> None:
        self._selector.register(link, selectors.EVENT_READ, owner)

    def remove(self, link: SocketLike) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(link)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    async def wait(self, until: float) -> list[object] | None:
        if not await self._runtime.readable(self._selector, until):
            return None
        ready = [key.data for key, _ in self._selector.select(0)]
        if None in ready:
            with contextlib.suppress(OSError):
                self._woken.recv(READ_BYTES)
        return [owner for owner in ready if owner is not None]

    def close(self) -> None:
        self._selector.close()
        self._woken.close()
        self._waker.close()
