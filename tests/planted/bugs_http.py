"""Planted bugs of the HTTP server, which the worlds of the service and of the proxy must find."""

from __future__ import annotations

from fenced.http1.bodies import Data
from fenced.http1.connections import ServerConnection
from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import BadMessage, RequestHead


class AnswersOutOfOrder(ServerConnection):
    """A request is read while the one before it is not answered: the quicker answer comes first."""

    def _keep_for_later(self, rest: Data) -> None:
        self._later = bytes(rest)

    def _begun(self, head: RequestHead, data: Data) -> ServerExchange:
        self._later = b""
        exchange = super()._begun(head, data)
        if self._later:
            self.server.handler.begin(exchange)
            self._exchange = None
            self._read_head(self._later)
            return ServerExchange(self, head, b"")
        return exchange


class BodyIsTakenForAHead(ServerConnection):
    """After an answer that came before the body, what comes next is read as a head."""

    def answered(self, exchange: ServerExchange) -> None:
        self._go_on(exchange)


class KeptAfterABadLength(ServerConnection):
    """After a head that could be two requests, the connection goes on with what follows it."""

    def _refuse(self, error: BadMessage) -> None:
        head = RequestHead(b"POST", b"/", 0, b"")
        self._exchange = exchange = ServerExchange(self, head, b"")
        exchange.reply(*self.server.handler.refusal(error))

    def _read_head(self, data: bytes) -> None:
        before, _, after = (self._rest + data).partition(b"\r\n\r\n")
        super()._read_head(data)
        if b"Content-Length: 0\r\nContent-Length" in before and after and not self._closing:
            super()._read_head(after)


class GoneIsNotNoticed(ServerConnection):
    """An exchange does not learn that its client has gone."""

    def connection_lost(self, error: Exception | None) -> None:
        self._exchange = None
        super().connection_lost(error)
