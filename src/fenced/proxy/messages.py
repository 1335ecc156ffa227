"""HTTP/1.1 messages: what may be passed on, how long a body is, and what is refused. Pure."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import NamedTuple

from fenced.errors import Indeterminate, Misuse
from fenced.http.protocol import SAFE_METHODS
from fenced.wire.problems import PROBLEM_MEDIA_TYPE, Problem

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
FENCE = (b"fenced-stamp", b"fenced-proof")
OVERRIDES = frozenset(b"x-http-method x-http-method-override x-method-override".split())
"""A framework may take the method from these, so a request with one of them is never safe."""
CHUNKED = -1
UNTIL_CLOSE = -2
"""Lengths of bodies that are not known beforehand."""
RECEIVED = memoryview(bytearray(262_144))
"""Every connection receives into this buffer: what has come is parsed, and so copied, before anything else happens."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_DROPPED = HOP_BY_HOP | {b"expect"}
_LOOKED_AT = _DROPPED | frozenset(
    (
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"transfer-encoding",
        b"upgrade",
        *FENCE,
        *OVERRIDES,
    )
)
_SAFE = frozenset(method.encode() for method in SAFE_METHODS)
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class BadMessage(Misuse):
    """A request that is answered with an HTTP error of its own, and not passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def problem(self) -> Problem:
        """A plain problem document: these errors are HTTP's own."""
        title = _REASONS[self.status].decode()
        document = {"type": "about:blank", "title": title, "status": self.status, "detail": str(self)}
        body = json.dumps(document).encode()
        headers = [("Content-Type", PROBLEM_MEDIA_TYPE), ("Content-Length", str(len(body)))]
        return Problem(self.status, headers, body)


class OutcomeUnknown(Indeterminate):
    """The upstream may have carried out the request, or may still do so. It may not be safe to repeat it."""

    retry = "no"  # type: ignore[assignment]


class PassedRequest(NamedTuple):
    """What the proxy has to know of a request, and the headers as they are passed on."""

    method: bytes
    target: bytes
    length: int
    """Of the body: bytes, or CHUNKED."""
    safe: bool
    expects: bool
    """The client waits for a 100 before it sends the body."""
    fence: Headers
    headers: Headers
    passed_on: bytes


def request_head(method: bytes, target: bytes, version: str, headers: Headers) -> PassedRequest:
    """Read the head of a request. BadMessage if it is ambiguous, or asks for what a proxy of this kind cannot do."""
    special: dict[bytes, list[bytes]] = {}
    fence: Headers = []
    lines: list[bytes] = []
    for header in headers:
        lowered = header[0].lower()
        if lowered in _LOOKED_AT:
            if lowered in FENCE:
                fence.append((lowered, header[1]))
            else:
                special.setdefault(lowered, []).append(header[1])
            if lowered in _DROPPED:
                continue
        lines.append(b"%b: %b\r\n" % header)
    if version != "1.1" and version != "1.0":
        raise BadMessage(505, "HTTP/1.1 or 1.0")
    if version == "1.1" and len(special.get(b"host", ())) != 1:
        raise BadMessage(400, "a request has one Host header")
    if method == b"CONNECT" or not (target.startswith(b"/") or (target == b"*" and method == b"OPTIONS")):
        raise BadMessage(501 if method == b"CONNECT" else 400, "the target of a request is a path")
    upgrade, expects = special.get(b"upgrade"), special.get(b"expect")
    if upgrade and upgrade != [b"h2c"]:  # a client that offers h2c also speaks HTTP/1.1
        raise BadMessage(501, "this proxy passes on requests alone: no upgrade to another protocol")
    if expects and (len(expects) > 1 or expects[0].lower() != b"100-continue"):
        raise BadMessage(417, "Expect is 100-continue or nothing")
    length = _length(special, version)
    if b"connection" in special and (named := _named(special[b"connection"])):
        lines = [
            b"%b: %b\r\n" % h for h in headers if (low := h[0].lower()) not in _DROPPED and low not in named
        ]
    if length == CHUNKED:
        lines.append(b"transfer-encoding: chunked\r\n")
    return PassedRequest(
        method,
        target,
        length,
        method in _SAFE and not (special.keys() & OVERRIDES),
        bool(expects) and length != 0,
        fence,
        headers,
        b"%b %b HTTP/1.1\r\n%bvia: 1.1 fenced\r\n\r\n" % (method, target, b"".join(lines)),
    )


def _length(special: dict[bytes, list[bytes]], version: str) -> int:
    """The length of a request's body. Two ways to read it would be two requests: that is refused."""
    encodings, lengths = special.get(b"transfer-encoding"), special.get(b"content-length")
    if encodings:
        if lengths or version != "1.1":
            raise BadMessage(400, "a body has a length or is chunked, not both")
        if len(encodings) > 1 or encodings[0].strip().lower() != b"chunked":
            raise BadMessage(501, "chunked is the only transfer coding")
        return CHUNKED
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise BadMessage(400, "a body has one length")
    return int(lengths[0])


def _named(values: list[bytes]) -> frozenset[bytes]:
    """The headers that a Connection header names, without those that say what the message is."""
    names = {name.strip().lower() for value in values for name in value.split(b",")}
    return frozenset(names - {b"host", b"content-length", b"", b"close", *HOP_BY_HOP, *FENCE})


class PassedResponse(NamedTuple):
    """The head of a response as it is passed on, and the length of its body."""

    status: int
    length: int
    lines: bytes


def response_head(status: int, reason: bytes, headers: Headers, *, to_head: bool) -> PassedResponse:
    """Read the head of an upstream's response. `to_head`: it answers HEAD, so it has no body."""
    length, lines = UNTIL_CLOSE, []
    named: frozenset[bytes] = frozenset()
    for header in headers:
        lowered = header[0].lower()
        if lowered == b"content-length":
            length = int(header[1])
        elif lowered == b"connection":
            named |= _named([header[1]])
        if lowered not in HOP_BY_HOP:
            lines.append(b"%b: %b\r\n" % header)
        elif lowered == b"transfer-encoding":
            length = CHUNKED
            named |= {b"content-length"}
    if named:
        lines = [
            b"%b: %b\r\n" % h for h in headers if (low := h[0].lower()) not in HOP_BY_HOP and low not in named
        ]
        length = CHUNKED if b"content-length" in named else length
    if to_head or status in (204, 304) or status < 200:
        length = 0
    return PassedResponse(status, length, b"HTTP/1.1 %d %b\r\n%b" % (status, reason, b"".join(lines)))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(problem: Problem, *, keep: bool, to_head: bool) -> bytes:
    """A whole answer of the proxy's own."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in problem.headers).encode()
    close = b"" if keep else b"connection: close\r\n"
    body = b"" if to_head else problem.body
    return b"HTTP/1.1 %d %b\r\n%b%b\r\n%b" % (problem.status, _REASONS[problem.status], lines, close, body)
