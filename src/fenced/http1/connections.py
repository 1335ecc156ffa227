"""The connections of a server: requests are read, and answered one after the other.

A `ServerExchange` is one request and its answer. What is said to it after its end does nothing, so no answer can reach
the client of another request. The transport is asyncio's, or one with the same few methods in a simulated world.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from fenced.http1.bodies import LAST_CHUNK, Body, Data, after, body_of, chunk
from fenced.http1.heads import HEAD_END, HEADERS_MAX, NO_HEAD, BadMessage, RequestHead
from fenced.http1.writing import CONTINUE, ServerReply, reply_head

if TYPE_CHECKING:
    from fenced.http1.server import HttpServer

PARTS_MAX = 1000
"""The system takes 1,024 parts in one call."""
DRAINED_BYTES_MAX = 65_536
"""A body that is no longer than this is read and dropped if the answer comes before it. Then the connection is kept."""
TOO_LONG = "the head of the request is too long"
NOTHING = RequestHead(b"", b"", 0, b"", keep=False)
Read = Callable[[bytes | BadMessage], None]
Take = Callable[[list[Data], bool], None]


class Handler(Protocol):
    """Answers requests."""

    def begin(self, exchange: ServerExchange) -> None:
        """A request: its head has come, and maybe its body. Answer it now or later, without a task if possible."""

    def refusal(self, error: BadMessage) -> ServerReply:
        """The answer to what is no request (400, 431, 501, 505), comes too late (408) or is one too many (503)."""


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


class ServerExchange:
    """One request and its answer."""

    done = False
    """The answer is complete, or its client has gone."""
    on_gone: Callable[[], None] | None = None
    """Called if the client goes before its answer is complete."""
    on_pressure: Callable[[bool], None] | None = None
    """Called with True when the client does not take what was written, with False when it does again."""
    _body: Body | None = None
    _chunked = False
    _pieces: list[Data]
    """Of the body; there once some of it has come."""
    _read: tuple[int, Read] | None = None
    _size = 0
    _take: Take | None = None

    def __init__(self, connection: ServerConnection, head: RequestHead, whole: bytes | None = None) -> None:
        """`whole`: the body, if it has come with the head."""
        self._connection = connection
        self.head = head
        self.keep = head.keep
        """The connection is kept afterwards."""
        self._pieces = [whole] if whole else []
        self.received_all = whole is not None

    @property
    def peer(self) -> str | None:
        """The client's address, or that of what stands between; None: a Unix socket."""
        return self._connection.peer

    # The request

    def read(self, limit: int, then: Read) -> None:
        """Call `then` with the whole body, maybe at once; or with BadMessage if it is too long (413) or late (408)."""
        if self.head.length > limit or self._size > limit:
            self._read = limit, then
            self.fail(BadMessage(413, "the body is too long"))
        elif self.received_all:
            pieces = self._pieces
            then(bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces))
        else:
            self._read = limit, then
            self._connection.await_body(self._connection.request_until)
            self.go_on()

    def stream(self, take: Take) -> None:
        """Call `take` with each part of the body, the first one at once, and whether it was the last one."""
        self._take = take
        if not self.received_all:
            self._connection.await_body()
        pieces, self._pieces = self._pieces, []
        take(pieces, self.received_all)

    @property
    def is_streamed(self) -> bool:
        return self._take is not None

    def go_on(self) -> None:
        """Tell a client that waits for it to send the body."""
        if self.head.expects and not self._size and not self.received_all and not self.done:
            self._connection.write([CONTINUE])

    def receive(self, data: Data) -> Data | None:
        """A part of the body. Returns what follows the request, None if its body is not complete. Or BadMessage."""
        if self._body is None:
            self._body = body_of(self.head.length)
        pieces, rest = self._body.feed(data)
        for piece in pieces:
            self._size += len(piece)
        self.received_all = rest is not None
        self._pieces += pieces
        return rest

    def deliver(self) -> None:
        """Pass on what was received since the last time."""
        if self._take is not None:
            pieces, self._pieces = self._pieces, []
            self._take(pieces, self.received_all)
        elif self.done:
            self._pieces.clear()  # it is answered already
        elif self._read is not None:
            limit, then = self._read
            if self._size > limit:
                self.fail(BadMessage(413, "the body is too long"))
            elif self.received_all:
                self._read = None
                then(b"".join(self._pieces))
            elif len(self._pieces) > 1:  # as objects of their own, bytes cost a hundred times as much memory
                self._pieces = [b"".join(self._pieces)]

    def fail(self, error: BadMessage) -> None:
        """The body is not one, or too late. What was passed on of it ends with the connection."""
        self.keep = False
        if self._read is None:
            self.abort()
        else:
            (_, then), self._read = self._read, None
            then(error)

    # The answer

    def reply(self, status: int, headers: tuple[tuple[str, str], ...] = (), body: bytes = b"") -> None:
        """The whole answer."""
        if self.done:
            return
        connection = self._connection
        head = reply_head(status, headers, connection.server.date, self.connection_word())
        sent = b"" if self.head.method == b"HEAD" else body
        connection.write_whole(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), sent))
        self._finish()

    def connection_word(self) -> str:
        """What the Connection header of the answer says. From now on it is settled whether the connection is kept."""
        head = self.head
        if self.keep and not self.received_all:
            self.keep = 0 < head.length <= DRAINED_BYTES_MAX and not head.expects
        if not self.keep or self._connection.server.stopping:
            self.keep = False
            return "close"
        return "" if head.new else "keep-alive"

    def begin(self, status: int, headers: tuple[tuple[str, str], ...], first: bytes = b"") -> None:
        """The head of an answer in pieces, and the first piece."""
        if self.done:
            return
        self._chunked = self.head.new
        self.keep = self.keep and self._chunked
        head = reply_head(status, headers, self._connection.server.date, self.connection_word())
        coding = b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n"
        self._connection.write([b"".join((head, coding, *self._framed(first)))])

    def write(self, data: bytes) -> None:
        if not self.done and data:
            self._connection.write([b"".join(self._framed(data))])

    def end(self, last: bytes = b"") -> None:
        """The last piece."""
        if not self.done:
            ending = (LAST_CHUNK,) if self._chunked and self.head.method != b"HEAD" else ()
            if last or ending:
                self._connection.write([b"".join((*self._framed(last), *ending))])
            self._finish()

    def _framed(self, data: bytes) -> tuple[Data, ...]:
        if not data or self.head.method == b"HEAD":
            return ()
        return chunk(data) if self._chunked else (data,)

    def pass_back(self, parts: list[Data]) -> None:
        """Bytes of an answer that the handler frames itself. `end` ends it."""
        if not self.done:
            self._connection.write(parts)

    def _finish(self) -> None:
        self.done = True
        self._read = self._take = None
        self._connection.answered(self)

    def abort(self) -> None:
        """End the connection: nothing that could still be written would be the rest of this answer."""
        if not self.done:
            self._connection.abort()

    def is_gone(self) -> None:
        """The client has gone."""
        if self.done:
            return
        self.done = True
        self._take = None
        if self._read is not None:
            self.fail(BadMessage(400, "the client has gone before its request had arrived"))
        if self.on_gone is not None:
            self.on_gone()

    # Back-pressure

    def pause(self, why: str) -> None:
        """Read nothing more of this client for now."""
        if not self.done:
            self._connection.pause(why)

    def resume(self, why: str) -> None:
        if not self.done:
            self._connection.resume(why)


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
        self._closing = True
        self._exchange = exchange = ServerExchange(self, NOTHING, b"")
        exchange.reply(*self.server.handler.refusal(error))

    def _read_on(self) -> None:
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
