"""HTTP/1.1, both roles: messages to bytes, and events from bytes that arrive in any pieces. Nothing here does I/O.

Strict, because a program and a proxy that frame a message differently can be made to see different requests. Messages
that RFC 9112 calls ambiguous are refused, and so are rarely used features (folded headers, chunk extensions, bare line
feeds).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

HEAD_BYTES_MAX = 32_768
HEADERS_MAX = 100
BODY_BYTES_MAX = 2**24
"""The default limit of a reader. It bounds a body whether or not its length is announced."""
CHUNK_LINE_BYTES_MAX = 18

Headers = Sequence[tuple[str, str]]
"""Names in lower case, in the order of the message."""

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(r"[!-~]+")
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_REQUEST_LINE = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([!-~]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_LENGTH = re.compile(r"[0-9]{1,15}")


class MalformedHttp(ValueError):
    """These bytes are no message, or an ambiguous one. A server answers with `status` and closes the connection."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class RequestHead(NamedTuple):
    method: str
    target: str
    headers: Headers
    keep_alive: bool
    """Whether the client may send another request on this connection."""


class ResponseHead(NamedTuple):
    status: int
    reason: str
    headers: Headers
    keep_alive: bool


class EndOfMessage:
    """The message is complete."""


END = EndOfMessage()
Event = RequestHead | ResponseHead | bytes | EndOfMessage
"""A head, then pieces of the body, then END. An interim response (1xx) has a head and nothing else."""


class HttpReader:
    """Parses what the peer sends: requests, or the responses to requests that were announced by `expect`."""

    def __init__(self, reads: Literal["requests", "responses"], *, body_max: int = BODY_BYTES_MAX) -> None:
        self._requests = reads == "requests"
        self._body_max = body_max
        self._data = bytearray()
        self._scanned = 0
        """How many bytes were already searched for the end of a head."""
        self._ended = False
        self._methods: deque[str] = deque()
        self._state = self._head
        self._left = 0
        self._taken = 0

    def expect(self, method: str) -> None:
        """A client has sent a request: expect its response after those of earlier requests."""
        self._methods.append(method)

    def feed(self, data: bytes) -> None:
        self._data += data

    def feed_end(self) -> None:
        """The peer has closed its side."""
        self._ended = True

    @property
    def between_messages(self) -> bool:
        """Whether no message is half read: only then the end of the connection loses nothing."""
        return self._state == self._head and not self._data and not self._methods

    def next(self) -> Event | None:
        """The next event, or None: feed more bytes."""
        return self._state()

    # Heads.

    def _head(self) -> Event | None:
        if not self._data and not self._ended:
            return None
        if self._data and not self._requests and not self._methods:
            raise MalformedHttp("a response to no request of ours")
        lines = self._lines()
        if lines is None:
            return None
        headers = [_header(line) for line in lines[1:]]
        return self._request(lines[0], headers) if self._requests else self._response(lines[0], headers)

    def _lines(self) -> list[str] | None:
        """The lines up to the next empty one."""
        end = self._data.find(b"\r\n\r\n", max(0, self._scanned - 3))
        self._scanned = len(self._data)
        if (end if end >= 0 else len(self._data)) > HEAD_BYTES_MAX:
            raise MalformedHttp(f"a head of more than {HEAD_BYTES_MAX} bytes", 431)
        if end < 0:
            if self._ended and (self._data or self._methods):
                raise MalformedHttp("the connection ended before the message")
            return None
        lines = bytes(self._data[:end]).decode("latin-1").split("\r\n")
        if len(lines) > HEADERS_MAX + 1:
            raise MalformedHttp(f"more than {HEADERS_MAX} headers", 431)
        self._consume(end + 4)
        return lines

    def _request(self, line: str, headers: Headers) -> RequestHead:
        found = _REQUEST_LINE.fullmatch(line)
        if found is None:
            raise MalformedHttp("a first line that is no request")
        method, target, minor = found.groups()
        if len(_all(headers, "host")) != 1 and (minor == "1" or _all(headers, "host")):
            raise MalformedHttp("not exactly one host header")
        chunked, length = self._framing(headers, minor)
        self._begin_body(chunked, length or 0)
        return RequestHead(method, target, headers, _keeps(headers, minor))

    def _response(self, line: str, headers: Headers) -> ResponseHead:
        found = _STATUS_LINE.fullmatch(line)
        if found is None:
            raise MalformedHttp("a first line that is no response")
        minor, status, reason = found[1], int(found[2]), found[3] or ""
        chunked, length = self._framing(headers, minor)
        if status == 101:
            raise MalformedHttp("a change of protocol, although none was requested")
        if status < 200:
            if chunked or length:
                raise MalformedHttp("an interim response with a body")
            return ResponseHead(status, reason, headers, True)
        method = self._methods.popleft()
        if method == "CONNECT":
            raise MalformedHttp("CONNECT is not supported")
        keeps = _keeps(headers, minor)
        if method == "HEAD" or status in (204, 304):
            self._begin_body(False, 0)
        elif not chunked and length is None:
            self._state, self._taken, keeps = self._until_end, 0, False
        else:
            self._begin_body(chunked, length or 0)
        return ResponseHead(status, reason, headers, keeps)

    def _framing(self, headers: Headers, minor: str) -> tuple[bool, int | None]:
        """Whether the body is chunked, and its length if the headers give one."""
        codings, lengths = _all(headers, "transfer-encoding"), _all(headers, "content-length")
        if codings and (lengths or minor == "0"):
            raise MalformedHttp("two ways to find the end of a body")
        if codings and [coding.lower() for coding in codings] != ["chunked"]:
            raise MalformedHttp("a transfer coding other than chunked", 501)
        if not lengths:
            return bool(codings), None
        if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
            raise MalformedHttp("a content length that is none, or two of them")
        if (length := int(lengths[0])) > self._body_max:
            raise MalformedHttp(f"a body of more than {self._body_max} bytes", 413)
        return False, length

    # Bodies.

    def _begin_body(self, chunked: bool, length: int) -> None:
        self._taken, self._left = 0, length
        self._state = self._chunk_size if chunked else self._sized

    def _sized(self) -> Event | None:
        return self._piece() if self._left else self._finish()

    def _piece(self) -> bytes | None:
        """The next bytes of the body that have arrived, or None."""
        if not self._data:
            return self._more()
        return self._take(min(self._left, len(self._data)))

    def _take(self, count: int) -> bytes:
        piece = bytes(self._data[:count])
        self._consume(count)
        self._left -= count
        self._taken += count
        if self._taken > self._body_max:
            raise MalformedHttp(f"a body of more than {self._body_max} bytes", 413)
        return piece

    def _until_end(self) -> Event | None:
        if self._data:
            return self._take(len(self._data))
        return self._finish() if self._ended else None

    def _chunk_size(self) -> Event | None:
        end = self._data.find(b"\r\n")
        if not 0 <= end <= CHUNK_LINE_BYTES_MAX:
            if end > 0 or len(self._data) > CHUNK_LINE_BYTES_MAX:
                raise MalformedHttp("a chunk without a size")
            return self._more()
        line = bytes(self._data[:end])
        if not _SIZE.fullmatch(line):
            raise MalformedHttp("a chunk without a size")
        self._left = int(line, 16)
        if self._taken + self._left > self._body_max:
            raise MalformedHttp(f"a body of more than {self._body_max} bytes", 413)
        if self._left:
            self._consume(end + 2)
            self._state = self._chunk
        else:
            self._consume(end)  # the line's end stays: with an empty line after it, it ends the trailers
            self._state = self._trailers
        return self._state()

    def _chunk(self) -> Event | None:
        if self._left:
            return self._piece()
        if len(self._data) < 2:
            return self._more()
        if self._data[:2] != b"\r\n":
            raise MalformedHttp("a chunk of another size than it says")
        self._consume(2)
        self._state = self._chunk_size
        return self._state()

    def _trailers(self) -> Event | None:
        """Check the trailers and drop them."""
        lines = self._lines()
        if lines is None:
            return None
        for line in lines[1:]:
            _header(line)
        return self._finish()

    def _finish(self) -> EndOfMessage:
        self._state = self._head
        return END

    def _more(self) -> bytes | None:
        """None: more bytes are needed. MalformedHttp if the peer has closed its side."""
        if self._ended:
            raise MalformedHttp("the connection ended before the message")
        return None

    def _consume(self, count: int) -> None:
        del self._data[:count]
        self._scanned = 0


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise MalformedHttp("a header that is none, or goes over two lines")
    return name.lower(), value.strip(" \t")


