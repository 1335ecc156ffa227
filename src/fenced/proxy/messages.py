"""HTTP/1.1 messages: what may be passed on, how long a body is, and what is refused. Pure.

A head is read by one regular expression: the grammar of RFC 9112, without what it only tolerates (folded lines, bare
line feeds, control characters, spaces before a colon). So an upstream cannot read in another way what is passed on, and
the lines of a head are passed on as they came.

Each line can be read in one way only, and no line is empty, so an expression that fails gives back one line after the
other and ends. The lines are not in a possessive group, `(...)*+`: before Python 3.11.5 such a group can keep the
beginning of a line that does not match (CPython issue 106052), and a head with an empty Content-Length would pass.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import NamedTuple

from fenced.errors import FencedError, Indeterminate, Misuse, Unavailable
from fenced.http.protocol import SAFE_METHODS
from fenced.net.problems import PROBLEM_MEDIA_TYPE, Problem, problem

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
STAMP = b"fenced-stamp"
FENCE = (STAMP, b"fenced-proof")
OVERRIDES = frozenset(b"x-http-method x-http-method-override x-method-override".split())
"""A framework may take the method from these, so a request with one of them is never safe."""
REWRITES = frozenset(b"x-original-url x-rewrite-url".split())
"""A framework may take the path from these, so a request with one of them may be about another name."""
CHUNKED = -1
UNTIL_CLOSE = -2
"""Lengths of bodies that are not known beforehand."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HEAD_END = b"\r\n\r\n"
VIA = b"via: 1.1 fenced\r\n\r\n"

_NAME = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_VALUE = rb"[\t\x20-\x7e\x80-\xff]*+"
_FIELDS = rb"((?:%b:%b\r\n)*)\r\n" % (_NAME, _VALUE)
_METHOD = rb"([A-Z][A-Z-]{0,31})"
_TARGET = rb"[!\"$-~]"
"""Without `#`: what follows that would be a part of the name here, and nothing at all for the upstream."""
_REQUEST = re.compile(rb"%b (%b++) HTTP/([0-9]\.[0-9])\r\n%b" % (_METHOD, _TARGET, _FIELDS))
_RESPONSE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: (%b))?\r\n%b" % (_VALUE, _FIELDS))
NO_HEAD = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r[^\n]")
"""What is in no head, so that nobody has to wait for its end."""

_DROPPED = HOP_BY_HOP | {b"expect"}
_LOOKED_AT = {
    name: name in _DROPPED for name in (*_DROPPED, b"content-length", b"host", *FENCE, *OVERRIDES, *REWRITES)
}
"""The headers that mean something to a proxy, and whether they are for this connection alone."""
_SIGNS = re.compile(rb"[^0-9A-Za-z]")

_OTHER = rb"(?!(?i:%b):)[0-9A-Za-z-]++:%b" % (b"|".join(map(re.escape, sorted(_LOOKED_AT))), _VALUE)
"""A header that means nothing here. Its name has no other sign than hyphens: see `_check_names`."""
_LENGTH = rb"[Cc]ontent-[Ll]ength:[ \t]*+([0-9]{1,18}+)"
_KEEP = rb"([Cc]onnection: ?+[Kk]eep-[Aa]live\r\n)"
_USUAL_REQUEST = re.compile(
    rb"(?!CONNECT )%b (/%b*+) HTTP/1\.1\r\n(?:(?(3)(?!))([Hh]ost):%b\r\n|(?(4)(?!))%b\r\n|"
    rb"(?(5)(?!))[Ff]enced-[Ss]tamp:[ \t]*+([!-~]++)\r\n|(?(6)(?!))%b|%b\r\n)*\r\n"
    % (_METHOD, _TARGET, _VALUE, _LENGTH, _KEEP, _OTHER)
)
_USUAL_RESPONSE = re.compile(
    rb"HTTP/1\.1 ([2-9][0-9]{2}) %b\r\n(?:(?(2)(?!))%b\r\n|(?(3)(?!))%b|%b\r\n)*\r\n"
    % (_VALUE, _LENGTH, _KEEP, _OTHER)
)
"""Heads that are nearly all heads: at most one of each header that matters, and no other one. `(?(3)(?!))` is where the
third group must not have matched yet. What these match is read in the same way without them, in more time."""
_BODILESS = (b"204", b"304")
_SAFE = frozenset(method.encode() for method in SAFE_METHODS)
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_Special = dict[bytes, list[bytes]]


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


class UpstreamUnreachable(Unavailable):
    """The upstream cannot be reached, and has got nothing of the request."""


