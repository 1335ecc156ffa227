"""gRPC over HTTP/2, as much of both as one call at a time needs. Pure: bytes come in, bytes go out.

A connection carries one call after another, never two at once. So there is one current stream, and frames of earlier
streams are ignored. The header table size is 0: then no header block depends on earlier ones, and equal blocks are
decoded once.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

from hpack import Decoder, HPACKError

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x1, 0x4, 0x8, 0x20
ACK = 0x1
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5
REFUSED_STREAM = 7

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_MAX = 16_384
"""The longest frame that either side may send, unless the receiver allows more."""
WINDOW = 65_535
"""How many bytes a sender may send before the receiver allows more, unless its settings say otherwise."""
WINDOW_MAX = 2**31 - 1
CALL_BYTES_MAX = 2**26
"""How many bytes of messages may wait to be taken. etcd's largest reply to a request of ours is far smaller."""
PINGS_BYTES_MAX = 17 * 64
"""Replies to pings that wait to be sent. Of more pings the last ones are answered."""
LET_FLOW = 2**24
"""After this many received bytes we allow the server to send as many again."""

_FRAME = struct.Struct(">HBBBI")
_MESSAGE = struct.Struct(">BI")


class MalformedFrame(ValueError):
    """These bytes are not from a gRPC server."""


class StreamRefused(Exception):
    """The server says that it has not carried out this call."""


class GrpcStatus(NamedTuple):
    """How a call ended: a gRPC status code (0 is OK), and its message."""

    code: int
    text: str


OK, UNKNOWN = 0, 2


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


PING_FRAME = frame(PING, 0, 0, b"fenced..")


# Headers (HPACK). Those of a request are written literally: they are the same bytes each time.


def head(scheme: str, authority: str, path: str, metadata: Sequence[tuple[str, str]], token: str) -> bytes:
    """The headers of a call. The token is marked as never indexed: no proxy may keep it in a table."""
    pairs = [
        (":method", "POST"),
        (":scheme", scheme),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "fenced"),
        *metadata,
    ]
    block = b"".join(_literal(0x00, *pair) for pair in pairs)
    return block + _literal(0x10, "token", token) if token else block


def _literal(kind: int, name: str, value: str) -> bytes:
    return bytes([kind]) + _text(name.encode()) + _text(value.encode())


def _text(raw: bytes) -> bytes:
    size = len(raw)
    if size < 0x7F:
        return bytes([size]) + raw
    size -= 0x7F
    out = bytearray(b"\x7f")
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out) + raw


def headers(block: bytes) -> dict[str, str]:
    """Decode a header block that refers to no other block."""
    decoder = Decoder()
    decoder.header_table_size = decoder.max_allowed_table_size = 0
    try:
        return {str(name): str(value) for name, value in decoder.decode(block)}
    except (HPACKError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"headers that cannot be read: {error}") from error


@lru_cache(maxsize=256)
def status(block: bytes) -> GrpcStatus | None:
    """How a call ended; None if these headers carry no status."""
    found = headers(block)
    if found.get(":status", "200") != "200":
        raise MalformedFrame(f"HTTP status {found[':status']}: this is no gRPC server, or a proxy before it")
    code = found.get("grpc-status", "")
    return (
        GrpcStatus(int(code), unquote(found.get("grpc-message", "")))
        if code.isdecimal() and len(code) < 4
        else None
    )


