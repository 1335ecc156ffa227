"""The short way of the requests that a service gets most: no task, no scope and no request object of a framework.

A request takes it if its route is in `HOT`, its head and its body have arrived together, everything before it on its
connection is answered. Every other request goes on to the application, with the same bytes. Both ways use the same
functions of `Api` for access, limits, operations and answers.

A client sends nearly the same head with each request, so connections remember heads: what the parser has read in some
bytes, it reads in the same bytes again. There is no second parser that could read something else in them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from starlette.datastructures import Address, QueryParams
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from fenced.service.api import Api, body_bytes_max
from fenced.service.connections import BoundedConnection
from fenced.service.held import LINES_HEADERS, HeldAnswer
from fenced.service.hot_requests import HotHead, HotRequest, RawHeaders
from fenced.service.replies import JSON, ServiceReply
from fenced.service.routes import ROUTES
from fenced.values.model import BatchAnswer

HOT = {
    route.path.encode(): route for route in ROUTES if route.handler in ("ask", "renew", "release", "batch")
}
HEAD_END = b"\r\n\r\n"
HEADS_MAX = 2000
"""How many heads an instance remembers. Clients that send a new head with each request make it forget all of them."""
HEAD_REMEMBERED_MAX = 2000
"""How long a head is that is remembered."""
_LONG_WAY = frozenset({b"expect", b"transfer-encoding"})
"""Headers of requests that wait for a reply before their body, or whose body has no length."""


@lru_cache(256)
def _query_of(text: bytes) -> Mapping[str, str]:
    """A client sends the same one with each request."""
    return dict(QueryParams(text))


class HotConnection(BoundedConnection):
    """One connection of a client."""

    api: Api
    heads: dict[bool, dict[bytes, HotHead]]
    """The heads that the connections of this instance remember, without the empty line at their ends.

    Those of Unix sockets (True) are separate: from them a head is admitted for any host.
    """
    reply_heads: ReplyHeads

    _body: list[bytes] | None = None
    """The body of the request that is being read, as long as it may take the short way."""

    _long = False
    """One of its headers says that it takes the long way."""

    _data: bytes | None = None
    """What is being parsed, if it began with a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.request = HotRequest(None if self.client is None else Address(*self.client))
        self._heads = self.heads[self.client is None]
        self._short = self.app is self.config.loaded_app  # and not that of a connection beyond the limit

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        if self.between and (cycle is None or cycle.response_complete):
            end = data.find(HEAD_END, 0, HEAD_REMEMBERED_MAX)
            head = self._heads.get(data[:end]) if end > 0 else None
            if head is not None and head.length == len(data) - end - 4 and self._is_taken(head.namespace):
                # The parser does not see this request. It is between two requests before and after it.
                self._serve(head, data[end + 4 :])
                return
        self._data = data if self.between else None
        super().data_received(data)
        self._data = None
        if self._body is not None and not self.transport.is_closing():
            # The rest of the body comes later. The application bounds the time of that.
            self._go_on()

    def _is_taken(self, namespace: str) -> bool:
        """Whether requests of this connection for that namespace may take the short way."""
        return self._short and self.api.namespaces.has(namespace) and not self.transport.is_closing()

    def _serve(self, head: HotHead, body: bytes) -> None:
        self.request_until = math.inf
        request = self.request
        request.head, request.response_complete = head, False
        self.cycle = request  # type: ignore[assignment]
        self.api.serve(self, body)

    def finish(self, found: Sequence[BatchAnswer] | Exception) -> None:
        """The store has answered the request that was served last."""
        self.api.finish(self, found)

    # Reading: the parser calls these in this order.

    def on_message_begin(self) -> None:
        self.begin_head()
        self.url = b""
        self.headers = []
        self.expect_100_continue = self._long = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # a trailer: whoever is in front of this instance has not looked at it
        self.count_head(len(name) + len(value) + 4)
        name = name.lower()
        if name in _LONG_WAY:
            self._long = True
            super().on_header(name, value)
        else:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._data = None  # a head that is remembered is one that was parsed once
            return  # it is parsed again, without that
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
            and not self._long
            and (self.cycle is None or self.cycle.response_complete)
            and self._is_taken(_query_of(query).get("namespace", "default"))
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
            self.body_bytes += len(body)
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self.between = self.parser.should_keep_alive()
        data, self._data = self._data, None  # only the first request in these bytes may be all of them
        if self._body is None:
            super().on_message_complete()
            return
        path, _, query_text = self.url.partition(b"?")
        route, body, query = HOT[path], b"".join(self._body), _query_of(query_text)
        if len(body) > body_bytes_max(route):
            self._go_on()
            super().on_message_complete()
            return
        self._body = None
        head = HotHead(route, RawHeaders(self.headers), query, query.get("namespace", "default"), len(body))
        if data is not None:
            self._remember(head, data)
        self._serve(head, body)

    def _remember(self, head: HotHead, data: bytes) -> None:
        """The parser has read this head in `data`. Remember it if nothing else is there but the body."""
        end = data.find(HEAD_END, 0, HEAD_REMEMBERED_MAX)
        if end > 0 and len(data) - end - 4 == head.length:
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            self._heads[data[:end]] = head

    # Replying.

    def on_response_complete(self) -> None:
        """As uvicorn does it, but without a timer for each request: `end_if_late` closes idle connections."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.request_until == math.inf:  # and not the time of a request that is being read
            self.request_until = self.loop.time() + self.limits.idle_time

    def reply(self, reply: ServiceReply) -> None:
        if not self.request.disconnected:
            self._finish(self._bytes_of(reply))

    def _finish(self, data: bytes) -> None:
        """Send the last bytes of a reply."""
        request = self.request
        request.response_complete = True
        self.transport.write(data)
        if not request.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def hold(self, held: HeldAnswer) -> None:
        """Send what a waiter gets at once. The rest is sent without a task, as soon as `held` has it."""
        request = self.request
        if request.disconnected:
            held.close()
            return
        if held.in_lines:
            head = _head_of(
                202, self.server_state.default_headers, LINES_HEADERS, close=not request.keep_alive
            )
            chunked = b"transfer-encoding: chunked\r\n\r\n"
            self.transport.write(b"%b%b%x\r\n%b\r\n" % (head, chunked, len(held.first), held.first))
        held.then(self._release)

    def _release(self, rest: bytes) -> None:
        """Send the rest of a held answer."""
        held, self.request.held = self.request.held, None
        if held is not None and held.in_lines:
            self._finish(b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest))
        else:
            self.reply(ServiceReply(202, JSON, rest))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Not by uvicorn if another request was behind it.
        self.request.disconnected = True
        if self.request.held is not None:
            self.request.held.close()

    def _bytes_of(self, reply: ServiceReply) -> bytes:
        default = self.server_state.default_headers
        if reply.headers is not JSON or not self.request.keep_alive:
            head = _head_of(reply.status, default, reply.headers, close=not self.request.keep_alive)
        else:
            head = self.reply_heads.get(default, reply)
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(reply.body), reply.body)


def _head_of(
    status: int,
    default: list[tuple[bytes, bytes]],
    headers: Sequence[tuple[str, str]],
    *,
    close: bool = False,
) -> bytes:
    """The head of a reply, without the line that says how long its body is."""
    lines = default + [(name.encode(), value.encode()) for name, value in headers]
    lines += [(b"connection", b"close")] * close
    return b"".join((STATUS_LINE[status], *(b"%b: %b\r\n" % line for line in lines)))


class ReplyHeads:
    """The heads of the usual replies, by status. uvicorn makes a new list of default headers every second."""

    def __init__(self) -> None:
        self._default: list[tuple[bytes, bytes]] = []
        self._known: dict[int, bytes] = {}

    def get(self, default: list[tuple[bytes, bytes]], reply: ServiceReply) -> bytes:
        """For a reply whose headers are `JSON`."""
        if default is not self._default:
            self._default, self._known = default, {}
        head = self._known.get(reply.status)
        if head is None:
            head = self._known[reply.status] = _head_of(reply.status, default, reply.headers)
        return head


def connections_of(api: Api) -> type[HotConnection]:
    """The class of the connections of one instance: uvicorn makes them without arguments of ours."""
    own = {"limits": api.limits, "api": api, "heads": {False: {}, True: {}}, "reply_heads": ReplyHeads()}
    return type("ConnectionOfInstance", (HotConnection,), own)
