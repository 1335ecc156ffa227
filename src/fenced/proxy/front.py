"""The side of the clients: connections, whose requests are answered one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from fenced.errors import Unavailable
from fenced.proxy.exchange import Exchange
from fenced.proxy.messages import RECEIVED, BadMessage, Headers, PassedRequest, answer, request_head
from fenced.wire.problems import problem

if TYPE_CHECKING:
    from fenced.proxy.server import FencingProxy

NOTHING = PassedRequest(b"", b"", 0, safe=False, expects=False, fence=[], headers=[], passed_on=b"")
TOO_LONG = "the head of the request is too long"
LINGERING_SWEEPS = 4
"""For how long a client is read that does not notice that its connection has ended."""


class Front(asyncio.BufferedProtocol):
    """One connection of a client. Its requests are answered one after the other."""

    def __init__(self, proxy: FencingProxy) -> None:
        self.proxy = proxy
        self.quiet = 0
        """How many sweeps ago something was received, or taken by a client that did not take anything before."""
        self._transport = cast(asyncio.Transport, None)
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._in_head = False
        self._why_paused: set[str] = set()
        self._stuck = False
        """The client does not take what was written."""
        self._closing = False
        """Nothing is read as a request any more."""
        self._half_closed = False
        """The client sends nothing more."""
        self._head_sweeps = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        fronts = self.proxy.fronts
        fronts.add(self)
        if len(fronts) > self.proxy.options.connections_max or self.proxy.stopping:
            busy = problem(Unavailable("this proxy has as many connections as it takes; try again later"))
            self.write(answer(busy, keep=False, to_head=False))
            self._end()

    def get_buffer(self, sizehint: int) -> memoryview:
        return RECEIVED

    def buffer_updated(self, nbytes: int) -> None:
        self._received(RECEIVED[:nbytes])

    def _received(self, data: memoryview) -> None:
        self.quiet = 0
        if self._closing:
            return  # a body that nobody reads
        if self._in_head or not self._exchanges:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._after_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._malformed(error)
            return
        if self._in_head and self._head_bytes > self.proxy.options.head_bytes_max:
            self._malformed(BadMessage(431, TOO_LONG))
            return
        self._go_on()

    def _go_on(self) -> None:
        if not self._exchanges:
            return
        first = self._exchanges[0]
        if not first.started:
            first.start()
        if not first.done:
            first.flush()
        if len(self._exchanges) > 1:
            self.pause("pipeline")

    def _after_upgrade(self, rest: memoryview) -> None:
        """A client that offered another protocol goes on with HTTP/1.1."""
        self._parser = httptools.HttpRequestParser(self)
        self._go_on()
        if rest and not self._closing:
            self._received(rest)

    def _malformed(self, error: Exception) -> None:
        """Answer what cannot be read, after the requests before it."""
        last = self._exchanges[-1] if self._exchanges else None
        if last is not None and not last.received_all:
            if last.started:
                self._transport.abort()  # a part of it was passed on
                return
            self._exchanges.pop()
        if not isinstance(error, BadMessage):
            cause = error.__context__  # what was raised in a callback of the parser
            error = cause if isinstance(cause, BadMessage) else BadMessage(400, "not a request of HTTP/1.1")
        self._closing = True
        refused = Exchange(self, NOTHING, "1.1", keep=False)
        refused.refusal = error
        self._exchanges.append(refused)
        self._go_on()

    # Called by the parser

    def on_message_begin(self) -> None:
        self._target, self._headers, self._in_head, self._head_sweeps = b"", [], True, 0

    def on_url(self, target: bytes) -> None:
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not a trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        version = parser.get_http_version()
        if self._head_bytes > (most := self.proxy.options.head_bytes_max) and most < len(self._target) + sum(
            len(name) + len(value) for name, value in self._headers
        ):
            raise BadMessage(431, TOO_LONG)
        head = request_head(parser.get_method(), self._target, version, self._headers)
        if 0 <= self.proxy.options.body_bytes_max < head.length:
            raise BadMessage(413, "the body is too long")
        self._in_head, self._head_bytes = False, 0
        self._exchanges.append(Exchange(self, head, version, parser.should_keep_alive()))

    def on_body(self, data: bytes) -> None:
        if self._exchanges:  # else it was refused meanwhile
            exchange = self._exchanges[-1]
            exchange.receive(data)
            if 0 <= self.proxy.options.body_bytes_max < exchange.size:
                raise BadMessage(413, "the body is too long")

    def on_message_complete(self) -> None:
        if self._exchanges:
            self._exchanges[-1].received_all = True

    # The end of an exchange, and of the connection

    def next(self, exchange: Exchange) -> None:
        """The first exchange is over: close, or go on with the next request."""
        if not self._exchanges or self._exchanges[0] is not exchange:
            return
        self._exchanges.popleft()
        self.proxy.counts.requests += 1
        if not exchange.keep or not exchange.received_all:
            self._end()
            return
        for reason in list(self._why_paused):
            self.resume(reason)
        if self._exchanges:
            asyncio.get_running_loop().call_soon(self._go_on)  # not deeper in this stack

    def _end(self) -> None:
        """Close once everything was written. What the client still sends is read for a while: a reset would reach it
        before our answer."""
        self._closing = True
        self.quiet = 0
        for reason in list(self._why_paused):
            self.resume(reason)
        if self._transport.can_write_eof() and not self._transport.is_closing() and not self._half_closed:
            self._transport.write_eof()
        else:
            self._transport.close()

    def eof_received(self) -> bool:
        if self._closing or not self._exchanges or not self._exchanges[-1].received_all:
            return False
        self._exchanges[-1].keep = False
        self._half_closed = True
        return self._transport.can_write_eof()  # it still waits for its answers

    def connection_lost(self, error: Exception | None) -> None:
        self.proxy.fronts.discard(self)
        exchanges, self._exchanges = self._exchanges, deque()
        for exchange in exchanges:
            exchange.abandon()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def busy(self) -> bool:
        """Whether the client still gets something."""
        return bool(self._exchanges) or self._transport.get_write_buffer_size() > 0

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def sweep(self, idle: int, slow: int) -> None:
        """End a connection on which nothing happens: after `idle` sweeps between requests, `slow` within one."""
        self.quiet += 1
        first = self._exchanges[0] if self._exchanges else None
        if self._in_head:
            self._head_sweeps += 1
        if self._stuck:
            if self.quiet > slow:
                self._transport.abort()
        elif first is not None:
            if not first.received_all and self.quiet > slow and not self._why_paused:
                self._transport.abort()
        elif self._closing:
            if self.quiet > LINGERING_SWEEPS:
                self._transport.abort()
        elif self._in_head:
            if self._head_sweeps > slow:  # however often it sends a byte
                self._malformed(BadMessage(408, "the request was not complete in time"))
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

    def pause_writing(self) -> None:
        self._stuck = True
        self.quiet = 0
        if self._exchanges and (upstream := self._exchanges[0].upstream) is not None:
            upstream.hold_back()

    def resume_writing(self) -> None:
        self._stuck = False
        self.quiet = 0
        if self._exchanges and (upstream := self._exchanges[0].upstream) is not None:
            upstream.let_go()
