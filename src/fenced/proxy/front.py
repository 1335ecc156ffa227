"""The side of the clients: connections, and the exchange of one request and its answer."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, cast

import httptools

from fenced.errors import FencedError, InvariantBroken, Unavailable, Unsupported
from fenced.http.protocol import problem, read_fence
from fenced.model import Stamp
from fenced.proxy.messages import (
    CHUNKED,
    CONTINUE,
    RECEIVED,
    UNTIL_CLOSE,
    BadMessage,
    Headers,
    OutcomeUnknown,
    PassedRequest,
    PassedResponse,
    answer,
    chunk,
    request_head,
)
from fenced.proxy.names import NoName

if TYPE_CHECKING:
    from fenced.proxy.gate import Line
    from fenced.proxy.server import FencingProxy
    from fenced.proxy.upstream import UpstreamConnection

BUFFERED_BYTES = 65_536
"""How much of a body is read before the request may be passed on."""
NOTHING = PassedRequest(b"", b"", 0, safe=False, expects=False, fence=[], headers=[], passed_on=b"")
TOO_LONG = "the head of the request is too long"
LINGERING_SWEEPS = 4
"""For how long a client is read that does not notice that its connection has ended."""


class Exchange:
    """One request, and its answer.

    It ends in one of four ways: the upstream has answered (`answered`), the outcome is unknown (`broken`), the proxy
    has answered by itself (`refuse`), or the client has gone (`abandon`). What the gate let in it is given back by the
    first two.
    """

    __slots__ = (
        "_body",
        "_line",
        "_retried",
        "_token",
        "chunks_back",
        "done",
        "front",
        "head",
        "keep",
        "received_all",
        "refusal",
        "responding",
        "sent_all",
        "size",
        "started",
        "upstream",
        "version",
    )

    def __init__(self, front: Front, head: PassedRequest, version: str, keep: bool) -> None:
        self.front = front
        self.head = head
        self.version = version
        self.keep = keep
        """The client's connection is kept afterwards."""
        self.upstream: UpstreamConnection | None = None
        self.started = False
        self.received_all = False
        self.sent_all = False
        self.responding = False
        self.done = False
        self.chunks_back = False
        self.size = 0
        self.refusal: BadMessage | None = None
        """Why it is not even a request."""
        self._body: list[bytes] = []
        self._line: Line | None = None
        self._token = 0
        self._retried = False

    # The request

    def start(self) -> None:
        """Decide, and pass the request on: at once if nothing has to be awaited, else in a task."""
        self.started = True
        proxy = self.front.proxy
        if self.refusal is not None:
            self.refuse(self.refusal)
            return
        head = self.head
        if head.safe and not head.fence:
            self._connect()
            return
        try:
            name = proxy.naming.name_of(head.target, head.headers)
            if name is not None and len(head.fence) == 1:
                entered = proxy.gate.enter_by_text(name, head.fence[0])
                if entered is not None:  # nearly always: a further request of the same holder
                    self._line, self._token = entered
                    self._connect()
                    return
            fence = read_fence(head.fence)
            if fence is not None and not isinstance(fence, Stamp):
                raise Unsupported("this proxy cannot check a proof, and does not ignore it")
        except FencedError as error:
            self.refuse(error)
            return
        if name is None:
            if head.safe or proxy.options.unnamed == "pass":
                self._connect()
            else:
                self.refuse(NoName("no --name of this proxy is for this path, so it is not passed on"))
            return
        proxy.spawn(partial(self._enter, name, fence))

    async def _enter(self, name: str, stamp: Stamp | None) -> None:
        proxy = self.front.proxy
        try:
            if stamp is None:
                await proxy.gate.unstamped(name)
            else:
                until = proxy.runtime.now() + proxy.options.wait
                self._line, self._token = await proxy.gate.enter(name, stamp, until), stamp.token
        except FencedError as error:
            proxy.note_refusal(error)
            self.refuse(error)
            return
        except Exception as error:  # noqa: BLE001 (a bug; without this the client would wait for ever)
            proxy.report(f"{type(error).__name__} while a request was judged: this is a bug")
            self.refuse(InvariantBroken("the proxy has failed"))
            return
        self._connect()

    def _connect(self) -> None:
        """Pass the request on over an idle connection, or over a new one."""
        if self.done:  # the client has gone meanwhile, and nothing was sent
            self._give_back()
            return
        connection = None if self._retried else self.front.proxy.pool.take()
        if connection is not None:
            self._pass_on(connection)
        else:
            self.front.proxy.spawn(self._connect_anew)

    async def _connect_anew(self) -> None:
        try:
            connection = await self.front.proxy.pool.connect()
        except OSError as error:
            self._give_back()
            why = str(error) or type(error).__name__
            self.refuse(Unavailable(f"the upstream cannot be reached, and nothing was sent to it: {why}"))
            return
        if self.done:
            connection.close()
            self._give_back()
        else:
            self._pass_on(connection)

    def _pass_on(self, connection: UpstreamConnection) -> None:
        self.upstream = connection
        connection.start(self)
        if self.head.expects and not self._body:
            self.front.write(CONTINUE)
        self._send(self.head.passed_on)
        self.front.resume("gate")

    def receive(self, data: bytes) -> None:
        """A part of the body."""
        self.size += len(data)
        self._body.append(chunk(data) if self.head.length == CHUNKED else data)

    def flush(self) -> None:
        """Send what has been received since the last time."""
        if self.upstream is not None:
            if self._body or (self.received_all and not self.sent_all):
                self._send(b"")
        elif self.size > BUFFERED_BYTES:
            self.front.pause("gate")

    def _send(self, head: bytes) -> None:
        upstream = self.upstream
        assert upstream is not None
        if self._line is not None and not self.front.proxy.gate.may_send(self._line, self._token):
            # This proxy was stopped for so long that others may have let newer requests through.
            upstream.abort("this proxy was stopped, or could not reach its store, for too long")
            return
        parts, self._body = [head, *self._body] if head else self._body, []
        if self.received_all and not self.sent_all:
            self.sent_all = True
            if self.head.length == CHUNKED:
                parts.append(b"0\r\n\r\n")
        upstream.send(b"".join(parts))  # of one part this is no copy

    # The answer

    def pass_interim(self, head: PassedResponse) -> None:
        if self.version == "1.1" and not self.done:
            self.front.write(head.lines + b"\r\n")

    def response_lines(self, head: PassedResponse) -> bytes:
        """The head of the answer as the client gets it."""
        self.responding = True
        self.keep = self.keep and not self.front.proxy.stopping
        lines = head.lines
        if head.length in (CHUNKED, UNTIL_CLOSE):
            if self.version == "1.1":
                self.chunks_back = True
                lines += b"transfer-encoding: chunked\r\n"
            else:
                self.keep = False
        if not self.keep:
            lines += b"connection: close\r\n"
        elif self.version != "1.1":
            lines += b"connection: keep-alive\r\n"
        self.front.proxy.counts.answers[head.status // 100] += 1
        return lines + b"\r\n"

    def pass_back(self, data: bytes) -> None:
        if not self.done:
            self.front.write(data)

    def answered(self) -> None:
        """The upstream has answered everything."""
        self.upstream = None
        self._give_back()
        if not self.done:
            if self.chunks_back:
                self.front.write(b"0\r\n\r\n")
            self._finish()

    def broken(self, why: str) -> None:
        """The connection to the upstream has ended. What was sent may have been carried out."""
        connection, self.upstream = self.upstream, None
        assert connection is not None
        if connection.used and self.head.safe and not self.responding and not self._retried and not self.size:
            self._retried = True  # a safe request may be repeated, and the upstream closes idle connections
            self._connect()
            return
        proxy, held = self.front.proxy, ""
        if self.head.safe:
            self._give_back()  # it changes nothing, however long it runs
        elif self._line is not None:
            held = f"; newer holders wait for {proxy.options.settle:g} s"
            proxy.note_unknown(self._line.name, why)
            proxy.gate.doubt(self._line, self._token)
            self._line = None
        if self.done:
            return
        if self.responding:
            self.front.abort()
            return
        self.refuse(OutcomeUnknown(f"the outcome of the request is unknown: {why}{held}"))

    def refuse(self, error: FencedError) -> None:
        """Answer without the upstream, or instead of it."""
        if self.done:
            return
        found = error.problem() if isinstance(error, BadMessage) else problem(error)
        self.front.proxy.counts.own[found.status] += 1
        # A client that still sends its body is not read to the end.
        self.keep = self.keep and self.received_all and not self.front.proxy.stopping
        self.front.write(answer(found, keep=self.keep, to_head=self.head.method == b"HEAD"))
        self._finish()

    def abandon(self) -> None:
        """The client has gone. A request that was sent in whole is waited for: its order must be kept."""
        self.done = True
        if self.upstream is not None:
            if self.sent_all:
                self.upstream.let_go()
            else:
                self.upstream.abort("the client has gone before the request was complete")

    def _finish(self) -> None:
        self.done = True
        self.front.next(self)

    def _give_back(self) -> None:
        if self._line is not None:
            self.front.proxy.gate.answered(self._line, self._token)
            self._line = None


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
