"""The side of the upstream: connections that are kept, and one request at a time on each."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from fenced.http1.bodies import LAST_CHUNK, Body, Data, after, body_of, chunk
from fenced.http1.connections import DirectConnection
from fenced.http1.heads import HEAD_END, UNTIL_CLOSE, BadMessage, ResponseHead, response_head
from fenced.proxy.passing import PassedResponse, passed_back

if TYPE_CHECKING:
    from fenced.proxy.exchange import Exchange

HEAD_BYTES_MAX = 65_536
"""Of an answer."""
CLOSED = "the upstream closed the connection"


class UpstreamConnection(DirectConnection):
    """One connection to the upstream. Its exchange is notified of what comes; None while it is idle."""

    def __init__(self, pool: UpstreamPool) -> None:
        super().__init__()
        self.exchange: Exchange | None = None
        self.quiet = 0
        """How many sweeps ago something was sent or received."""
        self.used = False
        """It has answered before, so the upstream may have closed it just now."""
        self._pool = pool
        self._head: ResponseHead | None = None
        """Of the answer, once it has come."""
        self._held = b""
        """A part of a head."""
        self._body: Body
        self._keep = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._pool.open[self] = None

    def start(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.quiet = 0
        self._head = None

    def data_received(self, data: bytes) -> None:
        self.quiet = 0
        exchange = self.exchange
        if exchange is None:
            self.abort()  # nobody has asked for anything
            return
        try:
            if self._head is None:
                self._read_head(exchange, data)
            else:
                self._read_body(exchange, data, [])
        except BadMessage:
            self._fail("the upstream's answer is not HTTP")

    def _read_head(self, exchange: Exchange, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        to_head = exchange.head.method == b"HEAD"
        at = 0
        while head := response_head(data, at, to_head=to_head):
            at += len(head.text)
            if head.status >= 200:
                self._answer(exchange, passed_back(head), data, at)
                return
            if head.status == 101:
                raise BadMessage(502, "an upgrade that nobody has asked for")
            if head.status != 100:
                exchange.pass_interim(passed_back(head))
        self._held = data[at:]
        if HEAD_END in self._held or len(self._held) > HEAD_BYTES_MAX:
            raise BadMessage(502, "not an answer of HTTP/1.1")

    def _answer(self, exchange: Exchange, found: PassedResponse, data: bytes, at: int) -> None:
        """The head has come, and ends at `at`."""
        head = self._head = found.head
        self._keep = head.keep
        added = exchange.begin_answer(head.length, head.status)
        if found.same and not added and len(data) == len(head.text) + head.length:
            exchange.client.pass_back([data])
            self._finish(exchange)
            return
        self._body = body_of(head.length)
        self._read_body(exchange, after(data, at), [found.lines, added, b"\r\n"])

    def _read_body(self, exchange: Exchange, data: Data, out: list[Data]) -> None:
        """Pass on what has come of the body, in one write with what is in `out`."""
        pieces, rest = self._body.feed(data)
        if exchange.chunks_back:
            for piece in pieces:
                if piece:
                    out += chunk(piece)
            if rest is not None:
                out.append(LAST_CHUNK)
        else:
            out += pieces
        exchange.client.pass_back(out)
        if rest is not None:
            if rest:
                self._keep = False  # nobody has asked for more
            self._finish(exchange)

    # The end of an exchange

    def _finish(self, exchange: Exchange) -> None:
        # First: what still comes belongs to nobody, and another exchange may begin as soon as this one is given back.
        self.exchange = None
        self.used = True
        if self._paused:
            self.let_go()
        # A body that wrongly follows the answer to HEAD would be read as the next answer.
        if self._keep and exchange.sent_all and exchange.head.method != b"HEAD":
            self._pool.give_back(self)
        else:
            self._transport.close()
        exchange.answered()

    def _fail(self, why: str) -> None:
        # Taken out first: `connection_lost` follows, and an exchange must be told once how it ended.
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
            if exchange.chunks_back:
                exchange.client.pass_back([LAST_CHUNK])
            exchange.answered()
        else:
            exchange.broken(CLOSED)

    # Back-pressure

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.client.pause("upstream")

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.client.resume("upstream")

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
        self.open: dict[UpstreamConnection, None] = {}
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
        self.open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    @property
    def busy(self) -> bool:
        """Whether the upstream still owes an answer."""
        return any(connection.exchange is not None for connection in self.open)

    def sweep(self, idle: int, timeout: int) -> None:
        """Close what was idle for `idle` sweeps; end exchanges in which nothing happened for `timeout` sweeps, and
        those that keep newer tokens out for too long."""
        for connection in list(self.open):
            connection.quiet += 1
            if connection.exchange is None:
                if connection.quiet > idle:
                    self.forget(connection)
                    connection.close()
            elif connection.exchange.is_overdue():
                connection.abort("a newer holder has waited for it for too long")
            elif connection.held_back:
                connection.quiet = 0  # the client is slow, not the upstream
            elif connection.quiet > timeout:
                connection.abort("the upstream has not answered in time")

    def close(self) -> None:
        for connection in list(self.open):
            connection.close()
