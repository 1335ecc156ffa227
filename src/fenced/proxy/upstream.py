"""The side of the upstream: connections that are kept, and one request at a time on each."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, cast

import httptools

from fenced.proxy.messages import RECEIVED, UNTIL_CLOSE, Headers, PassedResponse, chunk, response_head

if TYPE_CHECKING:
    from fenced.proxy.exchange import Exchange

CLOSED = "the upstream closed the connection"


class UpstreamConnection(asyncio.BufferedProtocol):
    """One connection to the upstream. Its exchange is notified of what comes; None while it is idle."""

    def __init__(self, pool: UpstreamPool) -> None:
        self.exchange: Exchange | None = None
        self.quiet = 0
        """How many sweeps ago something was sent or received."""
        self.used = False
        """It has answered before, so the upstream may have closed it just now."""
        self._pool = pool
        self._transport = cast(asyncio.Transport, None)
        self._parser = httptools.HttpResponseParser(self)
        self._out: list[bytes] = []
        self._complete = False
        self._keep = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.open.add(self)

    def start(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.quiet = 0
        self._complete = False
        self._head: PassedResponse | None = None
        self._headers: Headers = []
        self._reason = b""

    def send(self, data: bytes) -> None:
        self.quiet = 0
        self._transport.write(data)

    def get_buffer(self, sizehint: int) -> memoryview:
        return RECEIVED

    def buffer_updated(self, nbytes: int) -> None:
        self.quiet = 0
        exchange = self.exchange
        if exchange is None:
            self.abort()  # nobody has asked for anything
            return
        try:
            self._parser.feed_data(RECEIVED[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError):
            self._fail("the upstream's answer is not HTTP")
            return
        out, self._out = self._out, []
        if out:
            exchange.pass_back(b"".join(out))
        if self._complete:
            self._finish(exchange)

    # Called by the parser

    def on_message_begin(self) -> None:
        self._headers, self._reason = [], b""

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        status = self._parser.get_status_code()
        if self._complete or status == 101:
            raise ValueError("more than one answer")
        if status < 200:
            if status != 100:
                exchange.pass_interim(response_head(status, self._reason, self._headers, to_head=True))
            return
        to_head = exchange.head.method == b"HEAD"
        self._head = response_head(status, self._reason, self._headers, to_head=to_head)
        self._keep = self._parser.should_keep_alive()
        self._out.append(exchange.response_lines(self._head))
        if to_head:
            self._complete = True

    def on_body(self, data: bytes) -> None:
        if self._head is not None and not self._complete and self.exchange is not None:
            self._out.append(chunk(data) if self.exchange.chunks_back else data)

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._complete = True

    # The end of an exchange

    def _finish(self, exchange: Exchange) -> None:
        self.exchange = None
        self.used = True
        self.let_go()
        # After HEAD the parser would wait for a body.
        if self._keep and exchange.sent_all and exchange.head.method != b"HEAD":
            self._pool.give_back(self)
        else:
            self._transport.close()
        exchange.answered()

    def _fail(self, why: str) -> None:
        exchange, self.exchange = self.exchange, None
        self._transport.abort()
        if exchange is not None:
            exchange.broken(why)

    def abort(self, why: str = CLOSED) -> None:
        """End the connection, and with it the exchange: whether the request was carried out is unknown."""
        self._fail(why)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if error is None and self._head is not None and self._head.length == UNTIL_CLOSE:
            exchange.answered()
        else:
            exchange.broken(CLOSED)

    # Back-pressure

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.front.pause("upstream")

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.front.resume("upstream")

    def hold_back(self) -> None:
        """Read nothing while the client does not take what was read."""
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def let_go(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    @property
    def held_back(self) -> bool:
        return self._paused

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


class UpstreamPool:
    """Connections to one upstream."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None, timeout: float) -> None:
        self.open: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []
        self._where = host, port
        self._context = context
        self._timeout = timeout

    def take(self) -> UpstreamConnection | None:
        """An idle connection: the one that was used last, because the upstream closes the others first."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing():
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. OSError if that fails."""
        host, port = self._where
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout):
            _, connection = await loop.create_connection(
                lambda: UpstreamConnection(self), host, port, ssl=self._context
            )
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        connection.quiet = 0
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        self.open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    @property
    def busy(self) -> bool:
        """Whether the upstream still owes an answer."""
        return any(connection.exchange is not None for connection in self.open)

    def sweep(self, idle: int, timeout: int) -> None:
        """Close what was idle for `idle` sweeps, and end exchanges in which nothing happened for `timeout` sweeps."""
        for connection in list(self.open):
            connection.quiet += 1
            if connection.exchange is None:
                if connection.quiet > idle:
                    self.forget(connection)
                    connection.close()
            elif connection.held_back:
                connection.quiet = 0  # the client is slow, not the upstream
            elif connection.quiet > timeout:
                connection.abort("the upstream has not answered in time")

    def close(self) -> None:
        for connection in list(self.open):
            connection.close()