class OutcomeUnknown(Indeterminate):
    """The upstream may have carried out the request, or may still do so. It may not be safe to repeat it."""

    retry = "no"  # type: ignore[assignment]


def problem_of(error: FencedError) -> Problem:
    """What the proxy answers by itself. The title says who has a problem: the proxy or the upstream."""
    if isinstance(error, BadMessage):
        return error.problem()
    title = "The upstream cannot be reached" if isinstance(error, UpstreamUnreachable) else None
    return problem(error, by="proxy", title=title)


class PassedRequest(NamedTuple):
    """What the proxy has to know of a request, and its head as it is passed on."""

    method: bytes
    target: bytes
    length: int
    """Of the body: bytes, or CHUNKED."""
    safe: bool
    expects: bool
    """The client waits for a 100 before it sends the body."""
    new: bool
    """Of HTTP/1.1, not 1.0."""
    keep: bool
    """The client may send another request on its connection."""
    fence: Headers
    text: bytes
    """The head as it came."""
    passed_on: bytes

    def headers(self) -> Headers:
        """Names in lower case, and values."""
        return _fields(self.text)

    def passed_headers(self) -> Headers:
        """The same for the head that is passed on: what the upstream does not get says nothing about its request."""
        return _fields(self.passed_on)


def request_head(data: bytes) -> PassedRequest | None:
    """Read the head of a request; None if this does not begin with one.

    BadMessage if it is ambiguous, or asks for what a proxy of this kind cannot do.
    """
    found = _USUAL_REQUEST.match(data)
    if found is None or not found[3]:
        found = _REQUEST.match(data)
        return None if found is None else any_request(found)
    method, target, _, length, stamp, keep = found.groups()
    text = found[0]
    passed_on = (text[:-2] if keep is None else _without(found, 6)) + VIA
    fence = [] if stamp is None else [(STAMP, stamp)]
    safe = method in _SAFE
    return PassedRequest(method, target, int(length or 0), safe, False, True, True, fence, text, passed_on)


def any_request(found: re.Match[bytes]) -> PassedRequest:
    """Read a head in any form that is allowed. BadMessage as above."""
    method, target, version, fields = found.groups()
    special, dropping = _looked_at(fields)
    _check_names(fields)
    new = version == b"1.1"
    if not new and version != b"1.0":
        raise BadMessage(505, "HTTP/1.1 or 1.0")
    if len(special.get(b"host", ())) != 1 and (new or b"host" in special):
        raise BadMessage(400, "a request has one Host header")
    if method == b"CONNECT" or not (target.startswith(b"/") or (target == b"*" and method == b"OPTIONS")):
        raise BadMessage(501 if method == b"CONNECT" else 400, "the target of a request is a path")
    length = _length(special, new, 0)
    keep, expects = _for_this_connection(special, new), b"expect" in special and length != 0
    kept = _kept(fields, special, _DROPPED) if dropping else fields
    coding = b"transfer-encoding: chunked\r\n" if length == CHUNKED else b""
    passed_on = b"%b %b HTTP/1.1\r\n%b%b%b" % (method, target, kept, coding, VIA)
    fence = [(name, value) for name in FENCE if name in special for value in special[name]]
    safe = method in _SAFE and special.keys().isdisjoint(OVERRIDES)
    if (fence or not safe) and not special.keys().isdisjoint(REWRITES):
        raise BadMessage(
            400, "X-Original-URL or X-Rewrite-URL names another path, and the upstream may take that one"
        )
    return PassedRequest(method, target, length, safe, expects, new, keep, fence, found[0], passed_on)


def _without(found: re.Match[bytes], group: int) -> bytes:
    """A head without one of its lines, and without the empty line at its end."""
    text = found[0]
    return text[: found.start(group) - found.start()] + text[found.end(group) - found.start() : -2]


def _looked_at(fields: bytes) -> tuple[_Special, bool]:
    """The headers that mean something here, by name; and whether some of them are not passed on."""
    special: _Special = {}
    dropping = False
    for line in fields.split(b"\r\n"):
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in _LOOKED_AT:
            dropping = dropping or _LOOKED_AT[name]
            if name in special:
                special[name].append(value.strip(b" \t"))
            else:
                special[name] = [value.strip(b" \t")]
    return special, dropping


def _check_names(fields: bytes) -> None:
    """BadMessage for X_HTTP_Method_Override and the like: CGI and WSGI take it for X-HTTP-Method-Override."""
    for line in fields.split(b"\r\n"):
        name = line.partition(b":")[0].lower()
        if name not in _LOOKED_AT and plain_name(name) in _LOOKED_AT:
            raise BadMessage(400, f"the header {name.decode()} is written with hyphens, or not at all")


