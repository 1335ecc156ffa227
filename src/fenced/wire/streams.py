"""Sockets to a server, in either colour: they never block, and the runtime waits for them until a deadline."""

from __future__ import annotations

import asyncio
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

from fenced.contracts import Runtime
from fenced.errors import Misuse
from fenced.runtime.aio import OTHER_LOOP, SLICE_SECONDS

AddressInfo = Any
"""What getaddrinfo says of an address: family, kind, protocol, name, and where."""

READ_BYTES = 65_536
UNREQUESTED_BYTES_MAX = 2**24
"""A server that sends more than this without a request is not one that we support; its connection is closed."""
FULL_BACKLOG_RETRY_SECONDS = 0.01
_LATE = "no answer in time"
_CLOSED = "the server closed the connection"
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Errors of a non-blocking socket that would have to wait."""


class Late(OSError):
    """The deadline passed before the socket was ready."""

    def __init__(self, text: str = _LATE) -> None:
        super().__init__(text)


async def connect(
    host: str, port: int, runtime: Runtime, until: float, context: ssl.SSLContext | None = None
) -> socket.socket:
    """A connected socket, of which the other end is who the context says. OSError (also of TLS) if there is none."""
    link = await _reached(host, port, runtime, until)
    if context is None:
        return link
    try:
        link = context.wrap_socket(link, server_hostname=host, do_handshake_on_connect=False)
        await _shake_hands(link, runtime, until)
    except BaseException:
        link.close()
        raise
    return link


async def _shake_hands(link: ssl.SSLSocket, runtime: Runtime, until: float) -> None:
    while True:
        try:
            return link.do_handshake()
        except ssl.SSLWantReadError:
            await _ready(runtime.readable(link, until))
        except ssl.SSLWantWriteError:
            await _ready(runtime.writable(link, until))


async def _reached(host: str, port: int, runtime: Runtime, until: float) -> socket.socket:
    """A name may stand for several addresses: the first that answers is taken, and each gets its share of the time."""
    found = await resolved(host, port, runtime, until)
    while True:
        place = found.pop(0)
        share = (until - runtime.now()) / (len(found) + 1)
        try:
            return await _at(place, runtime, runtime.now() + share)
        except OSError:
            if not found:
                raise


async def _at(place: AddressInfo, runtime: Runtime, until: float) -> socket.socket:
    family, kind, protocol, _, address = place
    link = socket.socket(family, kind, protocol)
    try:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


async def connect_path(path: str, runtime: Runtime, until: float) -> socket.socket:
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


async def send(link: socket.socket, data: bytes, runtime: Runtime, until: float) -> None:
    while data:
        try:
            data = data[link.send(data) :]
        except ssl.SSLWantReadError:
            await _ready(runtime.readable(link, until))
        except (BlockingIOError, ssl.SSLWantWriteError):
            await _ready(runtime.writable(link, until))


async def receive(link: socket.socket, runtime: Runtime, until: float, count: int = READ_BYTES) -> bytes:
    """What comes next, at most `count` bytes; nothing if the other end has closed the connection."""
    wait = not isinstance(link, ssl.SSLSocket)  # which may have read more already than it gave
    while True:
        late = wait and not await runtime.readable(link, until)
        try:
            return link.recv(count)  # also after the deadline: bytes that arrived in time count
        except (BlockingIOError, ssl.SSLWantReadError):
            if late:
                raise Late from None
            wait = True
        except ssl.SSLWantWriteError:
            await _ready(runtime.writable(link, until))


async def _ready(waiting: Awaitable[bool]) -> None:
    if not await waiting:
        raise Late


class SocketStream:
    """A connected socket; not safe for concurrent use."""

    def __init__(self, link: socket.socket, runtime: Runtime) -> None:
        self.link = link
        self._runtime = runtime

    async def send(self, data: bytes, until: float) -> None:
        try:
            sent = self.link.send(data)
        except NOT_NOW:
            sent = 0
        if sent < len(data):
            await send(self.link, data[sent:], self._runtime, until)

    async def receive(self, until: float) -> bytes:
        """What comes next. OSError: nothing in time, or nothing any more."""
        data = await receive(self.link, self._runtime, until)
        if not data:
            raise OSError(_CLOSED)
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
            raise OSError(_CLOSED)
        raise OSError(f"the server sent more than {UNREQUESTED_BYTES_MAX} bytes without a request")

    def detach(self) -> bytes:
        """Detach from the loop and return bytes that were read but not consumed."""
        return b""

    def interrupt(self) -> None:
        """Shut the socket down, so that a thread that waits for it wakes and finds it closed. Safe from any thread."""
        with contextlib.suppress(OSError):
            # The plain socket's shutdown: TLS state belongs to the thread that uses the connection.
            socket.socket.shutdown(self.link, socket.SHUT_RDWR)

    def close(self) -> None:
        self.link.close()


class LoopSocketStream(SocketStream):
    """The event loop reads whenever something comes: to add and remove a reader for each wait costs more."""

    def __init__(self, link: socket.socket, runtime: Runtime) -> None:
        super().__init__(link, runtime)
        self._data = b""
        self._over = ""
        self._detached = False
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(link, self._read)

    def _read(self) -> None:
        try:
            data = self.link.recv(READ_BYTES)
            self._data += data
            if not data:
                self._end(_CLOSED)
            elif isinstance(self.link, ssl.SSLSocket) and self.link.pending():
                # TLS has already read these bytes from the socket, so the loop's selector does not report them.
                self._loop.call_soon(self._read_pending)
        except NOT_NOW:
            return
        except OSError as error:
            self._end(str(error) or type(error).__name__)
        finally:
            if self._data or self._over:
                self._wake()

    def _read_pending(self) -> None:
        """In its own turn of the loop: a server that never stops sending must not starve the loop's other tasks."""
        if self.link.fileno() >= 0 and not self._over and not self._detached:
            self._read()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ring(self) -> None:
        self._alarm = None
        self._wake()

    def _wake_in(self, seconds: float) -> None:
        """An alarm that rings early enough is left as it is: most calls are over long before, and need no new one."""
        if self._alarm is not None:
            if self._alarm.when() <= self._loop.time() + seconds:
                return
            self._alarm.cancel()
        self._alarm = self._loop.call_later(min(seconds, SLICE_SECONDS), self._ring)

    def _end(self, why: str) -> None:
        self._over = why
        self._loop.remove_reader(self.link)

    def read_available(self) -> bytes:
        if self._over:
            raise OSError(self._over)
        data, self._data = self._data, b""
        return data

    async def send(self, data: bytes, until: float) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise Misuse(OTHER_LOOP)
        await super().send(data, until)

    async def receive(self, until: float) -> bytes:
        while not self._data:
            if self._over:
                raise OSError(self._over)
            left = until - self._runtime.now()
            if left <= 0:
                self._read()  # bytes that arrived in time count, however late the loop runs this
                if not self._data and not self._over:
                    raise Late
                continue
            self._wake_in(left)
            self._waiter = self._loop.create_future()
            await self._waiter
        data, self._data = self._data, b""
        return data

    def detach(self) -> bytes:
        self._detached = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self.link)
        if self._alarm is not None:
            self._alarm.cancel()
        data, self._data = self._data, b""
        return data

    def close(self) -> None:
        if self.link.fileno() < 0:
            return
        if not self._loop_runs_in_another_thread():
            self.detach()
            super().close()
            return
        # A finalizer may run in any thread, but only the loop's thread may use its selector: that thread closes it.
        self.interrupt()
        with contextlib.suppress(RuntimeError):  # the loop was closed just now
            self._loop.call_soon_threadsafe(self.close)

    def _loop_runs_in_another_thread(self) -> bool:
        try:
            return asyncio.get_running_loop() is not self._loop and self._loop.is_running()
        except RuntimeError:
            return self._loop.is_running()


def line(link: socket.socket, runtime: Runtime) -> SocketStream:
    return LoopSocketStream(link, runtime) if runtime.colour == "asyncio" else SocketStream(link, runtime)


class WakeableSelector:
    """A selector whose `wait` can be interrupted: `wake` wakes it, from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ear, self._button = socket.socketpair()
        for end in (self._ear, self._button):
            end.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ, None)

    def add(self, link: socket.socket, owner: object) -> None:
        self._selector.register(link, selectors.EVENT_READ, owner)

    def remove(self, link: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(link)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._button.send(b"!")

    async def wait(self, runtime: Runtime, until: float) -> list[object] | None:
        """The owners of sockets that can be read, none if it rang; None at the end of the time.

        OSError or ValueError: it is closed.
        """
        if not await runtime.readable(self._selector, until):
            return None
        ready = [key.data for key, _ in self._selector.select(0)]
        if None in ready:
            with contextlib.suppress(OSError):
                self._ear.recv(READ_BYTES)
        return [owner for owner in ready if owner is not None]

    def close(self) -> None:
        self._selector.close()
        self._ear.close()
        self._button.close()
