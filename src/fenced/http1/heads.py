"""The heads of HTTP/1.1 messages: what is one, how long the body behind it is, and what is refused. Pure.

A head is read by one regular expression: the grammar of RFC 9112, without what it only tolerates (folded lines, bare
line feeds, control characters, spaces before a colon). What can be read in two ways is refused, so nobody behind or in
front of us reads another message in the same bytes. tests/http1/test_heads.py has a table of what is accepted, and why.

Each line can be read in one way only, and no line is empty, so an expression that fails gives back one line after the
other and ends. The lines are not in a possessive group, `(...)*+`: before Python 3.11.5 such a group can keep the
beginning of a line that does not match (CPython issue 106052), and a head with an empty Content-Length would pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, and values, in the order of the message."""

HEAD_END = b"\r\n\r\n"
HEADERS_MAX = 100
CHUNKED = -1
UNTIL_CLOSE = -2
"""Lengths of bodies that are not known beforehand."""
REMEMBERED_MAX = 2000
"""How many heads are remembered. Clients that send a new head with each request make it forget all of them."""
REMEMBERED_BYTES_MAX = 2000
"""How long a head is that is remembered."""

_NAME = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_VALUE = rb"[\t\x20-\x7e\x80-\xff]*+"
_FIELDS = rb"((?:%b:%b\r\n)*)\r\n" % (_NAME, _VALUE)
_METHOD = rb"([A-Z][A-Z-]{0,31})"
_TARGET = rb"([!\"$-~]++)"
"""Without `#`: what follows that would be a part of the name for one reader, and nothing at all for another."""
_REQUEST = re.compile(rb"%b %b HTTP/([0-9]\.[0-9])\r\n%b" % (_METHOD, _TARGET, _FIELDS))
_RESPONSE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: %b)?\r\n%b" % (_VALUE, _FIELDS))
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
"""Headers that are for one connection alone."""


def lines_of(*names: bytes) -> re.Pattern[bytes]:
    """Finds the lines of these headers in a head: names and values. It looks for line feeds first, which is quick."""
    either = b"|".join(map(re.escape, sorted(names)))
    return re.compile(rb"\n(%b):[ \t]*+([^\r]*)" % either, re.IGNORECASE)


_FRAMING = lines_of(b"host", b"content-length", b"expect", *HOP_BY_HOP)
"""The headers that say where a message ends, and what becomes of its connection."""
NO_HEAD = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r[^\n]")
"""What is in no head, so that nobody has to wait for its end."""
_BODILESS = (204, 304)
_Framing = dict[bytes, list[bytes]]


