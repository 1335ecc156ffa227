"""The server's side of gRPC over HTTP/2, as much as an in-memory etcd needs. Pure: bytes come in, bytes go out."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from hpack import Encoder

from fenced.stores.etcd.wire import http2

_FRAME_HEAD = struct.Struct(">HBBBI")
_MESSAGE_HEAD = struct.Struct(">BI")

PING_EVERY_BYTES = 4096
"""A server that measures its bandwidth pings now and then; etcd does it in nearly every call."""
WINDOW_STEP = 16_384
"""After this many bytes the client may send as many again."""


class GrpcCall(NamedTuple):
    """What a client did in one call: it opened it, sent messages in it, ended its side or cancelled it."""

    stream: int
    path: str
    headers: dict[str, str]
    messages: list[bytes]
    ended: bool
    cancelled: bool = False


@lru_cache(maxsize=256)
def _head(block: bytes) -> dict[str, str]:
    return http2.headers(block)


@lru_cache(maxsize=256)
def _block(*pairs: tuple[str, str]) -> bytes:
    encoder = Encoder()
    encoder.header_table_size = 0  # as the client demands
    return encoder.encode(pairs)


class GrpcServerConnection:
    """One client's connection. `receive` returns what the client did; the other methods return bytes to send."""

    def __init__(self) -> None:
        self._in = b""
        self._greeted = False
        self._heads: dict[int, dict[str, str]] = {}
        self._partial: dict[int, bytearray] = {}
        self._replied: set[int] = set()
        self._taken = self._pinged = 0
        self.last = 0
        """The highest stream that the client has opened."""
        self.out = b""
        """Bytes to send in addition to replies: settings, windows, pings."""

    def receive(self, data: bytes) -> Iterator[GrpcCall]:
        self._in += data
        if not self._greeted:
            if len(self._in) < len(http2.PREFACE):
                return
            if not self._in.startswith(http2.PREFACE):
                raise http2.MalformedFrame("this is no HTTP/2 client")
            self._in = self._in[len(http2.PREFACE) :]
            self._greeted = True
            self.out += http2.frame(http2.SETTINGS, 0, 0, b"")
        while len(self._in) >= _FRAME_HEAD.size:
            high, low, kind, flags, stream = _FRAME_HEAD.unpack_from(self._in)
            end = _FRAME_HEAD.size + (high << 8 | low)
            if len(self._in) < end:
                return
            payload, self._in = self._in[_FRAME_HEAD.size : end], self._in[end:]
            call = self._frame(kind, flags, stream, payload)
            if call is not None:
                yield call

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> GrpcCall | None:
        if kind == http2.HEADERS:
            if not flags & http2.END_HEADERS or flags & (http2.PADDED | http2.PRIORITY):
                raise http2.MalformedFrame("headers in several frames: our client sends none")
            if stream <= self.last:
                raise http2.MalformedFrame("a stream is opened twice")
            self.last = stream
            self._heads[stream], self._partial[stream] = _head(payload), bytearray()
            return self._call(stream, flags)
        if kind == http2.DATA:
            self._flow(stream, len(payload))
            if stream not in self._heads:
                return None
            self._partial[stream] += payload
            return self._call(stream, flags)
        if kind == http2.RST_STREAM and stream in self._heads:
            head = self._heads[stream]
            self._forget(stream)
            return GrpcCall(stream, head[":path"], head, [], True, cancelled=True)
        if kind == http2.SETTINGS and not flags & http2.ACK:
            self.out += http2.frame(http2.SETTINGS, http2.ACK, 0, b"")
        elif kind == http2.PING and not flags & http2.ACK:
            self.out += http2.frame(http2.PING, http2.ACK, 0, payload)
        return None

    def _flow(self, stream: int, size: int) -> None:
        """Let the client send more. Counted for the connection; a stream gets as much, which is never too little."""
        self._taken += size
        self._pinged += size
        if self._taken >= WINDOW_STEP:
            more = struct.pack(">I", self._taken)
            self._taken = 0
            self.out += http2.frame(http2.WINDOW_UPDATE, 0, 0, more)
            self.out += http2.frame(http2.WINDOW_UPDATE, 0, stream, more)
        if self._pinged >= PING_EVERY_BYTES:
            self._pinged = 0
            self.out += http2.frame(http2.PING, 0, 0, b"bandwid!")

    def _call(self, stream: int, flags: int) -> GrpcCall:
        head, partial, messages = self._heads[stream], self._partial[stream], []
        while len(partial) >= _MESSAGE_HEAD.size:
            end = _MESSAGE_HEAD.size + _MESSAGE_HEAD.unpack_from(partial)[1]
            if len(partial) < end:
                break
            messages.append(bytes(partial[_MESSAGE_HEAD.size : end]))
            del partial[:end]
        return GrpcCall(stream, head[":path"], head, messages, bool(flags & http2.END_STREAM))

    def _forget(self, stream: int) -> None:
        self._heads.pop(stream, None)
        self._partial.pop(stream, None)
        self._replied.discard(stream)

    # Sending.

    def reply(self, stream: int, message: bytes) -> bytes:
        """One message in an open call; nothing if the call is not open."""
        if stream not in self._heads:
            return b""
        head = b""
        if stream not in self._replied:
            self._replied.add(stream)
            block = _block((":status", "200"), ("content-type", "application/grpc"))
            head = http2.frame(http2.HEADERS, http2.END_HEADERS, stream, block)
        said = _MESSAGE_HEAD.pack(0, len(message)) + message
        parts = [said[at : at + http2.FRAME_MAX] for at in range(0, len(said), http2.FRAME_MAX)]
        return head + b"".join(http2.frame(http2.DATA, 0, stream, part) for part in parts)

    def finish(self, stream: int, code: int = http2.OK, text: str = "") -> bytes:
        """End a call with a status."""
        if stream not in self._heads:
            return b""
        first = () if stream in self._replied else ((":status", "200"), ("content-type", "application/grpc"))
        message = (("grpc-message", quote(text)),) if text else ()
        block = _block(*first, ("grpc-status", str(code)), *message)
        self._forget(stream)
        return http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, block)

    def refuse(self, stream: int) -> bytes:
        """The call was not carried out."""
        self._forget(stream)
        return http2.frame(http2.RST_STREAM, 0, stream, struct.pack(">I", http2.REFUSED_STREAM))

    def goes_away(self) -> bytes:
        """Refuse later calls on this connection; open calls continue to their end."""
        return http2.frame(http2.GOAWAY, 0, 0, struct.pack(">II", self.last, 0))
