"""What the proxy passes on of a message, and what it refuses to pass on. Pure.

Both heads have been read by `http1`: they have one meaning. The lines of a head are passed on as they came, without
those that are for one connection alone.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.http.protocol import SAFE_METHODS
from fenced.http1.heads import (
    CHUNKED,
    HOP_BY_HOP,
    BadMessage,
    Headers,
    RequestHead,
    ResponseHead,
    fields_of,
    headers_of,
    lines_of,
    words_of,
)
from fenced.http1.writing import REASONS, ServerReply
from fenced.net.problems import Problem, plain_problem, problem

STAMP = b"fenced-stamp"
FENCE = (STAMP, b"fenced-proof")
OVERRIDES = frozenset(b"x-http-method x-http-method-override x-method-override".split())
"""A framework may take the method from these, so a request with one of them is never safe."""
REWRITES = frozenset(b"x-original-url x-rewrite-url".split())
"""A framework may take the path from these, so a request with one of them may be about another name."""
VIA = b"via: 1.1 fenced\r\n\r\n"

_DROPPED = HOP_BY_HOP | {b"expect"}
_LOOKED_AT = _DROPPED | {b"content-length", b"host", *FENCE} | OVERRIDES | REWRITES
"""The headers that mean something to a proxy."""


_LOOKED_AT_LINES, _CONNECTION = lines_of(*_LOOKED_AT - {b"host", b"content-length"}), lines_of(b"connection")
_ODD_NAMES = re.compile(rb"\n([0-9A-Za-z-]*+[^0-9A-Za-z:\r-][^:]*+):")
"""Names with another sign than hyphens."""
_SIGNS = re.compile(rb"[^0-9A-Za-z]")
_SAFE = frozenset(method.encode() for method in SAFE_METHODS)


class UpstreamUnreachable(Unavailable):
    """The upstream cannot be reached, and has got nothing of the request."""


class OutcomeUnknown(Indeterminate):
    """The upstream may have carried out the request, or may still do so. It may not be safe to repeat it."""

    retry = "no"  # type: ignore[assignment]


def reply_of(error: FencedError | BadMessage) -> ServerReply:
    """What the proxy answers by itself. The title says who has a problem: the proxy or the upstream."""
    if isinstance(error, BadMessage):
        # A plain problem document: these errors are HTTP's own.
        title = REASONS[error.status]
        found = plain_problem(
            error.status,
            {"type": "about:blank", "title": title, "status": error.status, "detail": str(error)},
        )
    else:
        title_of = "The upstream cannot be reached" if isinstance(error, UpstreamUnreachable) else None
        found = problem(error, by="proxy", title=title_of)
    return as_reply(found)


def as_reply(found: Problem) -> ServerReply:
    headers = tuple((name.lower(), value) for name, value in found.headers if name != "Content-Length")
    return ServerReply(found.status, headers, found.body)


class PassedRequest(NamedTuple):
    """What the proxy has to know of a request beyond its head, and the head as it is passed on."""

    safe: bool
    fence: Headers
    passed_on: bytes

    def passed_headers(self) -> Headers:
        """The headers that are passed on: what the upstream does not get says nothing about its request."""
        return headers_of(self.passed_on)


def passed(head: RequestHead) -> PassedRequest:
    """What is passed on of a request. BadMessage if it asks for what a proxy of this kind cannot do."""
    fields = fields_of(head.text)
    special: dict[bytes, list[bytes]] = {}
    for name, value in _LOOKED_AT_LINES.findall(head.text):
        special.setdefault(name.lower(), []).append(value.rstrip(b" \t"))
    for name in _ODD_NAMES.findall(head.text):
        # CGI and WSGI take X_HTTP_Method_Override for X-HTTP-Method-Override.
        if plain_name(name) in _LOOKED_AT:
            raise BadMessage(
                400, f"the header {name.decode().lower()} is written with hyphens, or not at all"
            )
    upgrade = special.get(b"upgrade")
    if upgrade and upgrade != [b"h2c"]:  # a client that offers h2c also speaks HTTP/1.1
        raise BadMessage(501, "this proxy passes on requests alone: no upgrade to another protocol")
    if special.keys() & _DROPPED:
        fields = _without(fields, _DROPPED, special.get(b"connection", ()))
    coding = b"transfer-encoding: chunked\r\n" if head.length == CHUNKED else b""
    passed_on = b"%b %b HTTP/1.1\r\n%b%b%b" % (head.method, head.target, fields, coding, VIA)
    fence = [(name, value) for name in FENCE if name in special for value in special[name]]
    safe = head.method in _SAFE and special.keys().isdisjoint(OVERRIDES)
    if (fence or not safe) and not special.keys().isdisjoint(REWRITES):
        raise BadMessage(
            400, "X-Original-URL or X-Rewrite-URL names another path, and the upstream may take that one"
        )
    return PassedRequest(safe, fence, passed_on)


def plain_name(name: bytes) -> bytes:
    """The name of a header as a service may read it: in lower case, and with one sign for all signs."""
    return _SIGNS.sub(b"-", name.lower())


def _without(fields: bytes, dropped: frozenset[bytes], connection: list[bytes] | tuple[()]) -> bytes:
    """The lines that are passed on. A Connection header may name more to drop, but nothing that says what is asked."""
    dropped |= words_of(connection) - {b"host", b"content-length", *FENCE}
    return b"".join(
        [line for line in fields.splitlines(True) if line.partition(b":")[0].lower() not in dropped]
    )


class PassedResponse(NamedTuple):
    """The head of a response as it is passed on, without the empty line at its end."""

    head: ResponseHead
    lines: bytes
    same: bool
    """It is passed on as it came."""


def passed_back(head: ResponseHead) -> PassedResponse:
    """What is passed on of a response."""
    if head.new and not head.hops:
        return PassedResponse(head, head.text[:-2], same=True)
    first, _, fields = head.text[:-2].partition(b"\r\n")
    connection = [value for _, value in _CONNECTION.findall(head.text)]
    lines = b"HTTP/1.1%b\r\n%b" % (first[8:], _without(fields, HOP_BY_HOP, connection))
    return PassedResponse(head, lines, same=False)