class BadMessage(ValueError):
    """These bytes are no message, or an ambiguous one. A server answers with `status`, and reads nothing more."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestHead:
    """The head of a request. The same bytes make the same one, so it may be that of several requests."""

    __slots__ = ("expects", "keep", "length", "method", "new", "note", "target", "text")

    def __init__(
        self,
        method: bytes,
        target: bytes,
        length: int,
        text: bytes,
        *,
        keep: bool = True,
        new: bool = True,
        expects: bool = False,
    ) -> None:
        self.method = method
        self.target = target
        self.length = length
        """Of the body: bytes, or CHUNKED."""
        self.text = text
        """The head as it came."""
        self.keep = keep
        """The client may send another request on its connection."""
        self.new = new
        """Of HTTP/1.1, not 1.0."""
        self.expects = expects
        """The client waits for a 100 before it sends the body."""
        self.note: Any = None
        """What the handler remembers of this head."""

    def headers(self) -> Headers:
        return headers_of(self.text)


class ResponseHead:
    """The head of a response."""

    __slots__ = ("hops", "keep", "length", "new", "status", "text")

    def __init__(self, status: int, length: int, text: bytes, *, keep: bool, new: bool, hops: bool) -> None:
        self.status = status
        self.length = length
        """Of the body: bytes, CHUNKED or UNTIL_CLOSE."""
        self.text = text
        """The head as it came."""
        self.keep = keep
        """The server takes another request on this connection."""
        self.new = new
        self.hops = hops
        """It has headers of HOP_BY_HOP."""

    def headers(self) -> Headers:
        return headers_of(self.text)


def request_head(text: bytes) -> RequestHead:
    """Read the head of a request, which ends with the first empty line. BadMessage if it is none, or ambiguous."""
    found = _REQUEST.fullmatch(text)
    if found is None:
        raise BadMessage(400, "not a request of HTTP/1.1")
    method, target, version, fields = found.groups()
    if fields.count(b"\n") > HEADERS_MAX:
        raise BadMessage(431, f"a request has at most {HEADERS_MAX} headers")
    framing, new = _framing(text), version == b"1.1"
    if not new and version != b"1.0":
        raise BadMessage(505, "HTTP/1.1 or 1.0")
    if len(framing.get(b"host", ())) != 1 and (new or b"host" in framing):
        raise BadMessage(400, "a request has one Host header")
    if method == b"CONNECT" or not (target.startswith(b"/") or (target == b"*" and method == b"OPTIONS")):
        raise BadMessage(501 if method == b"CONNECT" else 400, "the target of a request is a path")
    length, expects = _length(framing, new, 0), framing.get(b"expect")
    if expects and (len(expects) > 1 or expects[0].lower() != b"100-continue"):
        raise BadMessage(417, "Expect is 100-continue or nothing")
    return RequestHead(
        method,
        target,
        length,
        text,
        keep=_keeps(framing, new),
        new=new,
        expects=bool(expects and length and new),
    )


def response_head(data: bytes, at: int = 0, *, to_head: bool = False) -> ResponseHead | None:
    """Read the head of a response; None if there is none at `at`, BadMessage if it is ambiguous.

    `to_head`: it answers HEAD, so it has no body.
    """
    found = _RESPONSE.match(data, at)
    if found is None:
        return None
    text, (minor, digits, _) = found[0], found.groups()
    framing, status, new = _framing(text), int(digits), minor == b"1"
    length = _length(framing, new, UNTIL_CLOSE)
    if status < 200:
        if length not in (0, UNTIL_CLOSE):
            raise BadMessage(502, "an interim response with a body")
        length = 0
    elif to_head or status in _BODILESS:
        length = 0
    keep = length != UNTIL_CLOSE and _keeps(framing, new)
    hops = not framing.keys().isdisjoint(HOP_BY_HOP)
    return ResponseHead(status, length, text, keep=keep, new=new, hops=hops)


def _framing(text: bytes) -> _Framing:
    framing: _Framing = {}
    for name, value in _FRAMING.findall(text):
        framing.setdefault(name.lower(), []).append(value.rstrip(b" \t"))
    return framing


def _length(framing: _Framing, new: bool, default: int) -> int:
    """The length of a body. Two ways to read it would be two messages: that is refused."""
    encodings, lengths = framing.get(b"transfer-encoding"), framing.get(b"content-length")
    if encodings:
        if lengths or not new:
            raise BadMessage(400, "a body has a length or is chunked, not both")
        if len(encodings) > 1 or encodings[0].lower() != b"chunked":
            raise BadMessage(501, "chunked is the only transfer coding")
        return CHUNKED
    if not lengths:
        return default
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise BadMessage(400, "a body has one length")
    return int(lengths[0])


def _keeps(framing: _Framing, new: bool) -> bool:
    words = words_of(framing.get(b"connection", ()))
    return b"close" not in words and (new or b"keep-alive" in words)


def words_of(values: Iterable[bytes]) -> set[bytes]:
    """The words of Connection headers, in lower case."""
    return {word.strip(b" \t").lower() for value in values for word in value.split(b",")}


def fields_of(head: bytes) -> bytes:
    """The lines of the headers of a whole head."""
    return head.partition(b"\r\n")[2][:-2]


def headers_of(head: bytes) -> Headers:
    """The headers of a whole head."""
    found = []
    for line in fields_of(head).split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        found.append((name.lower(), value.strip(b" \t")))
    return found


class Heads:
    """Reads the heads of requests, and remembers them: clients send nearly the same head with each request.

    A head is a function of its bytes alone, so one that is remembered is the one that would be read.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, RequestHead] = {}

    def read(self, text: bytes) -> RequestHead:
        """As `request_head`."""
        found = self._known.get(text)
        if found is None:
            found = request_head(text)
            if len(text) <= REMEMBERED_BYTES_MAX:
                if len(self._known) >= REMEMBERED_MAX:
                    self._known.clear()
                self._known[text] = found
        return found
