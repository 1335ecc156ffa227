"""The connections of a server: requests are read, and answered one after the other.

The transport is asyncio's, or one with the same few methods in a simulated world.
"""

from __future__ import annotations

import asyncio
import math
import os
from typing import TYPE_CHECKING, cast

from fenced.http1.bodies import Data, after
from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import HEAD_END, HEADERS_MAX, NO_HEAD, BadMessage, RequestHead

if TYPE_CHECKING:
    from fenced.http1.server import HttpServer

PARTS_MAX = 1000
"""The system takes 1,024 parts in one call."""
TOO_LONG = "the head of the request is too long"
NOTHING = RequestHead(b"", b"", 0, b"", keep=False)


class DirectConnection(asyncio.Protocol):
    """A connection that writes to its socket directly as long as the transport has nothing to write.

    That saves a turn of the event loop, and a copy of what is written.
    """

    def __init__(self) -> None:
        self._transport = cast(asyncio.Transport, None)
        self._socket = -1
        """Its number; -1 with TLS and in simulated worlds, where only the transport can write."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sslcontext") is None:
            found = transport.get_extra_info("socket")
            self._socket = -1 if found is None else found.fileno()

    def write_whole(self, data: bytes) -> None:
        """The same for one part: nearly all replies are written by this."""
        transport = self._transport
        if self._socket < 0 or transport.is_closing() or transport.get_write_buffer_size():
            self.write([data])
            return
        try:
            sent = os.write(self._socket, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            transport.abort()
            return
        if sent < len(data):
            transport.write(data[sent:])

    def write(self, parts: list[Data]) -> None:
        """Write the parts one after the other, or nothing if the connection is closing."""
        transport = self._transport
        # The transport closes its socket some time after it is closing: until then the number is not another socket's.
        if transport.is_closing():
            return
        # Nothing may overtake what the transport has not written yet.
        if self._socket < 0 or len(parts) > PARTS_MAX or transport.get_write_buffer_size():
            transport.writelines(parts)
            return
        try:
            sent = os.writev(self._socket, parts)
        except BlockingIOError:
            sent = 0
        except OSError:
            transport.abort()
            return
        for part in parts:
            if sent < len(part):
                transport.write(part[sent:])
                sent = 0
            else:
                sent -= len(part)


class ServerConnection(DirectConnection):
    """One connection of a client."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__()
        self.server = server
        self.peer: str | None = None
        self.until = math.inf
        """The sweep at which its time is over."""
        self.request_until = math.inf
        """The one at which a request must have come that is read as a whole."""
        self._exchange: ServerExchange | None = None
        self._rest = b""
        """What was received and not read yet: a part of a head, or what follows the request that is not answered."""
        self._searched = 0
        """How much of it was searched for the end of a head."""
        self._why_paused: set[str] = set()
        self._surplus = False
        self._stuck = False
        """The client does not take what was written."""
        self._closing = False
        """Nothing is read as a request any more."""
        self._half_closed = False
        """The client sends nothing more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server = self.server
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else None
        self._heads = server.heads[self.peer is None]
        server.connections[self] = None
        beyond = len(server.connections) - server.limits.connections
        if beyond > server.limits.refused:
            transport.abort()  # type: ignore[attr-defined]
        # Answered after its request has arrived: closed before, the client might not get the answer.
        self._surplus = beyond > 0
        self.until = server.ticks.now + (server.ticks.request if self._surplus else server.ticks.idle)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if self._closing:
            return  # a body that nobody reads
        if exchange is None:
            self._read_head(data)
        elif exchange.received_all:
            # The next request, before this one is answered. It is not read until then, so answers keep their order; and
            # the client cannot fill our memory with more of them.
            self._rest += data
            self.pause("pipeline")
        else:
            self._read_body(exchange, data)

    def _read_head(self, data: bytes) -> None:
        seen, limits = self._searched, self.server.limits
        if self._rest:
            data, self._rest, self._searched = self._rest + data, b"", 0
        if not seen and data[0] in b"\r\n":  # after a body some clients send a line too many
            data = data.lstrip(b"\r\n")
            if not data:
                return
        # Of a head that comes in many pieces only the last one is searched.
        end = data.find(HEAD_END, seen - 3 if seen > 3 else 0)
        size = end + 4
        try:
            if (len(data) if end < 0 else size) > limits.head_bytes:
                raise BadMessage(431, TOO_LONG)
            if end < 0:
                self._unfinished(data, seen)
                return
            head = self._heads.read(data[:size])
            if len(data) == size + head.length:  # nearly always: this request, and nothing else
                exchange = ServerExchange(self, head, data[size:])
            else:
                exchange = self._begun(head, after(data, size))
            if self._surplus:
                raise BadMessage(503, "too many connections")
        except BadMessage as error:
            self._refuse(error)
            return
        if not exchange.received_all:
            self.request_until = self.until if seen else self.server.ticks.now + self.server.ticks.request
        self.until = math.inf
        # Set before the handler is called, which may answer at once: `answered` goes on only with this exchange.
        self._exchange = exchange
        self.server.handler.begin(exchange)

    def _begun(self, head: RequestHead, data: Data) -> ServerExchange:
        """A request of whose body a part has come, or behind which something else has."""
        exchange = ServerExchange(self, head, None if head.length else b"")
        rest = exchange.receive(data) if head.length else data
        if rest:
            self._keep_for_later(rest)
        return exchange

    def _unfinished(self, data: bytes, seen: int) -> None:
        """Wait for the rest of a head, unless this cannot become one."""
        if NO_HEAD.search(data, max(0, seen - 1)):
            raise BadMessage(400, "not a request of HTTP/1.1")
        if data.count(b"\n") > HEADERS_MAX + 1:
            raise BadMessage(431, TOO_LONG)
        if self._half_closed:
            self._end()
            return
        self._rest, self._searched = data, len(data)
        if not seen:
            self.until = self.server.ticks.now + self.server.ticks.request

    def _keep_for_later(self, rest: Data) -> None:
        """What follows the request is read when that is answered."""
        self._rest = bytes(rest)
        self.pause("pipeline")

    def _read_body(self, exchange: ServerExchange, data: Data) -> None:
        try:
            rest = exchange.receive(data)
        except BadMessage as error:
            exchange.fail(error)
            return
        if rest:
            self._keep_for_later(rest)
        if rest is not None:
            self.until = math.inf
        elif exchange.is_streamed:
            self.await_body()
        exchange.deliver()
        if exchange.done and exchange.received_all:
            self._go_on(exchange)

    def await_body(self, until: float = math.inf) -> None:
        """The rest of the body has some time to come."""
        self.until = min(self.server.ticks.now + self.server.ticks.body, until)

    def _refuse(self, error: BadMessage) -> None:
        """Answer what cannot be read, and read nothing more."""
        # Where the request ends is unknown. What follows may be a part of it that looks like a request of its own.
        self._closing = True
        self._exchange = exchange = ServerExchange(self, NOTHING, b"")
        exchange.reply(*self.server.handler.refusal(error))

    def _read_on(self) -> None:
        # In between more may have come, which has begun the next request already, or the connection may have ended.
        if self._exchange is None and not self._closing and self._rest:
            self._read_head(b"")

    # The end of an exchange, and of the connection

    def answered(self, exchange: ServerExchange) -> None:
        """The exchange is over: close, or go on with the next request."""
        if self._exchange is exchange:
            self.server.answered += 1
            if exchange.keep and not exchange.received_all:
                self.await_body()  # which nobody reads
            else:
                self._go_on(exchange)

    def _go_on(self, exchange: ServerExchange) -> None:
        if self._exchange is not exchange:
            return
        self._exchange = None
        server = self.server
        if not exchange.keep or (self._half_closed and not self._rest):
            self._end()
            return
        self.until = server.ticks.now + server.ticks.idle
        if self._why_paused:
            self._resume_all()
        if self._rest:
            asyncio.get_running_loop().call_soon(self._read_on)  # not deeper in this stack

    def _end(self) -> None:
        """Close once everything was written. What the client still sends is read for a while: a reset would reach it
        before our answer."""
        self._closing = True
        self.until = self.server.ticks.now + self.server.ticks.linger
        self._resume_all()
        if self._transport.can_write_eof() and not self._transport.is_closing() and not self._half_closed:
            self._transport.write_eof()
        else:
            self._transport.close()

    def eof_received(self) -> bool:
        exchange = self._exchange
        if self._closing or exchange is None or not exchange.received_all or not self.server.limits.half_open:
            return False
        self._half_closed = True
        return self._transport.can_write_eof()  # it still waits for its answers

    def connection_lost(self, error: Exception | None) -> None:
        self.server.connections.pop(self, None)
        self._closing = True
        # Taken out first: whatever the handler still does with it concerns no request of this connection.
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.is_gone()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def is_busy(self) -> bool:
        """Whether the client still gets something."""
        return (
            self._exchange is not None and not self._exchange.done
        ) or self._transport.get_write_buffer_size() > 0

    def close_if_idle(self) -> None:
        """The server stops. A head of which a part has come may still become a request."""
        answered = self._exchange is None or self._exchange.done
        if answered and not self._rest and not self._closing:
            self._transport.close()

    def is_late(self) -> None:
        """Its time is over."""
        if self._stuck or self._closing or (self._exchange is not None and self._exchange.done):
            self._transport.abort()  # part of an answer was sent, or the client does not notice the end
        elif self._exchange is not None:
            if self._why_paused:
                self.await_body()  # we do not read, so it cannot send
            else:
                self._exchange.fail(BadMessage(408, "the body did not arrive in time"))
        elif self._rest:
            self._refuse(BadMessage(408, "the request was not complete in time"))
        else:
            self._transport.close()

    # Back-pressure

    def pause(self, why: str) -> None:
        # Each has a reason of its own, so nobody goes on reading while somebody else has paused it.
        if not self._why_paused:
            self._transport.pause_reading()
        self._why_paused.add(why)

    def resume(self, why: str) -> None:
        if why in self._why_paused:
            self._why_paused.remove(why)
            if not self._why_paused and not self._transport.is_closing():
                self._transport.resume_reading()

    def _resume_all(self) -> None:
        for reason in list(self._why_paused):
            self.resume(reason)

    def pause_writing(self) -> None:
        self._stuck = True
        self.until = self.server.ticks.now + self.server.ticks.request
        if self._exchange is not None and self._exchange.on_pressure is not None:
            self._exchange.on_pressure(True)

    def resume_writing(self) -> None:
        self._stuck = False
        ticks, exchange = self.server.ticks, self._exchange
        if exchange is not None:
            self.until = math.inf if exchange.received_all else ticks.now + ticks.body
            if exchange.on_pressure is not None:
                exchange.on_pressure(False)
        else:
            self.until = ticks.now + (ticks.linger if self._closing else ticks.idle)