class GrpcConnection:
    """The state of one connection. Its methods take received bytes and return bytes to send."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        """The messages that arrived in the current call, or the last one."""
        self.status: GrpcStatus | None = None
        """How that call ended; None while it is in progress."""
        self.closing = False
        """Whether the server accepts no more calls on this connection."""
        self.pings = b""
        """Replies to pings; the caller decides when to send them. etcd pings in each call to measure the bandwidth."""
        self._stream = -1
        self._in = b""
        self._waiting = 0
        """How many bytes the messages have that nobody has taken."""
        self._partial = bytearray()
        """The first bytes of a message that has not arrived completely."""
        self._block: tuple[int, int, bytes] | None = None
        """A header block that has not arrived completely: its stream, flags and bytes."""
        self._unsent = bytearray()
        self._ending = self._ended = False
        self._window, self._stream_window, self._window_first = WINDOW, WINDOW, WINDOW
        self._frame_max = FRAME_MAX
        self._taken = self._stream_taken = 0

    def hello(self) -> bytes:
        """The first bytes that a client sends."""
        settings = ((HEADER_TABLE_SIZE, 0), (ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, WINDOW_MAX))
        payload = b"".join(struct.pack(">HI", *setting) for setting in settings)
        return PREFACE + frame(SETTINGS, 0, 0, payload) + _more(0, WINDOW_MAX - WINDOW)

    # Sending.

    def begin(self, head: bytes, requests: Sequence[bytes], *, end: bool = True) -> bytes:
        """Begin a call; without `end` more messages can follow. The call before must have ended."""
        if len(head) > self._frame_max:
            raise MalformedFrame("the server's own token is too long to be sent back")
        if self.closing:
            raise StreamRefused("the server closes the connection")
        self._stream += 2
        self.closing = self._stream > WINDOW_MAX - 2  # no stream ids are left
        self.take()
        self.status = None
        self._partial.clear()
        self._stream_taken = 0
        self._stream_window = self._window_first
        self._unsent.clear()
        self._ended = False
        return frame(HEADERS, END_HEADERS, self._stream, head) + self.send(requests, end=end)

    def send(self, requests: Sequence[bytes], *, end: bool = False) -> bytes:
        """Send more messages in the current call; returns bytes to send."""
        said = b"".join([_MESSAGE.pack(0, len(request)) + request for request in requests])
        self._ending = end
        room = min(self._window, self._stream_window, self._frame_max)
        if self._unsent or len(said) > room:
            self._unsent += said
            return self._due()
        self._ended = end
        self._window -= len(said)
        self._stream_window -= len(said)
        return frame(DATA, END_STREAM if end else 0, self._stream, said) if said or end else b""

    def _due(self) -> bytes:
        """As many of the unsent bytes as the server's windows allow."""
        out = []
        while (self._unsent or self._ending) and not self._ended and self.status is None:
            size = min(len(self._unsent), self._window, self._stream_window, self._frame_max)
            if self._unsent and size <= 0:
                break
            self._ended = self._ending and size == len(self._unsent)
            out.append(
                frame(DATA, END_STREAM if self._ended else 0, self._stream, bytes(self._unsent[:size]))
            )
            del self._unsent[:size]
            self._window -= size
            self._stream_window -= size
        return b"".join(out)

    # Receiving.

    def take(self) -> list[bytes]:
        """The messages that have arrived since the last call of this."""
        taken = list(self.messages)
        self.messages.clear()
        self._waiting = 0
        return taken

    def receive(self, data: bytes) -> bytes:
        """Process received bytes; returns bytes to send. StreamRefused: the server did not carry out this call."""
        data = self._in + data if self._in else data
        answers, at, end = b"", 0, len(data)
        while end - at >= 9:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, at)
            size = high << 8 | low
            if size > FRAME_MAX:
                raise MalformedFrame("this is no gRPC server: it answers in another protocol")
            if end - at < 9 + size:
                break
            payload = data[at + 9 : at + 9 + size]
            at += 9 + size
            answers += self._frame(kind, flags, stream & WINDOW_MAX, payload)
        self._in = data[at:]
        return answers

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        if kind == DATA:
            return self._data(flags, stream, payload)
        if kind == HEADERS:
            payload = _unpadded(flags, payload)
            self._headers(flags, stream, payload[5:] if flags & PRIORITY else payload)
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != stream:
                raise MalformedFrame("headers without a beginning")
            _, before, block = self._block
            self._headers(flags & END_HEADERS | before, stream, block + payload)
        elif kind == RST_STREAM:
            self._reset(stream, *_numbers(">I", payload))
        elif kind == SETTINGS and not flags & ACK:
            return self._settings(payload) + frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self.pings = (self.pings + frame(PING, ACK, 0, payload))[-PINGS_BYTES_MAX:]
        elif kind == GOAWAY:
            self._goes_away(payload)
        elif kind == WINDOW_UPDATE:
            (more,) = _numbers(">I", payload)
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
            return self._due()
        return b""  # frame types that we do not know are ignored

    def _data(self, flags: int, stream: int, payload: bytes) -> bytes:
        self._taken += len(payload)
        if stream == self._stream and self.status is None:
            self._stream_taken += len(payload)
            self._partial += _unpadded(flags, payload)
            self._cut()
            if flags & END_STREAM:
                self.status = GrpcStatus(UNKNOWN, "the server ended the call without a status")
        more = b""
        if self._taken >= LET_FLOW:
            more, self._taken = _more(0, self._taken), 0
        if self._stream_taken >= LET_FLOW and self.status is None:
            more, self._stream_taken = more + _more(stream, self._stream_taken), 0
        return more

    def _cut(self) -> None:
        """Take out the messages that have arrived completely."""
        at, end = 0, len(self._partial)
        while end - at >= 5:
            packed, size = _MESSAGE.unpack_from(self._partial, at)
            if packed:
                raise MalformedFrame("a compressed message, although no compression was offered")
            if size > CALL_BYTES_MAX or self._waiting > CALL_BYTES_MAX:
                raise MalformedFrame(f"more than {CALL_BYTES_MAX} bytes of messages in one call")
            if end - at < 5 + size:
                break
            self._waiting += 5 + size
            self.messages.append(bytes(self._partial[at + 5 : at + 5 + size]))
            at += 5 + size
        del self._partial[:at]

    def _headers(self, flags: int, stream: int, block: bytes) -> None:
        if len(block) > 16 * FRAME_MAX:
            raise MalformedFrame("headers without an end")
        self._block = None if flags & END_HEADERS else (stream, flags & END_STREAM, block)
        if self._block is not None or stream != self._stream or self.status is not None:
            return
        found = status(block)
        if flags & END_STREAM:
            if found is None:
                raise MalformedFrame("a call ended without a status")
            self.status = found

    def _reset(self, stream: int, code: int) -> None:
        if stream == self._stream and self.status is None:
            if code == REFUSED_STREAM:
                raise StreamRefused("the server has too much to do")
            self.status = GrpcStatus(UNKNOWN, f"the server broke the call off (HTTP/2 error {code})")

    def _goes_away(self, payload: bytes) -> None:
        last, _ = _numbers(">II", payload[:8])
        self.closing = True
        if self._stream > last & WINDOW_MAX and self.status is None:
            raise StreamRefused("the server closes the connection")

    def _settings(self, payload: bytes) -> bytes:
        for at in range(0, len(payload), 6):
            setting, value = _numbers(">HI", payload[at : at + 6])
            if setting == INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._window_first
                self._window_first = value
            elif setting == MAX_FRAME_SIZE:
                self._frame_max = value
        return self._due()


def _more(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise MalformedFrame("more padding than there is")
    return payload[1 : len(payload) - payload[0]]


def _numbers(form: str, payload: bytes) -> tuple[int, ...]:
    try:
        return struct.unpack(form, payload)
    except struct.error as error:
        raise MalformedFrame(f"a frame of another length: {error}") from error