def _all(headers: Headers, name: str) -> list[str]:
    return [value for each, value in headers if each == name]


def _keeps(headers: Headers, minor: str) -> bool:
    words = [word.strip().lower() for value in _all(headers, "connection") for word in value.split(",")]
    return minor == "1" and "close" not in words


# Writing.


def request(method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes = b"") -> bytes:
    """A complete request. The caller passes the host header; the length is added."""
    if not _TOKEN.fullmatch(method) or not _TARGET.fullmatch(target):
        raise ValueError("a method or a target that cannot be sent")
    sized = [("content-length", str(len(body)))] if body or method in ("POST", "PUT", "PATCH") else []
    return _written(f"{method} {target} HTTP/1.1", [*headers, *sized]) + body


def response(status: int, reason: str, headers: Iterable[tuple[str, str]], body: bytes = b"") -> bytes:
    """A complete response; the length is added. Not for HEAD, whose response has a length and no body."""
    bodiless = status < 200 or status in (204, 304)
    if body and bodiless:
        raise ValueError(f"a response with status {status} has no body")
    sized = [] if bodiless else [("content-length", str(len(body)))]
    return _written(f"HTTP/1.1 {status} {reason}", [*headers, *sized]) + body


def chunked_response(status: int, reason: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """The head of a response whose body is sent by `chunk`, and ended by LAST_CHUNK."""
    return _written(f"HTTP/1.1 {status} {reason}", [*headers, ("transfer-encoding", "chunked")])


def chunk(data: bytes) -> bytes:
    """A piece of a body; empty for empty data, because an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


LAST_CHUNK = b"0\r\n\r\n"


def _written(first: str, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [first]
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError("a header that cannot be sent")
        lines.append(f"{name}: {value}")
    if not _VALUE.fullmatch(first):
        raise ValueError("a first line that cannot be sent")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
