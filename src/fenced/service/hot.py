"""The short way of the requests that a service gets most: no task, no scope and no request object of a framework.

A request takes it if its route is in `HOT`, its head and its body have arrived together, everything before it on its
connection is answered, and it wants no held answer. Every other request goes on to the application, with the same
bytes. Both ways use the same functions of `Api` for access, limits, operations and answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from starlette.datastructures import Address, QueryParams
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from fenced.service.api import Api, body_bytes_max
from fenced.service.connections import BoundedConnection
from fenced.service.replies import ServiceReply
from fenced.service.routes import ROUTES

HOT = {
    route.path.encode(): route for route in ROUTES if route.handler in ("ask", "renew", "release", "batch")
}
_LONG_WAY = frozenset({b"prefer", b"expect", b"upgrade", b"transfer-encoding"})
"""Headers of requests that may be held, that wait for a reply before their body, or whose body has no length."""


@lru_cache(256)
def _query_of(text: bytes) -> Mapping[str, str]:
    """A client sends the same one with each request."""
    return dict(QueryParams(text))


class RawHeaders:
    """The headers of a request as they arrived, with names in lower case."""

    __slots__ = ("raw",)

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self.raw = raw

    def getlist(self, key: str) -> list[str]:
        name = key.encode("latin-1")
        return [value.decode("latin-1") for each, value in self.raw if each == name]

    def get(self, key: str, /) -> str | None:
        found = self.getlist(key)
        return found[0] if found else None


class HotRequest:
    """A request on the short way. It stands where uvicorn has its cycle, so what comes behind it is queued."""

    __slots__ = ("client", "disconnected", "headers", "keep_alive", "query_params", "response_complete")

    def __init__(self, headers: RawHeaders, query: Mapping[str, str], client: Address | None) -> None:
        self.headers = headers
        self.query_params = query
        self.client = client
        self.disconnected = False
        self.response_complete = False
        self.keep_alive = True
        """uvicorn makes it False when the server stops."""

    @property
    def path_params(self) -> dict[str, Any]:
        return {}

    @property
    def message_event(self) -> HotRequest:
        """uvicorn sets this event when the connection is lost. Nothing waits for it here."""
        return self

    def set(self) -> None:
        return


class HotConnection(BoundedConnection):
    """One connection of a client."""

    api: Api
    _body: list[bytes] | None = None
    """The body of the request that is being read, as long as it may take the short way."""

    _long = False
    """One of its headers says that it takes the long way."""

    # Reading: the parser calls these in this order.

    def on_message_begin(self) -> None:
        self.begin_head()
        self.url = b""
        self.headers = []
        self.expect_100_continue = self._long = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _LONG_WAY:
            self._long = True
            super().on_header(name, value)
        else:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_hot():
            self.in_head = False
            self._body = []
        else:
            self._go_on()

    def _is_hot(self) -> bool:
        path, _, query = self.url.partition(b"?")
        return (
            path in HOT
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and (self.cycle is None or self.cycle.response_complete)
            and self.app is self.config.loaded_app  # and not that of a connection beyond the limit
            and not self._long
            and self.api.namespaces.has(_query_of(query).get("namespace", "default"))
        )

    def _go_on(self) -> None:
        """Let uvicorn treat this request as every other one."""
        body, self._body = self._body, None
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers.extend(headers)  # the scope has this very list
        super().on_headers_complete()
        for piece in body or ():
            super().on_body(piece)

    def on_body(self, body: bytes) -> None:
        if self._body is None:
            super().on_body(body)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._body is None:
            super().on_message_complete()
            return
        path, _, query = self.url.partition(b"?")
        route, data = HOT[path], b"".join(self._body)
        if len(data) > body_bytes_max(route):
            self._go_on()
            super().on_message_complete()
            return
        self._body = None
        self.request_until = math.inf
        client = None if self.client is None else Address(*self.client)
        request = HotRequest(RawHeaders(self.headers), _query_of(query), client)
        self.cycle = request  # type: ignore[assignment]
        self.api.serve(route, request, data, partial(self._reply, request))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._body is not None and not self.transport.is_closing():
            # The rest of the body comes later. The application bounds the time of that.
            self._go_on()

    # Replying.

    def on_response_complete(self) -> None:
        """As uvicorn does it, but without a timer for each request: `end_if_late` closes idle connections."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.request_until == math.inf:  # and not the time of a request that is being read
            self.request_until = self.loop.time() + self.limits.idle_time

    def _reply(self, request: HotRequest, reply: ServiceReply) -> None:
        request.response_complete = True
        if request.disconnected:
            return
        self.transport.write(self._bytes_of(request, reply))
        if not request.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def _bytes_of(self, request: HotRequest, reply: ServiceReply) -> bytes:
        headers = [*self.server_state.default_headers]
        headers += [(name.encode(), value.encode()) for name, value in reply.headers]
        if not request.keep_alive:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in headers]
        length = b"content-length: %d\r\n\r\n" % len(reply.body)
        return b"".join((STATUS_LINE[reply.status], *lines, length, reply.body))
