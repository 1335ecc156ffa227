"""The connections of clients, with bounds: how many there are, and how long each may take.

A client that sends its request byte by byte, or does not read its answer, costs a descriptor and some memory until its
time is over. The others do not notice it.
"""

from __future__ import annotations

import asyncio
import math

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fenced.errors import Unavailable
from fenced.service.limits import Limits
from fenced.service.replies import plain
from fenced.wire.problems import Problem, problem

HEAD_BYTES_MAX = 2**19
"""One read may bring many pipelined requests and the beginning of another, so this is more than any head needs."""
REFUSED_MAX = 500
"""How many connections beyond the limit are told so. Further ones are closed at once."""


class BoundedConnection(HttpToolsProtocol):
    """One connection. `LeaseServer` closes it when its time is over."""

    limits = Limits()
    request_until = math.inf
    """On the loop's clock: when the request must have arrived."""
    answer_until = math.inf
    """When the client must read on."""
    in_head = False
    head_bytes = 0

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
        super().data_received(data)
        if self.in_head:
            self.head_bytes += len(data)
            if self.head_bytes > HEAD_BYTES_MAX:
                self.end(plain(431, "The head of the request is too long", f"at most {HEAD_BYTES_MAX} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.begin_head()

    def begin_head(self) -> None:
        self.in_head, self.head_bytes = True, 0
        self.request_until = self.loop.time() + self.limits.request_time

    def on_headers_complete(self) -> None:
        self.in_head = False
        super().on_headers_complete()

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
    full = problem(Unavailable("this instance has too many connections; nothing happened"))
    headers = [(name.lower().encode(), value.encode()) for name, value in full.headers]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": full.status, "headers": headers})
    await send({"type": "http.response.body", "body": full.body})
