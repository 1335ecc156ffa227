"""One connection to the server, in either colour: bytes out, one reply in, never later than a deadline.

redis-py connects, with all that its addresses can say: TLS, users, databases. From there on we use its socket
ourselves, which is quicker than its own way to send and to read, and nothing is repeated or probed behind our back.
Whether a request may be sent again is the pool's question.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from typing import Any, Protocol

import redis
import redis.asyncio.connection as aio
from redis.exceptions import RedisError

from fenced.authorities.redis.address import Address
from fenced.authorities.redis.replies import connect_failed
from fenced.authorities.redis.resp import Incomplete, parse
from fenced.contracts import Runtime
from fenced.errors import Misuse
from fenced.runtime.pool import Broken

SECONDS_MIN = 0.001
TOLERANCE_SECONDS = 0.02
"""How much later than its deadline a blocking request may end, so that most need no new alarm."""

READ_BYTES = 65_536

BLOCKING = {
    "redis": redis.Connection,
    "rediss": redis.SSLConnection,
    "unix": redis.UnixDomainSocketConnection,
}
ASYNCIO = {
    "redis": aio.Connection,
    "rediss": aio.SSLConnection,
    "unix": aio.UnixDomainSocketConnection,
}


class Wire(Protocol):
    """Takes one request at a time. One that lost its connection connects anew before the next request."""

    async def connect(self, until: float) -> None:
        """Unavailable or Misconfigured when that fails; nothing was asked then."""

    async def exchange(self, request: bytes, until: float) -> Any:
        """The reply; a refusal of the server is an ErrorReply. Broken: the request may have been carried out."""

    async def heard(self, until: float) -> Any:
        """What the server says by itself, or None when it says nothing until then."""

    def close(self) -> None: ...

    def interrupt(self) -> None:
        """Let a `heard` that is under way end. May be called from another thread."""


def new_wire(address: Address, runtime: Runtime) -> Wire:
    kind = BlockingWire if runtime.colour == "blocking" else AsyncioWire
    try:
        return kind(address, runtime)
    except (TypeError, ValueError, RedisError) as error:
        raise Misuse(f"{address.url}: redis-py does not take these options: {error}") from error


class BlockingWire:
    """For the threads of a blocking client; one at a time uses it."""

    def __init__(self, address: Address, runtime: Runtime) -> None:
        self._where = address.url
        self._now = runtime.now
        self._link: Any = BLOCKING[address.scheme](**address.options, protocol=2)
        self._allowed = 0.0
        self._said = b""

    def _left(self, until: float) -> float:
        return max(until - self._now(), SECONDS_MIN)

    async def connect(self, until: float) -> None:
        link = self._link
        link.socket_timeout = link.socket_connect_timeout = self._left(until)
        try:
            link.connect()
        except (RedisError, OSError) as error:
            raise connect_failed(error, self._where) from error
        self._allowed = 0.0

    def _allow(self, sock: socket.socket, left: float) -> None:
        """Let the kernel keep the deadline: Python would poll before each call. TLS has to be kept by Python."""
        if isinstance(sock, ssl.SSLSocket):
            sock.settimeout(left)
        elif not self._allowed - TOLERANCE_SECONDS <= left <= self._allowed:
            self._allowed = left + TOLERANCE_SECONDS / 2
            timeval = struct.pack("ll", int(self._allowed), int(self._allowed % 1 * 1e6))
            sock.settimeout(None)
            for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, way, timeval)

    async def exchange(self, request: bytes, until: float) -> Any:
        if self._link._sock is None:
            await self.connect(until)
        try:
            sock = self._link._sock
            self._allow(sock, self._left(until))
            sock.sendall(request)
            data = sock.recv(READ_BYTES)
            while data:
                try:
                    return parse(data, 0)[0]
                except Incomplete:
                    more = sock.recv(READ_BYTES)
                    data = data + more if more else b""
        except (OSError, AttributeError, ValueError) as error:  # closed meanwhile, or another protocol
            raise Broken(f"{self._where}: {error}") from error
        raise Broken(f"{self._where} closed the connection")

    async def heard(self, until: float) -> Any:
        try:
            sock = self._link._sock
            while True:
                with contextlib.suppress(Incomplete):
                    message, end = parse(self._said, 0)
                    self._said = self._said[end:]
                    return message
                sock.settimeout(self._left(until))
                data = sock.recv(READ_BYTES)
                if not data:
                    break
                self._said += data
        except TimeoutError:
            return None
        except (OSError, AttributeError) as error:
            raise Broken(f"{self._where}: {error}") from error
        raise Broken(f"{self._where} closed the connection")

    def close(self) -> None:
        self._link.disconnect()

    def interrupt(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self._link._sock.shutdown(socket.SHUT_RDWR)


class _Inbox(asyncio.Protocol):
    """What has arrived on a connection, for the one task that waits for it; quicker than a stream."""

    def __init__(self) -> None:
        self.data = b""
        self.lost = False
        self._waiter: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def more(self) -> None:
        """Wait until something has arrived, or nothing will any more."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class AsyncioWire:
    """For the tasks of one event loop; one at a time uses it."""

    def __init__(self, address: Address, runtime: Runtime) -> None:
        self._where = address.url
        self._now = runtime.now
        self._link: Any = ASYNCIO[address.scheme](**address.options, protocol=2)
        self._inbox = _Inbox()
        self._transport: Any = None

    def _left(self, until: float) -> float:
        return max(until - self._now(), SECONDS_MIN)

    async def connect(self, until: float) -> None:
        link = self._link
        link.socket_timeout = link.socket_connect_timeout = self._left(until)
        try:
            await link.connect()
        except (RedisError, OSError) as error:
            self.close()
            raise connect_failed(error, self._where) from error
        except BaseException:
            self.close()
            raise
        self._inbox, self._transport = _Inbox(), link._writer.transport
        self._transport.set_protocol(self._inbox)

    async def exchange(self, request: bytes, until: float) -> Any:
        if self._inbox.lost:  # while nobody used it; nothing is asked yet
            self.close()
        if self._transport is None:
            await self.connect(until)
        inbox = self._inbox
        alarm = asyncio.get_running_loop().call_later(self._left(until), self._transport.abort)
        try:
            inbox.data = b""
            self._transport.write(request)
            while not inbox.lost:
                await inbox.more()
                with contextlib.suppress(Incomplete):
                    return parse(inbox.data, 0)[0]
        except ValueError as error:  # not the protocol
            raise Broken(f"{self._where}: {error}") from error
        finally:
            alarm.cancel()
        raise Broken(f"{self._where} closed the connection, or did not answer in time")

    async def heard(self, until: float) -> Any:
        inbox = self._inbox
        try:
            async with asyncio.timeout(self._left(until)):
                while not inbox.lost:
                    with contextlib.suppress(Incomplete):
                        message, end = parse(inbox.data, 0)
                        inbox.data = inbox.data[end:]
                        return message
                    await inbox.more()
        except TimeoutError:
            return None
        raise Broken(f"{self._where} closed the connection")

    def close(self) -> None:
        writer = self._link._writer
        self._link._reader = self._link._writer = self._transport = None
        if writer is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the connection with it
                writer.transport.abort()  # at once: a farewell in TLS would need the loop for longer

    def interrupt(self) -> None:
        self.close()