def plain_name(name: bytes) -> bytes:
    """The name of a header as a service may read it: in lower case, and with one sign for all signs."""
    return _SIGNS.sub(b"-", name.lower())


def _fields(head: bytes) -> Headers:
    fields = head.partition(b"\r\n")[2]
    return [(name, value) for name, value, _ in _lines(fields[:-2])]


def _lines(fields: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """Name in lower case, value, and the whole line."""
    found = []
    for line in fields.splitlines(keepends=True):
        name, _, value = line.partition(b":")
        found.append((name.lower(), value.strip(b" \t\r\n"), line))
    return found


def _length(special: _Special, new: bool, default: int) -> int:
    """The length of a body. Two ways to read it would be two messages: that is refused."""
    encodings, lengths = special.get(b"transfer-encoding"), special.get(b"content-length")
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


def _for_this_connection(special: _Special, new: bool) -> bool:
    """Look at the headers that are not passed on. True: the client's connection is kept."""
    upgrade, expects = special.get(b"upgrade"), special.get(b"expect")
    if upgrade and upgrade != [b"h2c"]:  # a client that offers h2c also speaks HTTP/1.1
        raise BadMessage(501, "this proxy passes on requests alone: no upgrade to another protocol")
    if expects and (len(expects) > 1 or expects[0].lower() != b"100-continue"):
        raise BadMessage(417, "Expect is 100-continue or nothing")
    return _keeps(special, new)


def _keeps(special: _Special, new: bool) -> bool:
    words = _words(special)
    return b"close" not in words and (new or b"keep-alive" in words)


def _words(special: _Special) -> set[bytes]:
    """What the Connection headers say, in lower case."""
    return {
        word.strip(b" \t").lower() for value in special.get(b"connection", ()) for word in value.split(b",")
    }


def _kept(fields: bytes, special: _Special, dropped: frozenset[bytes]) -> bytes:
    """The lines that are passed on. A Connection header may name more to drop, but nothing that says what is asked."""
    dropped |= _words(special) - {b"host", b"content-length", *FENCE}
    return b"".join([line for name, _, line in _lines(fields) if name not in dropped])


class BadAnswer(ValueError):
    """What an upstream sends is no answer, or one that can be read in two ways."""


class PassedResponse(NamedTuple):
    """The head of a response as it is passed on, without the empty line at its end."""

    status: int
    length: int
    """Of the body: bytes, CHUNKED or UNTIL_CLOSE."""
    keep: bool
    """The upstream takes another request on this connection."""
    lines: bytes
    size: int
    """Of the head as it came."""
    same: bool
    """It is passed on as it came."""


def response_head(data: bytes, at: int, *, to_head: bool) -> PassedResponse | None:
    """Read the head of an upstream's response; None if there is none at `at`, BadAnswer if it is ambiguous.

    `to_head`: it answers HEAD, so it has no body.
    """
    found = _USUAL_RESPONSE.match(data, at)
    if found is None or found[2] is None or to_head or found[1] in _BODILESS:
        found = _RESPONSE.match(data, at)
        return None if found is None else any_response(found, to_head)
    status, length, keep = found.groups()
    text = found[0]
    lines = text[:-2] if keep is None else _without(found, 3)
    return PassedResponse(int(status), int(length), True, lines, len(text), keep is None)


def any_response(found: re.Match[bytes], to_head: bool) -> PassedResponse:
    """Read a head in any form that is allowed. BadAnswer as above."""
    minor, digits, reason, fields = found.groups()
    status, new = int(digits), minor == b"1"
    special, dropping = _looked_at(fields)
    try:
        length = _length(special, new, UNTIL_CLOSE)
    except BadMessage as error:
        raise BadAnswer(str(error)) from error
    if to_head or digits in _BODILESS or status < 200:
        length = 0
    kept = _kept(fields, special, HOP_BY_HOP) if dropping else fields
    lines = b"HTTP/1.1 %d %b\r\n%b" % (status, reason or b"", kept)
    keep = length != UNTIL_CLOSE and _keeps(special, new)
    return PassedResponse(status, length, keep, lines, len(found[0]), same=False)


def answer(found: Problem, *, keep: bool, to_head: bool) -> bytes:
    """A whole answer of the proxy's own."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in found.headers).encode()
    close = b"" if keep else b"connection: close\r\n"
    body = b"" if to_head else found.body
    return b"HTTP/1.1 %d %b\r\n%b%b\r\n%b" % (found.status, _REASONS[found.status], lines, close, body)
