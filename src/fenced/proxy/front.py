"""The side of the clients: connections, whose requests are answered one after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fenced.errors import Unavailable
from fenced.proxy.bodies import Data, after
from fenced.proxy.connections import ProxyConnection
from fenced.proxy.exchange import Exchange
from fenced.proxy.messages import (
    HEAD_END,
    NO_HEAD,
    BadMessage,
    PassedRequest,
    answer,
    problem_of,
    request_head,
)

if TYPE_CHECKING:
    from fenced.proxy.server import FencingProxy

NOTHING = PassedRequest(
    b"", b"", 0, safe=False, expects=False, new=True, keep=False, fence=[], text=b"", passed_on=b""
)
TOO_LONG = "the head of the request is too long"
LINGERING_SWEEPS = 4
"""For how long a client is read that does not notice that its connection has ended."""


class Front(ProxyConnection):
    """One connection of a client. Its requests are answered one after the other."""

    def __init__(self, proxy: FencingProxy) -> None:
        super().__init__()
        self.proxy = proxy
        self.quiet = 0
        """How many sweeps ago something was received, or taken by a client that did not take anything before."""
        self._exchange: Exchange | None = None
        self._rest = b""
        """What was received and not read yet: a part of a head, or what follows the request that is not answered."""
        self._why_paused: set[str] = set()
        self._stuck = False
        """The client does not take what was written."""
        self._closing = False
        """Nothing is read as a request any more."""
        self._half_closed = False
        """The client sends nothing more."""
        self._head_sweeps = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        fronts = self.proxy.fronts
        fronts.add(self)
        if len(fronts) > self.proxy.options.connections_max or self.proxy.stopping:
            busy = problem_of(Unavailable("this proxy has as many connections as it takes; try again later"))
            self.write([answer(busy, keep=False, to_head=False)])
            self._end()

    def data_received(self, data: bytes) -> None:
        self.quiet = 0
        if self._closing:
            return  # a body that nobody reads
        exchange = self._exchange
        if exchange is None:
            self._read_head(data)
        elif exchange.received_all:
            self._rest += data
            self.pause("pipeline")
        else:
            try:
                self._read_body(exchange, data)
            except BadMessage:
                self._transport.abort()  # a part of it was passed on, or will be
            else:
                exchange.flush()

    def _read_head(self, data: bytes) -> None:
        seen = len(self._rest)
        if seen:
            data, self._rest = self._rest + data, b""
        try:
            # Of a head that comes in many pieces only the last one is searched.
            head = request_head(data) if not seen or HEAD_END in data[max(0, seen - 3) :] else None
            if head is None:
                self._unfinished(data, seen)
                return
            options, size = self.proxy.options, len(head.text)
            if size > options.head_bytes_max:
                raise BadMessage(431, TOO_LONG)
            if 0 <= options.body_bytes_max < head.length:
                raise BadMessage(413, "the body is too long")
            exchange = self._exchange = Exchange(self, head)
            if len(data) > size:
                self._read_body(exchange, after(data, size))
        except BadMessage as error:
            self._refuse(error)
            return
        self._head_sweeps = 0
        exchange.start()
        if not exchange.sent_all:
            exchange.flush()

    def _read_body(self, exchange: Exchange, data: Data) -> None:
        rest = data if exchange.received_all else exchange.receive(data)
        if rest:
            self._rest = bytes(rest)
            self.pause("pipeline")

    def _unfinished(self, data: bytes, seen: int) -> None:
        """Wait for the rest of a head, unless this cannot become one."""
        if data[:1] in (b"\r", b"\n"):  # after a body some clients send a line too many
            data, seen = data.lstrip(b"\r\n"), 0
            if data:
                self._read_head(data)
            return
        end = data.find(HEAD_END)
        if (end if end >= 0 else len(data)) > self.proxy.options.head_bytes_max:
            self._refuse(BadMessage(431, TOO_LONG))
        elif end >= 0 or NO_HEAD.search(data, max(0, seen - 1)):
            self._refuse(BadMessage(400, "not a request of HTTP/1.1"))
        elif self._half_closed:
            self._end()
        else:
            self._rest = data

    def _refuse(self, error: BadMessage) -> None:
        """Answer what cannot be read, and read nothing more."""
        self._closing = True
        self._exchange = Exchange(self, NOTHING)
        self._exchange.refuse(error)

    def _read_on(self) -> None:
        if self._exchange is None and not self._closing:
            rest, self._rest = self._rest, b""
            if rest:
                self._read_head(rest)

    # The end of an exchange, and of the connection

    def next(self, exchange: Exchange) -> None:
        """The exchange is over: close, or go on with the next request."""
        if self._exchange is not exchange:
            return
        self._exchange = None
        self.proxy.counts.requests += 1
        if not exchange.keep or not exchange.received_all or (self._half_closed and not self._rest):
            self._end()
            return
        if self._why_paused:
            self._resume_all()
        if self._rest:
            asyncio.get_running_loop().call_soon(self._read_on)  # not deeper in this stack

    def _end(self) -> None:
        """Close once everything was written. What the client still sends is read for a while: a reset would reach it
        before our answer."""
        self._closing = True
        self.quiet = 0
        self._resume_all()
        if self._transport.can_write_eof() and not self._transport.is_closing() and not self._half_closed:
            self._transport.write_eof()
        else:
            self._transport.close()

    def eof_received(self) -> bool:
        if self._closing or self._exchange is None or not self._exchange.received_all:
            return False
        self._half_closed = True
        return self._transport.can_write_eof()  # it still waits for its answers

    def connection_lost(self, error: Exception | None) -> None:
        self.proxy.fronts.discard(self)
        self._closing = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abandon()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def address(self) -> str:
        """Of the client, or of what stands between."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    @property
    def busy(self) -> bool:
        """Whether the client still gets something."""
        return self._exchange is not None or self._transport.get_write_buffer_size() > 0

    def sweep(self, idle: int, slow: int) -> None:
        """End a connection on which nothing happens: after `idle` sweeps between requests, `slow` within one."""
        self.quiet += 1
        exchange = self._exchange
        if self._stuck:
            if self.quiet > slow:
                self._transport.abort()
        elif exchange is not None:
            if not exchange.received_all and self.quiet > slow and not self._why_paused:
                self._transport.abort()
        elif self._closing:
            if self.quiet > LINGERING_SWEEPS:
                self._transport.abort()
        elif self._rest:
            self._head_sweeps += 1
            if self._head_sweeps > slow:  # however often it sends a byte
                self._refuse(BadMessage(408, "the request was not complete in time"))
        elif self.quiet > idle or self.proxy.stopping:
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
        self.quiet = 0
        if self._exchange is not None and (upstream := self._exchange.upstream) is not None:
            upstream.hold_back()

    def resume_writing(self) -> None:
        self._stuck = False
        self.quiet = 0
        if self._exchange is not None and (upstream := self._exchange.upstream) is not None:
            upstream.let_go()
