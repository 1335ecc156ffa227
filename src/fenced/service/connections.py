"""The connections of clients, with bounds: how many there are, and how long each may take.

A client that sends its request byte by byte, or does not read its answer, costs a descriptor and some memory until its
time is over. The others do not notice it.
"""

from __future__ import annotations

import asyncio
import math

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fenced.errors import Unavailable
from fenced.net.problems import Problem, problem
from fenced.service.limits import Limits
from fenced.service.replies import plain

HEAD_BYTES_MAX = 32_768
"""Of everything in a request that is not its body: its head, its trailers, and what is between chunks."""
HEADERS_MAX = 100
REFUSED_MAX = 500
"""How many connections beyond the limit are told so. Further ones are closed at once."""

TOO_LONG = plain(
    431, "The head of the request is too long", f"at most {HEAD_BYTES_MAX} bytes and {HEADERS_MAX} headers"
)


class HeadTooLong(Exception):
    """Raised in the parser, which then stops."""


class BoundedConnection(HttpToolsProtocol):
    """One connection. `LeaseServer` closes it when its time is over."""

    limits = Limits()
    request_until = math.inf
    """On the loop's clock: when the request must have arrived."""
    answer_until = math.inf
    """When the client must read on."""
    in_head = False
    between = True
    """Whether the parser is between two requests, as in the beginning."""
    begun = 0
    """How many requests have begun in the bytes that are being parsed."""
    body_bytes = 0
    """How many of these bytes belong to bodies."""
    head_bytes = 0
    """Of the headers of this request that were parsed."""
    other_bytes = 0
    """Of everything in this request but its body, as far as whole reads belong to it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.request_until = self.loop.time() + self.limits.idle_time
        beyond = len(self.connections) - self.limits.connections
        if beyond > REFUSED_MAX:
            transport.abort()
        elif beyond > 0:
            # Answered after its request has arrived: closed before, the client might not get the answer.
            self.app = too_many_connections
            self.request_until = self.loop.time() + self.limits.request_time

    def data_received(self, data: bytes) -> None:
        self.begun, self.body_bytes, began_between = 0, 0, self.between
        try:
            self._parse(memoryview(data))
        except HttpParserError as error:
            if isinstance(error.__context__, HeadTooLong):
                self.end(TOO_LONG)
            else:
                self.send_400_response("")
            return
        if self.begun == int(began_between) and not self.between:  # all of these bytes belong to one request
            self.other_bytes += len(data) - self.body_bytes
            if self.other_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self.end(TOO_LONG)

    def _parse(self, data: memoryview) -> None:
        """An offer of another protocol is ignored, as HTTP allows: this parser cannot, and stops behind the head.

        So it gets the same head again, without the header Upgrade.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as stopped:
                method, version = self.parser.get_method(), self.parser.get_http_version()
                if method == b"CONNECT":
                    self.send_400_response("")
                    return
                data = data[stopped.args[0] :]
                self.begun -= 1
                head = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
                head += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
                self.parser = HttpRequestParser(self)
                self.parser.feed_data(b"\r\n".join((*head, b"", b"")))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.begin_head()

    def begin_head(self) -> None:
        self.in_head, self.between = True, False
        self.begun += 1
        self.head_bytes = self.other_bytes = 0
        self.request_until = self.loop.time() + self.limits.request_time

    def on_url(self, url: bytes) -> None:
        self.count_head(len(url))
        super().on_url(url)

    def count_head(self, size: int) -> None:
        self.head_bytes += size
        if self.head_bytes > HEAD_BYTES_MAX or len(self.headers) > HEADERS_MAX:
            raise HeadTooLong

    def on_headers_complete(self) -> None:
        self.in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.request_until = math.inf
        super().on_message_complete()

    def pause_writing(self) -> None:
        self.answer_until = self.loop.time() + self.limits.request_time
        super().pause_writing()

    def resume_writing(self) -> None:
        self.answer_until = math.inf
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self.end(plain(400, "Not a request of HTTP/1.1", "the connection is closed"))

    def end_if_late(self, now: float) -> None:
        """Close the connection if its time is over. While this side does not read, the request need not arrive."""
        late = self.request_until <= now and not self.flow.read_paused
        if (late or self.answer_until <= now) and not self.transport.is_closing():
            self.end(plain(408, "The request did not arrive in time", "send it again on a new connection"))

    def end(self, why: Problem) -> None:
        """Close it, with an answer if none has begun and a request has."""
        answered = self.cycle is None or self.cycle.response_complete
        if not answered or self.transport.get_write_buffer_size():
            self.transport.abort()  # part of an answer was sent, or the client does not read: it takes no other
            return
        if self.in_head:
            self.transport.write(_raw(why))
        self.transport.close()


def _raw(why: Problem) -> bytes:
    head = [STATUS_LINE[why.status], b"connection: close\r\n"]
    head += [f"{name}: {value}\r\n".encode("latin-1") for name, value in why.headers]
    return b"".join([*head, b"\r\n", why.body])


async def too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of the connections beyond the limit."""
    full = problem(Unavailable("this instance has too many connections; nothing happened"), by="service")
    headers = [(name.lower().encode(), value.encode()) for name, value in full.headers]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": full.status, "headers": headers})
    await send({"type": "http.response.body", "body": full.body})
