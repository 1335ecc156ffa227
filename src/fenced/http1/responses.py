"""The responses that a client gets, as events, from bytes that arrive in any pieces. Pure."""

from __future__ import annotations

from fenced.http1.bodies import Body, body_of
from fenced.http1.heads import HEAD_END, HEADERS_MAX, UNTIL_CLOSE, BadMessage, ResponseHead, response_head

HEAD_BYTES_MAX = 32_768


class EndOfResponse:
    """The response is complete."""


END = EndOfResponse()
Event = ResponseHead | bytes | EndOfResponse
"""A head, then pieces of the body, then END. An interim response (1xx) has a head and nothing else."""


class ResponseReader:
    """Reads the response to one request at a time, on a connection that the client keeps."""

    def __init__(self, body_max: int) -> None:
        self._body_max = body_max
        """It bounds a body whether or not its length is announced."""
        self._data = b""
        self._method: str | None = None
        """Of the request whose response has not come to its end."""
        self._body: Body | None = None
        self._length = self._size = 0
        self._events: list[Event] = []

    def expect(self, method: str) -> None:
        """A request was sent. BadMessage if something has come that nobody had asked for."""
        if not self.is_between:
            raise BadMessage(502, "a response to no request of ours")
        self._method = method

    def feed(self, data: bytes) -> None:
        """Bytes have arrived."""
        self._data += data

    def feed_end(self) -> None:
        """The peer has closed its side. BadMessage if the response is not complete."""
        while self._read():
            pass
        if self._body is not None and self._length == UNTIL_CLOSE:
            self._body, self._method = None, None
            self._events.append(END)
        elif not self.is_between:
            raise BadMessage(502, "the connection ended before the message")

    @property
    def is_between(self) -> bool:
        """Whether no response is half read: only then the connection can be used again."""
        return self._method is None and not self._data

    def next(self) -> Event | None:
        """The next event, or None: feed more bytes. BadMessage if this is no response."""
        while not self._events and self._read():
            pass
        return self._events.pop(0) if self._events else None

    def _read(self) -> bool:
        """Read on; False if more bytes are needed."""
        if not self._data and not (self._body is not None and self._length == 0):
            return False
        if self._body is not None:
            return self._read_body(self._body)
        if self._method is None:
            raise BadMessage(502, "a response to no request of ours")
        head = response_head(self._data, to_head=self._method == "HEAD")
        if head is None:
            if HEAD_END in self._data or len(self._data) > HEAD_BYTES_MAX:
                raise BadMessage(502, "a head that is no response")
            return False
        if head.status == 101 or head.text.count(b"\n") > HEADERS_MAX + 2 or len(head.text) > HEAD_BYTES_MAX:
            raise BadMessage(502, "a change of protocol, or a head that is too long")
        self._data = self._data[len(head.text) :]
        self._events.append(head)
        if head.status >= 200:
            self._check_size(head.length)
            self._body, self._length, self._size = body_of(head.length), head.length, 0
        return True

    def _read_body(self, body: Body) -> bool:
        pieces, rest = body.feed(self._data)
        self._data = b"" if rest is None else bytes(rest)
        for piece in pieces:
            self._size += len(piece)
            self._check_size(self._size)
            if piece:
                self._events.append(bytes(piece))
        if rest is not None:
            self._body, self._method = None, None
            self._events.append(END)
        return rest is not None or bool(self._events)

    def _check_size(self, size: int) -> None:
        if size > self._body_max:
            raise BadMessage(502, f"a body of more than {self._body_max} bytes")
